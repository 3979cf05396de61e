"""The one session of this process: applies what the adapters plan, all of it or nothing, reports, undoes."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Any

from jetrl_patch import active, env, registry
from jetrl_patch.active import (
    active_config,
    is_active,
    register_backend,
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
    "disable",
    "enable",
    "is_active",
    "preview",
    "register_backend",
    "register_guarded",
    "register_layers",
    "require_active",
    "status",
]

_lock = threading.RLock()
_session: Session | None = None  # set last: whoever sees it sees a session that stands
_starting: Config | None = None  # the config of an enable() that is under way in this process


def enable(config: Config | None = None, **overrides: Any) -> Status:
    """Put every patch in place, or leave the process as it was and say why.

    Args:
        config: the settings; without it those of the ``JETRL_*`` variables, defaults for the rest.
        overrides: single fields of ``Config``, on top.

    Frameworks that are not imported yet stay unimported: their patches go in right after the import, and the import
    fails if one does not fit. Settings are exported to ``os.environ``, so that child processes find them.
    The same call twice does nothing the second time. Raises ConfigError, VersionError, PatchError, ConflictError.
    """
    global _session, _starting
    wanted = (Config.from_env(**overrides) if config is None else config.replace(**overrides)).resolved()
    with _lock:
        standing = _session.config if _session is not None else _starting
        if standing is not None:
            if standing == wanted:
                return status()
            raise ConflictError(
                differences(
                    "enable() in a process that is already enabled",
                    required=dataclasses.asdict(wanted),
                    found=dataclasses.asdict(standing),
                    fix="call disable() first, or give the same settings",
                )
            )
        _starting = wanted
        session: Session | None = None
        try:
            session = plan(wanted, registry.installed())
            session.apply(on_failure=_fall)
        except BaseException as error:
            active.end(failure=_words(error))
            if session is not None:
                session.take_down(error)
            raise
        finally:
            _starting = None
        _session = session
        active.begin(wanted)
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
            active.end()
            session.forget()
            raise
        _session = None
        active.end()
        session.forget()


def activate_from_env() -> bool:
    """What the plugin entry points call: ``enable()`` if the environment opts in, else nothing. Says which.

    Safe to call many times; once ``enable()`` has been called in this process, that call has the last word.
    """
    if not env.opted_in():
        return False
    if _session is None and _starting is None:
        enable(Config.from_env())
    return True


def status() -> Status:
    """What stands in this process now; ``str()`` of it is a table."""
    session = _session
    if session is None:
        return Status(enabled=False, config=None, pid=os.getpid(), failure=active.failure())
    notes = active.notes()
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
        layers=tuple(name for name in notes.layers if name not in notes.guarded),
        guarded=tuple(notes.guarded),
        backend=notes.backend or session.config.backend,
    )


def preview(config: Config) -> list[PatchStatus]:
    """What ``enable(config)`` would put in place, with all its checks and no change.

    Raises ConfigError, VersionError and PatchError as ``enable`` does.
    """
    session = plan(config.resolved(), registry.installed())
    return [PatchStatus(p.what.target, "waiting", p.what.reason, p.what.remove_when) for p in session.planned]


def _fall(session: Session, error: BaseException) -> None:
    """A patch did not fit when its module came in: the whole session goes, not this patch alone.

    Inside ``enable()`` there is no session yet, and ``enable()`` itself takes down what it has begun.
    """
    global _session
    with _lock:
        if _session is session:
            _session = None
            active.end(failure=_words(error))
            session.take_down(error)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
