"""The session of this process: what one ``enable()`` plans, applies and undoes, and what ``status()`` reports."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from jetrl_patch import registry
from jetrl_patch.config import SETTINGS, Config, environment
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, NotPatchedError, differences, explain
from jetrl_patch.patching.guards import require_versions
from jetrl_patch.patching.identity import identity
from jetrl_patch.patching.journal import Journal
from jetrl_patch.patching.patch import ImportHook, OnImport, Patch, apply_on_import, apply_patch, require_target, watch
from jetrl_patch.snapshot import PatchStatus, Status

logger = logging.getLogger(__name__)

# ---- The active settings of this process, and what a run notes for ``status()`` -------------------

@dataclass
class Notes:
    """What ``register`` has recorded. ``Status`` has the same attributes."""

    layers: dict[str, None] = field(default_factory=dict)
    cut: dict[str, None] = field(default_factory=dict)
    guarded: dict[str, None] = field(default_factory=dict)
    backend: str = ""
    attention: str = ""


_lock = threading.RLock()
_session: Session | None = None  # set last: readers only ever see a complete session
_starting: Config | None = None  # the config of an enable() that is running in this process
_failure = ""  # why the last session failed; empty if it did not
_notes = Notes()


def is_active() -> bool:
    """Whether this process is patched. Takes no lock and reads no environment variable."""
    return _session is not None


def active_with(wanted: Callable[[Config], bool] | None) -> bool:
    """Whether this process is patched, and with settings that ``wanted`` accepts."""
    session = _session
    return session is not None and (wanted is None or wanted(session.config))


def active_config() -> Config:
    """The settings that are active in this process. Raises NotPatchedError if it is not patched."""
    return require_active()


def asked_config() -> Config:
    """The active settings before they were resolved: unset ones have their defaults. Raises as ``active_config``."""
    config, session = active_config(), _session
    return config if session is None else session.asked


def require_active(where: str = "this process", expected: Config | None = None) -> Config:
    """The active settings, for code that must not run unpatched.

    Args:
        where: what the error message calls this process.
        expected: the settings that must be active; None accepts any.

    Raises NotPatchedError if this process is not patched, ConflictError if its settings differ from ``expected``.
    """
    session = _session
    if session is None:
        what, found = f"{where} (pid {os.getpid()})", f"an unpatched one{f' ({_failure})' if _failure else ''}"
        fix = "install jetrl_patch there with pip and set JETRL_ENABLED=1, or call jetrl_patch.enable() in that process"
        raise NotPatchedError(explain(what, required="a process that jetrl_patch has patched", found=found, fix=fix))
    if expected is not None and expected.resolved() != session.config:
        fix = "use the same settings in every process of the run"
        wanted, active = dataclasses.asdict(expected.resolved()), dataclasses.asdict(session.config)
        raise ConflictError(differences(f"settings of {where}", required=wanted, found=active, fix=fix))
    return session.config


def run_notes() -> Notes:
    """The notes taken since ``enable()``."""
    return _notes


def register(
    layers: Iterable[str] = (), cut: Iterable[str] = (), guarded: Iterable[str] = (), backend: str = "", attention: str = ""
) -> None:
    """Record what ``status()`` shows of this process, under the names of its attributes. Each layer is listed once."""
    for noted, names in ((_notes.layers, layers), (_notes.cut, cut), (_notes.guarded, guarded)):
        noted.update(dict.fromkeys(names))
    if backend:
        _notes.backend, _notes.attention = backend, attention


# ---- The plan of one ``enable()``: check it, apply it, undo it -----------------------------------

@dataclass
class Session:
    """The changes of one ``enable()``.

    Attributes:
        config: the settings, resolved.
        asked: the settings as given.
        hooks: one for each planned change. It has fired if the change is applied.
        error: what a patch raised, in case the importer swallows it.
    """

    config: Config
    asked: Config
    adapters: Sequence[registry.Adapter]
    versions: dict[str, str]
    planned: list[Patch | OnImport]
    hooks: list[ImportHook] = field(default_factory=list)
    journal: Journal = field(default_factory=Journal)
    error: BaseException | None = None

    def apply(self) -> None:
        """Change the modules that are imported, and hook the imports of the others."""
        for name, value in self.config.to_env().items():
            self.journal.set_item(os.environ, name, value, target=f"os.environ[{name!r}]", reason="settings for child processes")
        for adapter in self.adapters:
            adapter.on_apply(self.config, self.journal)
        for change in self.planned:
            self.hooks.append(watch(change.module, functools.partial(self._make, change)))
        if self.error is not None:
            raise self.error

    def undo(self, error: BaseException | None = None) -> None:
        """Undo everything, for ``disable()`` (raises the same) or because of ``error``, which gets a note if undoing fails."""
        try:
            self.journal.rollback(force=error is not None)
        except JetrlError as second:
            if error is None:
                raise
            error.add_note(f"while undoing: {second}")
        finally:
            if not self.journal.records:  # a conflict in ``disable()`` leaves all of them in place, and the session with them
                _end(error)
                for hook in self.hooks:
                    hook.cancel()
                for adapter in self.adapters:
                    adapter.on_undo()

    def _make(self, change: Patch | OnImport, module: ModuleType) -> None:
        """Make a change after the import of its module. If that fails, undo the whole session, not just this change."""
        try:
            if isinstance(change, Patch):
                # After ``disable()`` a caller may still hold the replacement: a bound method, a name imported from another
                # module, a class that Ray copied. In an unpatched process it calls the original.
                runs = None if change.always else functools.partial(active_with, change.when)
                apply_patch(change, module, self.journal, runs)
            else:
                apply_on_import(change, module, self.journal)
        except BaseException as error:
            self.error = error
            with _lock:
                if _session is self:  # not yet during ``enable()``, which itself undoes what it has begun
                    self.undo(error)
            raise


def plan(asked: Config, adapters: Sequence[registry.Adapter]) -> Session:
    """Check versions, settings and targets without changing anything, and return the session to apply.

    In an imported module the target must exist, in other modules only the module's file. Raises as ``preview``.
    """
    config = asked.resolved()
    versions = {"jetrl_patch": identity(), **require_versions(dict.fromkeys(n for a in adapters for n in a.requires))}
    for adapter in adapters:
        adapter.check(config)
    changes: list[Patch | OnImport] = []
    for adapter in adapters:
        changes += (*adapter.patches(config), *adapter.hooks(config))
    # nothing else reads ``upstream_fixes``
    planned = [change for change in changes if not change.fixes or change.needed_by or config.fixes_upstream]
    for change in planned:
        require_target(change)
    return Session(config, asked, adapters, versions, planned)


# ---- The public functions: apply all patches or none, report them, undo them ---------------------

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

    ``JETRL_ENABLED=0`` in the environment is an off switch: nothing is checked or changed, and a warning says so.
    """
    global _session, _starting, _failure
    if environment.switched_off():
        logger.warning("jetrl_patch: %s=0 in the environment, so enable() changes nothing", environment.SWITCH)
        return status()
    environment.check_names()
    asked = _asked(config, overrides)
    wanted = asked.resolved()
    with _lock:
        current = _session.config if _session is not None else _starting
        if current is not None:
            if current == wanted:
                return status()
            raise _already_enabled(dataclasses.asdict(wanted), current)
        _starting = wanted
        session: Session | None = None
        try:
            session = plan(asked, registry.installed())
            session.apply()
        except BaseException as error:
            _end(error)
            if session is not None:
                session.undo(error)
            raise
        finally:
            _starting = None
        _session, _failure = session, ""
        return status()


