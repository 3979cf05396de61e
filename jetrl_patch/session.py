"""The plan of one ``enable()``: check it, apply it, undo it. ``runtime.py`` holds the active session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from jetrl_patch.config import Config
from jetrl_patch.errors import JetrlError, PatchError
from jetrl_patch.patching.guards import installed_version, module_exists, require_versions
from jetrl_patch.patching.hooks import ImportHook, watch
from jetrl_patch.patching.journal import Journal
from jetrl_patch.patching.patch import OnImport, Patch, apply_patch, find_target

if TYPE_CHECKING:
    from jetrl_patch.adapters.base import Adapter

__all__ = ["Planned", "Session", "plan"]

#: called with the session and the error when a patch fails, before the import of its module fails
OnFailure = Callable[["Session", BaseException], None]


@dataclass
class Planned:
    """One planned change and whether it is applied."""

    what: Patch | OnImport
    hook: ImportHook | None = None
    applied: bool = False


@dataclass
class Session:
    """The changes of one ``enable()``. ``error`` is what a patch raised, kept in case the importer swallows it."""

    config: Config
    adapters: Sequence[Adapter]
    versions: dict[str, str]
    planned: list[Planned]
    journal: Journal = field(default_factory=Journal)
    error: BaseException | None = None

    def apply(self, on_failure: OnFailure) -> None:
        """Change the modules that are imported, and hook the imports of the others."""
        for name, value in self.config.to_env().items():
            self.journal.set_item(
                os.environ, name, value, target=f"os.environ[{name!r}]", reason="settings for child processes"
            )
        for adapter in self.adapters:
            adapter.on_apply(self.config, self.journal)
        for planned in self.planned:
            planned.hook = watch(planned.what.module, self._callback(planned, on_failure))
        if self.error is not None:
            raise self.error

    def take_down(self, error: BaseException) -> None:
        """Undo what was done before ``error``. A failure to undo is added to ``error`` as a note."""
        try:
            self.journal.rollback(force=True)
        except JetrlError as second:
            _note(error, f"while undoing: {second}")
        self.forget()

    def forget(self) -> None:
        """After the rollback, cancel the waiting hooks and let the adapters drop their state."""
        for planned in self.planned:
            if planned.hook is not None:
                planned.hook.cancel()
            planned.applied = False
        for adapter in self.adapters:
            adapter.on_undo()

    def _callback(self, planned: Planned, on_failure: OnFailure) -> Callable[[ModuleType], None]:
        def on_import(module: ModuleType) -> None:
            try:
                if isinstance(planned.what, Patch):
                    apply_patch(planned.what, module, self.journal)
                else:
                    _run(planned.what, module, self.journal)
                planned.applied = True
            except BaseException as error:
                self.error = error
                on_failure(self, error)
                raise

        return on_import


def plan(config: Config, adapters: Sequence[Adapter]) -> Session:
    """Check versions, settings and targets without changing anything, and return the session to apply.

    In an imported module the target must exist. For other targets the module's file must exist.
    Raises VersionError, PatchError, and what the adapters' own checks raise.
    """
    versions = require_versions(dict.fromkeys(name for adapter in adapters for name in adapter.requires))
    for adapter in adapters:
        adapter.check(config)
    planned: list[Planned] = []
    for adapter in adapters:
        changes: list[Patch | OnImport] = [*adapter.patches(config), *adapter.hooks(config)]
        for what in changes:
            if not _wanted(what, config):
                continue
            _check_target(what)
            planned.append(Planned(what))
    return Session(config, adapters, versions, planned)


def _wanted(what: Patch | OnImport, config: Config) -> bool:
    """Whether to apply a patch: the only place where ``upstream_fixes`` has an effect."""
    return not what.fixes or bool(what.needed_by) or config.fixes_upstream


def _check_target(what: Patch | OnImport) -> None:
    if not module_exists(what.module):
        root = what.module.split(".")[0]
        version = installed_version(root)
        raise PatchError(
            f"{what.target} is missing: {root}{f' {version}' if version else ''} has no module {what.module}. "
            f"Install a supported version of {root}; `jetrl status` lists them."
        )
    module = sys.modules.get(what.module)
    if isinstance(what, Patch) and module is not None:
        find_target(module, what.attr)


def _run(what: OnImport, module: ModuleType, journal: Journal) -> None:
    try:
        what.apply(module, journal)
    except JetrlError:
        raise
    except Exception as error:
        raise PatchError(f"The patch {what.target} failed. {type(error).__name__}: {error}") from error


def _note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10
        error.args = (f"{error} ({text})",)
