"""What stands in this process: the settings it is patched with, and what they came to. Filled by ``runtime.py``.

It is a module of its own, below all that asks, so that a weight sync can note its layers without knowing how patches
go in.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError, NotPatchedError, differences

__all__ = [
    "Notes",
    "active_config",
    "begin",
    "end",
    "failure",
    "is_active",
    "notes",
    "register_backend",
    "register_guarded",
    "register_layers",
    "require_active",
]


@dataclass
class Notes:
    """For ``status()``: FP8 layers, those that the precision guard took out of FP8, and the GEMM backend."""

    layers: dict[str, None] = field(default_factory=dict)
    guarded: dict[str, None] = field(default_factory=dict)
    backend: str = ""


_config: Config | None = None
_failure: str = ""
_notes = Notes()


def begin(config: Config) -> None:
    """From here on this process is patched with ``config``."""
    global _config, _failure
    _failure = ""
    _config = config


def end(failure: str = "") -> None:
    """From here on it is not, and what was noted is forgotten. ``failure`` says why, if nobody asked for it."""
    global _config, _failure, _notes
    _config, _failure, _notes = None, failure, Notes()


def is_active() -> bool:
    """Whether this process is patched. Cheap: no lock, no look at the environment."""
    return _config is not None


def failure() -> str:
    """Why the last session of this process fell; empty if none did."""
    return _failure


def notes() -> Notes:
    """What was noted since ``begin``."""
    return _notes


def active_config() -> Config:
    """The settings this process is patched with. Raises NotPatchedError if it is not."""
    config = _config
    if config is None:
        raise NotPatchedError(_not_patched("this process"))
    return config


def require_active(where: str = "this process", expected: Config | None = None) -> Config:
    """For a place that must not be reached unpatched: the active settings, or an error that stops the run.

    Raises NotPatchedError if this process is not patched, ConflictError if it is, but not with ``expected``.
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
                fix="give every process of the run the same settings",
            )
        )
    return config


def register_layers(names: Iterable[str]) -> None:
    """Note names of FP8 layers of this process, for ``status()``. A name that is known is not listed again."""
    _notes.layers.update(dict.fromkeys(names))


def register_guarded(names: Iterable[str]) -> None:
    """Note layers that the precision guard took out of FP8 in this process, for ``status()``."""
    _notes.guarded.update(dict.fromkeys(names))


def register_backend(name: str) -> None:
    """Note which GEMM backend was chosen in this process, for ``status()``."""
    _notes.backend = name


def _not_patched(where: str) -> str:
    why = f" ({_failure})" if _failure else ""
    return (
        f"{where} (pid {os.getpid()}) should be patched and is not{why}; call jetrl_patch.enable() in it, or set "
        f"JETRL_ENABLED=1 for it and install jetrl_patch there with pip"
    )
