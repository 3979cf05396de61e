"""The one session of this process: resolves adapters by name, applies all of it or nothing, reports, undoes.

Adapters are reached from here only, and by name, so that importing this module imports no framework.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jetrl_patch import env
from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError, NotPatchedError, PatchError, VersionError, explain
from jetrl_patch.patching.guards import is_installed
from jetrl_patch.session import Session, plan
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
    "preview",
    "reach",
    "register_backend",
    "register_guarded",
    "register_layers",
    "require_active",
    "status",
]

#: adapter -> import names of frameworks, one of which must be installed for it; in the order of application
ADAPTERS: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers",),
    "vllm": ("vllm",),
    "cpu": ("vllm", "verl", "openrlhf"),
    "ray": ("ray",),
    "verl": ("verl",),
    "openrlhf": ("openrlhf",),
}


_lock = threading.RLock()
_session: Session | None = None  # set last: whoever sees it sees a session that stands
_starting: Config | None = None  # the config of an enable() that is under way in this process
_failure: str = ""  # why the last session of this process fell, for the errors of require_active
_layers: dict[str, None] = {}
_guarded: dict[str, None] = {}
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
    wanted = (Config.from_env(**overrides) if config is None else config.replace(**overrides)).resolved()
    with _lock:
        standing = _session.config if _session is not None else _starting
        if standing is not None:
            if standing == wanted:
                return status()
            raise ConflictError(
                explain(
                    "enable() in a process that is already enabled",
                    required=wanted,
                    found=standing,
                    fix="call disable() first, or give the same settings",
                )
            )
        _starting = wanted
        session: Session | None = None
        try:
            session = plan(wanted, _adapters())
            session.apply(on_failure=_fall)
        except BaseException as error:
            _failure = f"{type(error).__name__}: {error}"
            if session is not None:
                session.take_down(error)
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
            raise  # nothing was undone: the session stands
        except PatchError:
            _session = None  # all that could be undone was
            session.forget()
            _forget()
            raise
        _session = None
        session.forget()
        _forget()


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
                required=expected.resolved(),
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


def register_guarded(names: Iterable[str]) -> None:
    """Note layers that the precision guard took out of FP8 in this process, for ``status()``."""
    _guarded.update(dict.fromkeys(names))


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
        layers=tuple(name for name in _layers if name not in _guarded),
        guarded=tuple(_guarded),
        backend=_backend or session.config.backend,
    )


def preview(config: Config) -> list[PatchStatus]:
    """What ``enable(config)`` would put in place, with all its checks and no change.

    Raises ConfigError, VersionError and PatchError as ``enable`` does.
    """
    session = plan(config.resolved(), _adapters())
    return [PatchStatus(p.what.target, "waiting", p.what.reason, p.what.remove_when) for p in session.planned]


def _adapters() -> list[Adapter]:
    found = [_resolve(name) for name, needs in ADAPTERS.items() if any(map(is_installed, needs))]
    if not found:
        frameworks = dict.fromkeys(need for needs in ADAPTERS.values() for need in needs)
        raise VersionError(
            explain(
                "enable()",
                required=f"one of {', '.join(frameworks)}",
                found="none of them installed",
                fix="install one, for instance: pip install 'jetrl_patch[verl]'",
            )
        )
    return found


def _fall(session: Session, error: BaseException) -> None:
    """A patch did not fit when its module came in: the whole session goes, not this patch alone.

    Inside ``enable()`` there is no session yet, and ``enable()`` itself takes down what it has begun.
    """
    global _session, _failure
    with _lock:
        if _session is session:
            _session = None
            _failure = f"{type(error).__name__}: {error}"
            session.take_down(error)
            _forget()


def _forget() -> None:
    global _backend
    _layers.clear()
    _guarded.clear()
    _backend = ""


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
