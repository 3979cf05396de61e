"""The state of this process: its active settings, and what a run reports for ``status()``. ``runtime.py`` sets it.

This module sits below all its readers, so a weight sync can report its layers without importing the patch engine.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError, NotPatchedError, differences, explain

__all__ = [
    "Notes",
    "active_config",
    "active_with",
    "asked_config",
    "begin",
    "end",
    "failure",
    "is_active",
    "notes",
    "register_backend",
    "register_cut",
    "register_guarded",
    "register_layers",
    "require_active",
]


@dataclass
class Notes:
    """What ``status()`` shows.

    Attributes:
        layers: FP8 layers.
        cut: layers that ``on_cut="bf16"`` leaves in BF16.
        guarded: layers that the precision guard took out of FP8.
        backend: the GEMM backend. attention: what computes exact attention in the place of the backend's own, if anything.
    """

    layers: dict[str, None] = field(default_factory=dict)
    cut: dict[str, None] = field(default_factory=dict)
    guarded: dict[str, None] = field(default_factory=dict)
    backend: str = ""
    attention: str = ""


_config: Config | None = None
_asked: Config | None = None
_failure: str = ""
_notes = Notes()


def begin(config: Config, asked: Config | None = None) -> None:
    """Mark this process as patched with ``config``, which ``asked`` was resolved to."""
    global _config, _asked, _failure
    _failure = ""
    _config, _asked = config, config if asked is None else asked


def end(failure: str = "") -> None:
    """Mark this process as unpatched and drop its notes. ``failure`` says why, unless ``disable()`` asked for it."""
    global _config, _asked, _failure, _notes
    _config, _asked, _failure, _notes = None, None, failure, Notes()


def is_active() -> bool:
    """Whether this process is patched. Takes no lock and reads no environment variable."""
    return _config is not None


def active_with(wanted: Callable[[Config], bool]) -> bool:
    """Whether this process is patched with settings that ``wanted`` accepts."""
    return _config is not None and wanted(_config)


def failure() -> str:
    """Why the last session of this process failed; empty if it did not."""
    return _failure


def notes() -> Notes:
    """The notes taken since ``begin``."""
    return _notes


def active_config() -> Config:
    """The settings that are active in this process. Raises NotPatchedError if it is not patched."""
    config = _config
    if config is None:
        raise NotPatchedError(_not_patched("this process"))
    return config


def asked_config() -> Config:
    """The active settings before they were resolved: what nobody set has its default. Raises as ``active_config``."""
    config = active_config()
    return config if _asked is None else _asked


def require_active(where: str = "this process", expected: Config | None = None) -> Config:
    """The active settings, for code that must not run unpatched.

    Args:
        where: what the error message calls this process.
        expected: the settings that must be active; None accepts any.

    Raises NotPatchedError if this process is not patched, ConflictError if its settings differ from ``expected``.
    """
    config = _config
    if config is None:
        raise NotPatchedError(_not_patched(where))
    if expected is not None and expected.resolved() != config:
        raise ConflictError(
            differences(
                f"settings of {where}",
                required=dataclasses.asdict(expected.resolved()),
                found=dataclasses.asdict(config),
                fix="use the same settings in every process of the run",
            )
        )
    return config


def register_layers(names: Iterable[str]) -> None:
    """Record the names of FP8 layers in this process for ``status()``. Each name is listed once."""
    _notes.layers.update(dict.fromkeys(names))


def register_cut(names: Iterable[str]) -> None:
    """Record layers that ``on_cut="bf16"`` leaves in BF16 in this process, for ``status()``."""
    _notes.cut.update(dict.fromkeys(names))


def register_guarded(names: Iterable[str]) -> None:
    """Record layers that the precision guard took out of FP8 in this process, for ``status()``."""
    _notes.guarded.update(dict.fromkeys(names))


def register_backend(name: str, attention: str = "") -> None:
    """Record the GEMM backend, and another attention than its own, that this process has chosen, for ``status()``."""
    _notes.backend, _notes.attention = name, attention


def _not_patched(where: str) -> str:
    why = f" ({_failure})" if _failure else ""
    return explain(
        f"{where} (pid {os.getpid()})",
        required="a process that jetrl_patch has patched",
        found=f"an unpatched one{why}",
        fix="install jetrl_patch there with pip and set JETRL_ENABLED=1, or call jetrl_patch.enable() in that process",
    )
