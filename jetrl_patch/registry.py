"""What adapters offer, as types, and the one place that imports adapters, by name."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

from jetrl_patch.config import Config as Config
from jetrl_patch.errors import JetrlError, PatchError, VersionError, explain
from jetrl_patch.patching.guards import is_installed
from jetrl_patch.patching.journal import Journal as Journal
from jetrl_patch.patching.patch import OnImport as OnImport
from jetrl_patch.patching.patch import Patch as Patch

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.measure.parity import Job, Sample, Sampled, Scored, Step
    from jetrl_patch.progress import Progress

# ---- A training framework's adapter, the counterpart of ``Installer`` in ``sync/receive.py`` ------
# A module with these functions is a ``Trainer``. The adapter offers it in ``Services``, where mypy compares signatures. It calls
# what every framework shares (``jetrl_patch/trainer/``):
#
# 1. settings: ``problems`` checks the framework's settings against a table of ``rules.Rule``, ``complete`` completes them;
# 2. driver: writes ``Config.to_env()`` into the framework's settings; every other process calls ``rules.check``;
# 3. model: ``prepare`` converts it through ``trainer.source.convert`` before the framework wraps it;
# 4. sync: ``Source.begin_sync``, then ``Source.stream`` over full weights, then ``audit.sync_report``;
# 5. log: ``audit.sync_metrics`` and ``audit.step_metrics`` go into ``source.Driver``, and from there into the step's log.

class Pool(NamedTuple):
    """GPUs that a launch asks Ray for."""

    setting: str
    per_node: int
    nodes: int


class Place(NamedTuple):
    """A file, folder or hub name that a setting points to; ``path`` is empty if the setting is required but missing."""

    setting: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a launch needs on its machine.

    Attributes:
        pools: its GPUs; no pool shares a GPU with another.
        num_gpus: the setting that tells Ray how many GPUs there are, and its value (None: Ray counts them).
        cluster: the setting and the address of a running Ray cluster; an empty path if the launch starts Ray.
        models: models other than the policy.
        tokenizer: where the tokenizer is.
        data: data files, and data sets of a hub if the framework supports them.
        files: the user's code.
        own_data: whether the user's own class reads the data. A path then need not be a file.
        interpreter: the command that runs Ray's workers instead of this Python; otherwise an empty path.
        resumes: the checkpoint that the run resumes from; an empty path if it starts from scratch.
    """

    pools: tuple[Pool, ...]
    num_gpus: tuple[str, int | None]
    cluster: Place
    models: tuple[Place, ...]
    tokenizer: Place
    data: tuple[Place, ...]
    files: tuple[Place, ...]
    own_data: bool
    interpreter: Place
    resumes: Place


class Shard(NamedTuple):
    """How something is stored: bytes per parameter, and the number of ranks that share them."""

    bytes: float
    ranks: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a launch stores the policy, for an estimate of its memory.

    Attributes:
        trainer: the engine and its ranks in words; without ``weights``, why the trainer's part is unknown.
        weights, gradients: of the trainer.
        optimizer: FP32 masters, which the optimizer keeps next to AdamW's moments and splits in the same way.
        reshards: whether gathered weights are freed after a layer's forward.
        offloaded: those of "weights", "gradients" and "optimizer" that are in CPU memory.
        tensor_parallel, expert_parallel: the rollout's sizes.
        utilization: the share of a GPU that an engine takes; None if the setting is not a share.
    """

    trainer: str
    weights: Shard | None = None
    gradients: Shard | None = None
    optimizer: Shard | None = None
    reshards: bool = True
    offloaded: tuple[str, ...] = ()
    tensor_parallel: int = 1
    expert_parallel: int = 1
    utilization: float | None = None


class Trainer(Protocol):
    """A training framework. ``settings`` is the framework's own object, as its main function receives it."""

    @property
    def programs(self) -> Collection[str]:
        """The modules whose command lines ``read`` can parse, the framework's main program first."""

    def read(self, arguments: Sequence[str], target: str = ..., /) -> Any:
        """Parse the command line of one of ``programs``. Raises ConfigError with the framework's message."""

    def asked_for(self, settings: Any, environ: Mapping[str, str], /) -> Config | None:
        """The plugin's settings among the framework's; None if there are none."""

    def chosen(self, settings: Any, asked: Config, /) -> Config:
        """The plugin's settings, with those that the user left open as the training engine needs them."""

    def problems(self, settings: Any, config: Config, /) -> Iterator[JetrlError]:
        """Yield an error for each setting that the plugin cannot support."""

    def complete(self, settings: Any, config: Config, /) -> list[str]:
        """Write what the mode needs into the settings. Returns a description of each change."""

    def model_path(self, settings: Any, /) -> tuple[str, str]:
        """The path of the model, and the name of its setting."""

    def program_problem(self, target: str, /) -> JetrlError | None:
        """The error for an unsupported program of the framework, given as a dotted module or a script's path; else None."""

    def needs_flash_attn(self, settings: Any, /) -> str:
        """The setting that needs flash-attn on a GPU, or an empty string."""

    def needs(self, settings: Any, /) -> Needs:
        """What a launch with these settings needs on its machine."""

    def layout(self, settings: Any, config: Config, /) -> Layout:
        """Where a launch with these settings stores the policy."""

    def prepare(self, model: Any, config: Config, engine: Any, /) -> object:
        """Convert a loaded model in place, before ``engine`` wraps it. Return the ``Source`` of its weight syncs."""


