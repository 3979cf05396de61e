"""The one session of this process: resolves adapters by name, applies all of it or nothing, reports, undoes.

Adapters are reached from here only, and by name, so that importing this module imports no framework.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jetrl_patch import env
from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError, JetrlError, NotPatchedError, PatchError, VersionError, explain
from jetrl_patch.patching.guards import installed_version, is_installed, module_exists, require_versions
from jetrl_patch.patching.hooks import ImportHook, watch
from jetrl_patch.patching.journal import Journal
from jetrl_patch.patching.patch import OnImport, Patch, apply_patch, find_target
from jetrl_patch.snapshot import PatchStatus, Status

if TYPE_CHECKING:
    from jetrl_patch.adapters.base import Adapter

__all__ = [
    "ADAPTERS",
    "activate_from_env",
    "active_config",
    "disable",
    "enable",
    "is_active",
    "reach",
    "register_backend",
    "register_layers",
    "require_active",
    "status",
]

#: adapter -> import names of frameworks, one of which must be installed for it; in the order of application
ADAPTERS: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers",),
    "vllm": ("vllm",),
    "cpu": ("vllm", "verl"),
    "verl": ("verl",),
}


@dataclass
class _Planned:
    what: Patch | OnImport
    hook: ImportHook | None = None
    applied: bool = False


@dataclass
class _Session:
    config: Config
    adapters: list[Adapter]
    versions: dict[str, str]
    journal: Journal = field(default_factory=Journal)
    planned: list[_Planned] = field(default_factory=list)
    error: BaseException | None = None  # of a hook, also if somebody swallowed the failed import


_lock = threading.RLock()
_session: _Session | None = None  # set last: whoever sees it sees a session that stands
_starting: Config | None = None  # the config of an enable() that is under way in this process
_failure: str = ""  # why the last session of this process fell, for the errors of require_active
_layers: dict[str, None] = {}
_backend: str = ""


def enable(config: Config | None = None, **overrides: Any) -> Status:
    """Put every patch in place, or leave the process as it was and say why.

    Args:
        config: the settings; without it those of the ``JETRL_*`` variables, defaults for the rest.
        overrides: single fields of ``Config``, on top.

    Frameworks that are not imported yet stay unimported: their patches go in right after the import, and the import
    fails if one does not fit. Settings are exported to ``os.environ``, so that child processes find them.
    The same call twice does nothing the second time. Raises ConfigError, VersionError, PatchError, ConflictError.
    """
    global _session, _starting, _failure
    wanted = (Config.from_env() if config is None else config).replace(**overrides).resolved()
    with _lock:
        standing = _session.config if _session is not None else _starting
        if standing is not None:
            if standing == wanted:
                return status()
            raise ConflictError(
                explain(
                    "enable() in a process that is already enabled",
                    asked=wanted,
                    found=standing,
                    fix="call disable() first, or give the same settings",
                )
            )
        _starting = wanted
        session: _Session | None = None
        try:
            session = _plan(wanted)
            _apply(session)
            if session.error is not None:
                raise session.error
        except BaseException as error:
            _failure = f"{type(error).__name__}: {error}"
            if session is not None:
                _take_down(session, error)
            raise
        finally:
            _starting = None
        _failure = ""
        _session = session
        return status()


def disable() -> None:
    """Undo everything, newest first: each patched attribute is again the identical object. Does nothing if off.

    Raises ConflictError, with nothing undone, if somebody else has changed one of the places since. Models whose
    layers were already converted keep their FP8 layers: only what happens from now on is as before.
    """
    global _session
    with _lock:
        session = _session
        if session is None:
            return
        try:
            session.journal.rollback()
        except ConflictError:
            raise
        except PatchError:
            _session = None
            _forget(session)
            raise
        _session = None
        _forget(session)


def is_active() -> bool:
    """Whether this process is patched. Cheap: no lock, no look at the environment."""
    return _session is not None


def active_config() -> Config:
    """The settings this process is patched with. Raises NotPatchedError if it is not."""
    session = _session
    if session is None:
        raise NotPatchedError(_not_patched("this process"))
    return session.config


def require_active(where: str = "this process", expected: Config | None = None) -> Config:
    """For a place that must not be reached unpatched: the active settings, or an error that stops the run.

    Raises NotPatchedError if this process is not patched, ConflictError if it is, but not with ``expected``.
    """
    session = _session
    if session is None:
        raise NotPatchedError(_not_patched(where))
    if expected is not None and expected.resolved() != session.config:
        raise ConflictError(
            explain(
                f"settings of {where}",
                asked=expected.resolved(),
                found=session.config,
                fix="give every process of the run the same settings",
            )
        )
    return session.config


def activate_from_env() -> bool:
    """What the plugin entry points call: ``enable()`` if the environment opts in, else nothing. Says which.

    Safe to call many times; once ``enable()`` has been called in this process, that call has the last word.
    """
    if not env.opted_in():
        return False
    if _session is None and _starting is None:
        enable(Config.from_env())
    return True


def reach(adapter: str, path: str) -> Any:
    """What another adapter offers, by name: ``reach("transformers", "prepare:prepare_model")``.

    Adapters never import one another; this is the one road between them.
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"jetrl_patch.adapters.{adapter}.{module}"), name)


def register_layers(names: Iterable[str]) -> None:
    """Note names of FP8 layers of this process, for ``status()``. A name that is known is not listed again."""
    _layers.update(dict.fromkeys(names))