def _asked(config: Config | None, overrides: Mapping[str, Any]) -> Config:
    """The settings that a caller of ``enable()`` asks for. Raises ConfigError, or ConflictError in a process that is enabled."""
    try:
        return Config.given(config, overrides)
    except ConfigError:
        # an enabled process has all its settings in its environment, which the caller's may contradict
        if _session is not None and config is None and set(overrides) <= set(SETTINGS):
            raise _already_enabled(overrides, _session.config) from None
        raise


def _already_enabled(wanted: Mapping[str, Any], current: Config) -> ConflictError:
    found = {name: getattr(current, name) for name in wanted}
    what, fix = "enable() in a process that is already enabled", "call disable() first, or use the same settings"
    return ConflictError(differences(what, required=wanted, found=found, fix=fix))


def disable() -> None:
    """Undo all patches, newest first. Each attribute holds its original object again.

    Does nothing in a process that is not enabled. Converted models keep their FP8 layers.

    Raises:
        ConflictError: other code has changed a patched attribute. Nothing is undone.
        PatchError: an undo step failed. Everything else is undone.
    """
    with _lock:
        if _session is not None:
            _session.undo()


def activate_from_env() -> bool:
    """Call ``enable()`` if the environment opts in, and return whether it does. The plugin entry points call this.

    Safe to call many times. An earlier ``enable()`` in this process takes precedence over the environment.
    Raises ConfigError for a ``JETRL_*`` variable that does not exist, even if nothing opts in: the misspelled one may be the
    opt-in. With ``JETRL_ENABLED=0`` the plugin does nothing and checks nothing.
    """
    if environment.looking() or environment.switched_off():
        return False
    environment.check_names()
    if not environment.opted_in():
        return False
    if _session is None and _starting is None:
        enable(Config.from_env())
    return True


def status() -> Status:
    """A snapshot of this process: settings, versions, patches, FP8 layers. ``str()`` of it is a table."""
    session = _session
    if session is None:
        return Status(enabled=False, config=None, pid=os.getpid(), failure=_failure)
    notes = _notes
    changes = zip(session.planned, session.hooks, strict=True)
    patches = [PatchStatus.of(change, "applied" if hook.fired else "waiting") for change, hook in changes]
    named, records = {patch.target for patch in patches}, session.journal.records
    patches += [PatchStatus(r.target, "applied", r.reason, r.remove_when) for r in records if r.target not in named]
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

    Raises ConfigError, VersionError and PatchError, as ``enable`` does, and what the adapters' own checks raise.
    """
    return [PatchStatus.of(change, "waiting") for change in plan(config, registry.installed()).planned]


def _end(error: BaseException | None = None) -> None:
    """Mark this process as unpatched, because of ``error`` or of ``disable()``, and drop its notes."""
    global _session, _failure, _notes
    _session, _failure, _notes = None, "" if error is None else f"{type(error).__name__}: {error}", Notes()