# ---- The services that adapters offer to each other and to the core, as types --------------------
# Each service is a protocol. A module implements it with its functions: an adapter offers the module itself, and mypy checks the
# signatures.

class Exchange(Protocol):
    """Exchanges tokens for heads among the ``size`` ranks that share sequences of T tokens. Differentiable, collective."""

    size: int

    def to_heads(self, x: Tensor, /) -> Tensor:
        """All heads of a slice [B, H, T/size, D] -> some heads of all tokens [B, H/size, T, D]."""

    def to_slices(self, x: Tensor, /) -> Tensor:
        """Some heads of all tokens [B, T, H/size, D] -> all heads of a slice [B, T/size, H, D]."""

    def gather(self, positions: Tensor, /) -> Tensor:
        """The positions of a slice [B, T/size] -> those of all tokens [B, T]."""


class Models(Protocol):
    """Computes Hugging Face models as the trainer does."""

    def prepare_model(self, model: Any, config: Config, /, rollout_tp: int, device_type: str, rollout_ep: int = 1) -> list[str]:
        """Convert a loaded model in place and return the names of its quantized layers."""

    def share_sequences(self, model: Any, exchange: Exchange, /) -> None:
        """Let attention see whole sequences although each rank of ``exchange`` holds a slice. Raises ModelError."""

    def to_bf16(self, layers: Mapping[str, Any], /, exact: bool) -> None:
        """Take layers of a converted model out of FP8: all of them, or none with an error."""

    def score(self, job: Job, samples: Sequence[Sample], progress: Progress, /) -> Scored:
        """The trainer's log-probs of the sampled tokens."""

    def explain(self, job: Job, samples: Sequence[Sample], progress: Progress, /) -> list[Step]:
        """How much each op of the trainer adds to the mismatch with an exact rollout."""


class Rollout(Protocol):
    """The rollout engine."""

    def sample(self, job: Job, progress: Progress, /) -> Sampled:
        """Sampled tokens with the log-probs that the engine gave them."""

    def install(self, engine: Any, pairs: Iterable[tuple[str, Tensor]], /) -> None:
        """Install the messages of a weight sync into an engine in this process. Raises ConfigError for any other engine."""

    def check_kv_cache(self, exact: bool, /) -> None:
        """Raise a JetrlError on a machine without an FP8 KV cache, in exact mode or outside."""

    def routes_error(self, what: str, /) -> JetrlError | None:
        """The error about the setting ``what`` if the engine cannot return the chosen experts; None if it can."""

    def argument_problems(
        self, given: Mapping[str, Any], config: Config, rollout_tp: int, name: Callable[[str], str], /
    ) -> Iterator[JetrlError]:
        """Yield an error for each engine argument that the mode does not support; ``name`` returns the user's name of one."""


class Platform(Protocol):
    """The kind of machine a run uses."""

    def is_cpu_run(self, config: Config, /) -> bool:
        """Whether the run computes on the CPU."""

    def logical_gpus(self, framework: str, /) -> int:
        """The default number of logical GPUs in a framework's CPU run."""


class Merger(Protocol):
    """Merges the shards of a training checkpoint into one Hugging Face folder."""

    def merge(self, checkpoint: Path, target: Path, /) -> None:
        """Write ``checkpoint`` to ``target`` as a BF16 Hugging Face folder. Raises ConfigError if that fails."""