def register_backend(name: str) -> None:
    """Note which GEMM backend was chosen in this process, for ``status()``."""
    global _backend
    _backend = name


def status() -> Status:
    """What stands in this process now; ``str()`` of it is a table."""
    session = _session
    if session is None:
        return Status(enabled=False, config=None, pid=os.getpid(), failure=_failure)
    patches = [
        PatchStatus(p.what.target, "applied" if p.applied else "waiting", p.what.reason, p.what.remove_when)
        for p in session.planned
    ]
    named = {p.target for p in patches}
    patches += [
        PatchStatus(r.target, "applied", r.reason, r.remove_when)
        for r in session.journal.records
        if r.target not in named
    ]
    return Status(
        enabled=True,
        config=session.config,
        pid=os.getpid(),
        versions=dict(session.versions),
        patches=tuple(patches),
        layers=tuple(_layers),
        backend=_backend or session.config.backend,
    )


def _plan(config: Config) -> _Session:
    """Everything that can be checked without changing anything."""
    adapters = [_resolve(name) for name, needs in ADAPTERS.items() if any(map(is_installed, needs))]
    if not adapters:
        frameworks = dict.fromkeys(need for needs in ADAPTERS.values() for need in needs)
        raise VersionError(
            explain(
                "enable()",
                asked=f"one of {', '.join(frameworks)}",
                found="none of them installed",
                fix="install one, for instance: pip install 'jetrl_patch[verl]'",
            )
        )
    versions = require_versions(dict.fromkeys(name for adapter in adapters for name in adapter.requires))
    session = _Session(config, adapters, versions)
    for adapter in adapters:
        adapter.check(config)
    for adapter in adapters:
        changes: list[Patch | OnImport] = [*adapter.patches(config), *adapter.hooks(config)]
        for what in changes:
            _check_target(what)
            session.planned.append(_Planned(what))
    return session


def _check_target(what: Patch | OnImport) -> None:
    if not module_exists(what.module):
        root = what.module.split(".")[0]
        raise PatchError(
            f"{what.target} is missing: {root} {installed_version(root) or ''} has no module {what.module}; "
            f"see the supported versions with `jetrl status`"
        )
    module = sys.modules.get(what.module)
    if isinstance(what, Patch) and module is not None:
        find_target(module, what.attr)


def _apply(session: _Session) -> None:
    for name, value in session.config.to_env().items():
        session.journal.set_item(
            os.environ, name, value, target=f"os.environ[{name!r}]", reason="settings for child processes"
        )
    for adapter in session.adapters:
        adapter.on_apply(session.config, session.journal)
    for planned in session.planned:
        planned.hook = watch(planned.what.module, _callback(session, planned))


def _callback(session: _Session, planned: _Planned) -> Any:
    def on_import(module: ModuleType) -> None:
        try:
            if isinstance(planned.what, Patch):
                apply_patch(planned.what, module, session.journal)
            else:
                _apply_hook(planned.what, module, session.journal)
            planned.applied = True
        except BaseException as error:
            session.error = error
            _fall(session, error)
            raise

    return on_import


def _apply_hook(what: OnImport, module: ModuleType, journal: Journal) -> None:
    try:
        what.apply(module, journal)
    except JetrlError:
        raise
    except Exception as error:
        raise PatchError(f"{what.target} failed: {type(error).__name__}: {error}") from error


def _fall(session: _Session, error: BaseException) -> None:
    """A patch did not fit when its module came in: the whole session goes, not this patch alone.

    Inside ``enable()`` there is no session yet, and ``enable()`` itself takes down what it has begun.
    """
    global _session, _failure
    with _lock:
        if _session is session:
            _session = None
            _failure = f"{type(error).__name__}: {error}"
            _take_down(session, error)


def _take_down(session: _Session, error: BaseException) -> None:
    try:
        session.journal.rollback(force=True)
    except JetrlError as second:
        _note(error, f"while undoing: {second}")
    _forget(session)


def _note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10
        error.args = (f"{error} ({text})",)


def _forget(session: _Session) -> None:
    global _backend
    for planned in session.planned:
        if planned.hook is not None:
            planned.hook.cancel()
        planned.applied = False
    _layers.clear()
    _backend = ""
    for adapter in session.adapters:
        adapter.on_undo()


def _resolve(name: str) -> Adapter:
    try:
        importlib.import_module("jetrl_patch.adapters")
    except ModuleNotFoundError as error:
        if error.name != "jetrl_patch.adapters":
            raise
        raise PatchError(
            "jetrl_patch.adapters cannot be imported: the jetrl_patch in use is the source folder "
            f"{os.path.dirname(__file__)}, which an ordinary install does not complete. Install the clone with "
            "`pip install -e .`, or start Python from another folder"
        ) from error
    path = f"jetrl_patch.adapters.{name}.adapter"
    try:
        adapter: Adapter = importlib.import_module(path).ADAPTER
    except (ModuleNotFoundError, AttributeError) as error:
        missing = getattr(error, "name", None)
        if missing not in (path, path.rpartition(".")[0], "ADAPTER"):
            raise
        raise PatchError(f"{path}:ADAPTER is missing, but its framework is installed; reinstall jetrl_patch") from error
    return adapter


def _not_patched(where: str) -> str:
    why = f" ({_failure})" if _failure else ""
    return (
        f"{where} (pid {os.getpid()}) should be patched and is not{why}; call jetrl_patch.enable() in it, or give it "
        f"JETRL_ENABLED=1 and the package jetrl_patch with its entry points (pip install)"
    )
