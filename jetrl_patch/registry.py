"""What adapters offer, as types, and the one place that imports adapters, by their entry points."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

from jetrl_patch.config import Config as Config
from jetrl_patch.errors import JetrlError, PatchError, VersionError, explain
from jetrl_patch.patching.discovery import distribution, is_ours, offered
from jetrl_patch.patching.discovery import programs as programs
from jetrl_patch.patching.guards import is_installed
from jetrl_patch.patching.journal import Journal as Journal
from jetrl_patch.patching.patch import OnImport as OnImport
from jetrl_patch.patching.patch import Patch as Patch

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from torch import Tensor

    from jetrl_patch.measure.parity import Job, Sample, Sampled, Scored, Step
    from jetrl_patch.progress import Progress
    from jetrl_patch.sync.orders import Group

# ---- A training framework's adapter, the counterpart of ``Installer`` in ``sync/receive.py`` ------
# A module with these functions is a ``Trainer``. ``Adapter.trainer`` returns it, where mypy compares signatures. It calls
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
# Each service is a protocol. A module implements it with its functions: an adapter returns the module itself, and mypy checks the
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

    def join(self, host: str, port: int, rank: int, size: int, device: Any, /) -> Group:
        """Join a group of ``size`` processes, the first of which listens at ``host`` and ``port``. Collective."""

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


# ---- The lifecycle of an adapter, the code that knows one framework ------------------------------
# For each adapter whose framework is installed, ``enable()`` checks the versions in ``requires``, calls ``check``, ``patches``
# and ``hooks``, and looks for the modules that they name without importing them. Once all adapters have passed, it calls
# ``on_apply``. ``disable()`` rolls back the journal and calls ``on_undo``.

class Adapter:
    """One framework. A package offers an instance of a subclass under the entry-point group ``jetrl_patch.adapters``.

    Importing its module and calling the methods that return services must not import the framework, or anything as slow.
    """

    #: its name, for people
    name: ClassVar[str] = ""
    #: import names of its frameworks, at least one of which must be installed; empty: the adapter's name
    frameworks: ClassVar[tuple[str, ...]] = ()
    #: adapters with a smaller number are applied first
    order: ClassVar[int] = 10
    #: distributions that must be in their supported range: keys of ``_versions.SUPPORTED``, or PEP 508 requirements
    requires: ClassVar[tuple[str, ...]] = ()
    #: packages that only this framework's runs need, its own first; the doctor checks them
    packages: ClassVar[tuple[str, ...]] = ()
    #: which of its trainers the adapter patches, for messages; empty if there are none
    trainers: ClassVar[str] = ""
    #: whether the framework's own configuration can enable the plugin
    has_section: ClassVar[bool] = False

    def check(self, config: Config) -> None:
        """Raise a JetrlError if the run is certain to fail. Change nothing."""

    def patches(self, config: Config) -> Sequence[Patch]:
        """The attributes to replace, now or after the import of their module."""
        return ()

    def hooks(self, config: Config) -> Sequence[OnImport]:
        """Changes to a module other than replaced attributes, such as a registry entry."""
        return ()

    def models(self) -> Models | None:
        """The service that computes Hugging Face models as the trainer does."""
        return None

    def rollout(self) -> Rollout | None:
        """The rollout engine."""
        return None

    def platform(self) -> Platform | None:
        """The service that tells a CPU run from others."""
        return None

    def trainer(self) -> Trainer | None:
        """The training framework."""
        return None

    def merger(self) -> Merger | None:
        """The service that merges the shards of a training checkpoint."""
        return None

    def trains(self, trainer: Any) -> bool:
        """Whether a ``transformers.Trainer`` is one whose models and engine the adapter has prepared."""
        return False

    def on_apply(self, config: Config, journal: Journal) -> None:
        """Make the changes that wait for no import, through the journal."""

    def on_undo(self) -> None:
        """Drop the adapter's own state. Called after the journal is rolled back."""


# ---- The adapters that installed packages offer, and their services. No other module imports an adapter ----

T = TypeVar("T")


@functools.cache
def adapters() -> tuple[Adapter, ...]:
    """All adapters, in the order of application. Their frameworks need not be installed. Raises PatchError if one is broken."""
    return tuple(sorted((_load(point) for point in offered().values()), key=lambda adapter: (adapter.order, adapter.name)))


def installed() -> list[Adapter]:
    """The adapters whose framework is installed, in the order of application. Raises VersionError if there are none."""
    needs = {adapter: adapter.frameworks or (adapter.name,) for adapter in adapters()}
    found = [adapter for adapter, names in needs.items() if any(map(is_installed, names))]
    if not found:
        required = f"one of {', '.join(dict.fromkeys(name for names in needs.values() for name in names))}"
        fix = "install one, for instance with `pip install 'verl[vllm]'`"
        raise VersionError(explain("enable()", required=required, found="none of them installed", fix=fix))
    return found


def resolve(name: str) -> Adapter:
    """The adapter of this name. Raises PatchError if there is none."""
    for adapter in adapters():
        if adapter.name == name:
            return adapter
    known, fix = ", ".join(adapter.name for adapter in adapters()), "install the package that offers it"
    raise PatchError(explain("adapter", required=f"one of {known}", found=name, fix=fix))


def models() -> Models:
    """The service that computes Hugging Face models as the trainer does."""
    return _first(lambda adapter: adapter.models())


def rollout() -> Rollout:
    """The rollout engine."""
    return _first(lambda adapter: adapter.rollout())


def platform() -> Platform:
    """The service that tells a CPU run from others."""
    return _first(lambda adapter: adapter.platform())


def trainer(framework: str) -> Trainer:
    """The training framework of this name, a key of ``programs``."""
    found = resolve(framework).trainer()
    assert found is not None, f"{framework} does not train"
    return found


def trainers() -> str:
    """The trainers that adapters patch, for messages."""
    return " or ".join(sorted(adapter.trainers for adapter in adapters() if adapter.trainers))


def merger() -> Merger:
    """The service that merges the shards of a training checkpoint."""
    return _first(lambda adapter: adapter.merger())


def _first(service: Callable[[Adapter], T | None]) -> T:
    """What the first adapter with this service offers."""
    for adapter in adapters():
        found = service(adapter)
        if found is not None:
            return found
    raise PatchError("no adapter offers this service. Reinstall jetrl_patch.")


def _load(point: EntryPoint) -> Adapter:
    if is_ours(point):
        _require_installed()
    what = f"adapter {point.name} of {distribution(point)}"
    try:
        found = point.load()
    except Exception as error:
        fix = "update or uninstall the package"
        raise PatchError(explain(what, required=point.value, found=repr(error), fix=fix)) from error
    if not isinstance(found, Adapter):
        required = "an instance of jetrl_patch.registry.Adapter"
        raise PatchError(explain(what, required=required, found=repr(found), fix=f"correct {point.value}"))
    return found


def _require_installed() -> None:
    """Raise PatchError if Python found the source folder, which has no adapters, in place of the installed package."""
    if find_spec("jetrl_patch.adapters") is None:
        found = f"the source folder {os.path.dirname(__file__)}, which has no adapters"
        fix = "install the clone with `pip install -e .`, or start Python from another folder"
        raise PatchError(explain("jetrl_patch.adapters", required="an installed jetrl_patch", found=found, fix=fix))
