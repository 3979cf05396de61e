"""The session of this process: apply all patches or none, report them, undo them."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Any

from jetrl_patch import active, env, registry
from jetrl_patch.active import (
    active_config,
    active_with,
    asked_config,
    is_active,
    register_backend,
    register_cut,
    register_guarded,
    register_layers,
    require_active,
)
from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError, PatchError, differences
from jetrl_patch.session import Session, plan
from jetrl_patch.snapshot import PatchStatus, Status

__all__ = [
    "activate_from_env",
    "active_config",
    "active_with",
    "asked_config",
    "disable",
    "enable",
    "is_active",
    "preview",
    "register_backend",
    "register_cut",
    "register_guarded",
    "register_layers",
    "require_active",
    "status",
]

_lock = threading.RLock()
_session: Session | None = None  # set last, so that a reader only ever sees a complete session
_starting: Config | None = None  # the config of an enable() that is running in this process


def enable(config: Config | None = None, **overrides: Any) -> Status:
    """Apply every patch to this process, or none.

    Args:
        config: the settings. Without it, the ``JETRL_*`` variables and the defaults apply.
        overrides: single fields of ``Config``; they override ``config`` and the variables.

    Returns:
        The same as ``status()``.

    Raises:
        ConfigError: a setting is invalid, a ``JETRL_*`` variable does not exist, or the installed frameworks or the device
            do not support them.
        VersionError: a framework is missing or its version is not supported.
        PatchError: a patch target is missing, or a patch failed.
        ConflictError: the process is already enabled with other settings.
        NotPatchedError: the process is a driver that Ray has already connected, so its workers would not be patched.

    ``enable()`` imports no framework. A patch of a framework that is not imported yet is applied right after the import;
    if it fails, the import fails and all patches are undone. The settings are exported to ``os.environ`` for child
    processes. A second call with the same settings does nothing.
    """
    global _session, _starting
    env.check_names()
    asked = Config.from_env(**overrides) if config is None else config.replace(**overrides)
    wanted = asked.resolved()
    with _lock:
        current = _session.config if _session is not None else _starting
        if current is not None:
            if current == wanted:
                return status()
            raise ConflictError(
                differences(
                    "enable() in a process that is already enabled",
                    required=dataclasses.asdict(wanted),
                    found=dataclasses.asdict(current),
                    fix="call disable() first, or use the same settings",
                )
            )
        _starting = wanted
        session: Session | None = None
        try:
            session = plan(wanted, registry.installed())
            session.apply(on_failure=_abandon)
        except BaseException as error:
            active.end(failure=_words(error))
            if session is not None:
                session.take_down(error)
            raise
        finally:
            _starting = None
        _session = session
        active.begin(wanted, asked)
        return status()


def disable() -> None:
    """Undo all patches, newest first, so that each attribute holds its original object again.

    Does nothing in a process that is not enabled. Models that were already converted keep their FP8 layers.

    Raises:
        ConflictError: other code has changed a patched attribute. Nothing is undone.
        PatchError: an undo step failed. Everything else is undone.
    """
    global _session
    with _lock:
        session = _session
        if session is None:
            return
        try:
            session.journal.rollback()
        except ConflictError:
            raise  # nothing was undone, so the session stays
        except PatchError:
            _session = None  # everything else was undone
            active.end()
            session.forget()
            raise
        _session = None
        active.end()
        session.forget()


def activate_from_env() -> bool:
    """Call ``enable()`` if the environment opts in, and return whether it does. The plugin entry points call this.

    Safe to call many times. An earlier ``enable()`` in this process takes precedence over the environment.
    Raises ConfigError for a ``JETRL_*`` variable that does not exist, also where nothing opts in: it may be the one that
    should have. ``JETRL_ENABLED=0`` means that the plugin does nothing, so it then checks nothing either.
    """
    if env.switched_off():
        return False
    env.check_names()
    if not env.opted_in():
        return False
    if _session is None and _starting is None:
        enable(Config.from_env())
    return True


def status() -> Status:
    """A snapshot of this process: settings, versions, patches, FP8 layers. ``str()`` of it is a table."""
    session = _session
    if session is None:
        return Status(enabled=False, config=None, pid=os.getpid(), failure=active.failure())
    notes = active.notes()
    patches = [PatchStatus.of(p.what, "applied" if p.applied else "waiting") for p in session.planned]
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
        layers=tuple(name for name in notes.layers if name not in notes.guarded),
        cut=tuple(notes.cut),
        guarded=tuple(notes.guarded),
        backend=notes.backend or session.config.backend,
        attention=notes.attention,
    )


def preview(config: Config) -> list[PatchStatus]:
    """The patches that ``enable(config)`` would apply. Runs its checks and changes nothing.

    Raises ConfigError, VersionError and PatchError, as ``enable`` does.
    """
    session = plan(config.resolved(), registry.installed())
    return [PatchStatus.of(p.what, "waiting") for p in session.planned]


def _abandon(session: Session, error: BaseException) -> None:
    """Undo the whole session, not just one patch, when a patch fails as its module is imported.

    During ``enable()`` there is no session yet: ``enable()`` itself undoes what it has begun.
    """
    global _session
    with _lock:
        if _session is session:
            _session = None
            active.end(failure=_words(error))
            session.take_down(error)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