@dataclass(frozen=True)
class Services:
    """The services of one adapter; None for those it does not offer."""

    models: Models | None = None
    rollout: Rollout | None = None
    platform: Platform | None = None
    trainer: Trainer | None = None
    merger: Merger | None = None


# ---- The lifecycle of an adapter, the code that knows one framework ------------------------------
# For each adapter whose framework is installed, ``enable()`` checks the versions in ``requires``, calls ``check``, ``patches``
# and ``hooks``, and looks for the modules that they name without importing them. Once all adapters have passed, it calls
# ``on_apply``. ``disable()`` rolls back the journal and calls ``on_undo``.

class Adapter:
    """One framework. ``jetrl_patch.adapters.<name>.adapter:ADAPTER`` is an instance of a subclass."""

    #: the name of the folder; ``ADAPTERS`` says for which frameworks the adapter is used
    name: ClassVar[str] = ""
    #: distributions that must be in their supported range (keys of ``_versions.SUPPORTED``)
    requires: ClassVar[tuple[str, ...]] = ()

    def check(self, config: Config) -> None:
        """Raise a JetrlError if the run is certain to fail. Change nothing."""

    def patches(self, config: Config) -> Sequence[Patch]:
        """The attributes to replace, now or after the import of their module."""
        return ()

    def hooks(self, config: Config) -> Sequence[OnImport]:
        """Changes to a module other than replaced attributes, such as a registry entry."""
        return ()

    def services(self) -> Services:
        """What the adapter offers other adapters and the core. Imports the adapter's modules, not its framework."""
        return Services()

    def on_apply(self, config: Config, journal: Journal) -> None:
        """Make the changes that wait for no import, through the journal."""

    def on_undo(self) -> None:
        """Drop the adapter's own state. Called after the journal is rolled back."""


# ---- The adapters by name, and the services each one offers. No other module imports an adapter --

T = TypeVar("T")

#: adapter -> import names of its frameworks, at least one of which must be installed; in the order of application
ADAPTERS: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers",),
    "vllm": ("vllm",),
    "cpu": ("vllm", "verl", "openrlhf"),
    "ray": ("ray",),
    "verl": ("verl",),
    "openrlhf": ("openrlhf",),
}


def installed() -> list[Adapter]:
    """The adapters whose framework is installed, in the order of application. Raises VersionError if there are none."""
    found = [resolve(name) for name, needs in ADAPTERS.items() if any(map(is_installed, needs))]
    if not found:
        frameworks = dict.fromkeys(need for needs in ADAPTERS.values() for need in needs)
        required, fix = f"one of {', '.join(frameworks)}", "install one, for instance with `pip install 'verl[vllm]'`"
        raise VersionError(explain("enable()", required=required, found="none of them installed", fix=fix))
    return found


def resolve(name: str) -> Adapter:
    """The adapter of this name; its framework need not be installed. Raises PatchError if the adapter is missing."""
    try:
        importlib.import_module("jetrl_patch.adapters")
    except ModuleNotFoundError as error:
        if error.name != "jetrl_patch.adapters":
            raise
        what, found = "jetrl_patch.adapters", f"the source folder {os.path.dirname(__file__)}, which has no adapters"
        fix = "install the clone with `pip install -e .`, or start Python from another folder"
        raise PatchError(explain(what, required="an installed jetrl_patch", found=found, fix=fix)) from error
    path = f"jetrl_patch.adapters.{name}.adapter"
    try:
        adapter: Adapter = importlib.import_module(path).ADAPTER
    except (ModuleNotFoundError, AttributeError) as error:
        missing = getattr(error, "name", None)
        if missing not in (path, path.rpartition(".")[0], "ADAPTER"):
            raise
        raise PatchError(f"{path}:ADAPTER is missing. Reinstall jetrl_patch.") from error
    return adapter


def models() -> Models:
    """The service that computes Hugging Face models as the trainer does."""
    return _offered(resolve("transformers").services().models)


def rollout() -> Rollout:
    """The rollout engine."""
    return _offered(resolve("vllm").services().rollout)


def platform() -> Platform:
    """The service that tells a CPU run from others."""
    return _offered(resolve("cpu").services().platform)


def trainer(framework: str) -> Trainer:
    """The training framework of this name: "verl" or "openrlhf"."""
    return _offered(resolve(framework).services().trainer)


def merger() -> Merger:
    """The service that merges the shards of a training checkpoint (verl's)."""
    return _offered(resolve("verl").services().merger)


def _offered(service: T | None) -> T:
    assert service is not None, "the adapter does not offer this service"
    return service
