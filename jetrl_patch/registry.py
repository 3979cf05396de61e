"""What adapters offer, as types, and the one place that imports adapters, by their entry points."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from jetrl_patch.config import Config as Config
from jetrl_patch.config.launches import Launch as Launch
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

    from jetrl_patch.measure.parity import Job, Sampled
    from jetrl_patch.progress import Progress
    from jetrl_patch.sync.orders import Group

# ---- What the adapter of a training framework does, the counterpart of ``Installer`` in ``sync/receive.py`` ------
# For the doctor, ``Adapter.launches`` returns a module with the functions of ``launches.Launch``; a framework that runs from the
# user's own script needs none. In a run, its patches call what every framework shares (``jetrl_patch/trainer/``):
#
# 1. settings: a table of ``rules.Rule`` checks the framework's settings, and what the mode needs is written into them;
# 2. driver: writes ``Config.to_env()`` into the framework's settings; every other process calls ``rules.check``;
# 3. model: ``trainer.source.convert`` converts it before the framework wraps it;
# 4. sync: ``Source.begin_sync``, then ``Source.stream`` over full weights, then ``audit.sync_report``;
# 5. log: ``audit.sync_metrics`` and ``audit.step_metrics`` go into ``source.Driver``, and from there into the step's log.

# ---- The services that adapters offer to each other and to the core, as types --------------------
# Each service is a protocol. A module implements it with its functions: an adapter returns the module itself, and mypy checks the
# signatures.

class Parallel(Protocol):
    """Builds Megatron-Core models that compute as the rollout does."""

    def settings(self, hf_config: Any, /) -> dict[str, Any]:
        """The values of Megatron's configuration that a model needs, to be set before it is built."""

    def layer_spec(
        self, hf_config: Any, config: Config, /, rollout_tp: int, rollout_ep: int, device_type: str
    ) -> Callable[..., Any]:
        """(Megatron's configuration, virtual pipeline stage) -> spec of this rank's layers. Raises ModelError, ConfigError."""

    def finish(self, chunks: Sequence[Any], /) -> None:
        """Make the built chunks of a model exact where a spec does not reach, and check their layers. Raises ModelError."""


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

    def parameter_problems(
        self, given: Mapping[str, Any], config: Config, name: Callable[[str], str], /
    ) -> Iterator[JetrlError]:
        """Yield an error for each sampling parameter that exact mode does not support, as ``argument_problems``."""


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

    def parallel(self) -> Parallel | None:
        """The service that builds Megatron-Core models."""
        return None

    def rollout(self) -> Rollout | None:
        """The rollout engine."""
        return None

    def platform(self) -> Platform | None:
        """The service that tells a CPU run from others."""
        return None

    def launches(self) -> Launch | None:
        """What the doctor and the launcher ask; None for a framework without a command line of its own."""
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


def parallel() -> Parallel:
    """The service that builds Megatron-Core models."""
    return _first(lambda adapter: adapter.parallel())


def rollout() -> Rollout:
    """The rollout engine."""
    return _first(lambda adapter: adapter.rollout())


def platform() -> Platform:
    """The service that tells a CPU run from others."""
    return _first(lambda adapter: adapter.platform())


def launches(framework: str) -> Launch:
    """The launches of the framework of this name, a key of ``programs``."""
    found = resolve(framework).launches()
    assert found is not None, f"{framework} has no launches"
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
