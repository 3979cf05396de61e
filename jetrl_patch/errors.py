"""The errors that jetrl_patch raises, how they are worded, and errors about files that cannot be read or written."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

__all__ = [
    "UNQUANTIZED", "AuditError", "ConfigError", "ConflictError", "JetrlError", "ModelError", "NotPatchedError", "PatchError",
    "PrecisionError", "SyncError", "VersionError", "check_target", "differences", "explain", "reading", "shown", "split_fix",
    "unknown", "writing",
]  # fmt: skip


# ---- The errors that jetrl_patch raises, and the wording of their messages -----------------------
# A message says what is required, what was found and what to do about it.
# ``except jetrl_patch.JetrlError`` catches all of them and nothing else.

#: the ``fix`` for what no quantizing mode supports
UNQUANTIZED = "precision='bf16'"


class JetrlError(RuntimeError):
    """The base class of all errors that jetrl_patch raises."""


class ConfigError(JetrlError, ValueError):
    """A setting is unknown, malformed or contradicts another one. Also a ValueError."""


class VersionError(JetrlError):
    """A framework is missing or its version is outside the supported range."""


class ModelError(JetrlError):
    """The model cannot run with these settings because of its family, its layers or their widths."""


class PatchError(JetrlError):
    """A patch target is missing, or a patch failed and all earlier changes were undone."""


class ConflictError(JetrlError):
    """Something else is in the way: a different config is active, or other code has patched the attribute."""


class PrecisionError(JetrlError):
    """A layer is beyond a threshold (``monitor_action="stop"``), or gradients keep overflowing at any loss scale."""


class SyncError(JetrlError):
    """A weight sync did not complete. The rollout never serves a mix of two weight versions."""


class AuditError(JetrlError):
    """Trainer and rollout disagree about the quantized layers, their format, or a token's log-prob."""


class NotPatchedError(JetrlError):
    """A process that should be patched is not."""


class PluginFailed(BaseException):
    """Raised by an entry point if this process could not be patched; its cause says why. A host catches every ``Exception``."""

    @classmethod
    @contextlib.contextmanager
    def instead(cls) -> Iterator[None]:
        """Raise it in place of any Exception."""
        try:
            yield
        except Exception as error:
            raise cls(f"{type(error).__name__}: {error}") from error


def explain(what: str, *, required: object, found: object, fix: str) -> str:
    """Word a message as ``what: required ..., found .... Fix.``

    Args:
        what: the setting, layer, process or file in question; it starts the sentence.
        required: what jetrl_patch needs, as a noun phrase or a value.
        found: what it found, in the same form.
        fix: what to do, starting with a verb, without capital letter and full stop.
    """
    return f"{what}: required {required}, found {found}. {fix[0].upper()}{fix[1:]}{'' if fix.endswith('.') else '.'}"


def unknown(what: str, names: Iterable[str], known: Iterable[str]) -> str:
    """Word a message about names that do not exist, with the closest ones that do.

    >>> unknown("setting precison", ["precison"], ["precision", "align"])
    'unknown setting precison. Use precision, or another name from docs/configuration.md.'
    """
    choices = list(known)
    near = [match for name in names for match in difflib.get_close_matches(name, choices, 1)]
    start = f"{', '.join(near)}, or another" if near else "a"
    return f"unknown {what}. Use {start} name from docs/configuration.md."


def differences(what: str, *, required: Mapping[str, object], found: Mapping[str, object], fix: str, origin: str = "") -> str:
    """``explain`` for two sets of settings, naming only those that differ.

    ``origin`` says where the settings found come from.

    >>> differences("settings of a worker", required={"a": 1, "b": 2}, found={"a": 1, "b": 3}, fix="use b=2")
    'settings of a worker: required b=2, found b=3. Use b=2.'
    """
    same = {name for name in required if name in found and required[name] == found[name]}
    names = [name for name in {**required, **found} if name not in same]

    def words(settings: Mapping[str, object]) -> str:
        return ", ".join(f"{name}={settings[name]!r}" if name in settings else f"no {name}" for name in names)

    return explain(what, required=words(required), found=words(found) + origin, fix=fix)


def split_fix(message: str) -> tuple[str, str]:
    """Split a message into ``(finding, fix)``. The fix is empty where the message names none.

    The fix is the last sentence of a message that ends in a full stop, else what follows its last semicolon.
    """
    finding, mark, fix = message.rpartition(". " if message.endswith(".") else "; ")
    return (finding, fix.removesuffix(".")) if mark else (message, "")


# ---- Files and folders that a command reads or writes: errors of the system in one line ----------

def reading(place: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
    """Turn an OSError in the block into a ConfigError about a place that should be readable."""
    return _worded(place, "a place that can be read", "check the path and its permissions")


def writing(place: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
    """Turn an OSError in the block into a ConfigError about a place that should be writable."""
    return _worded(place, "a place that can be written", "choose another place")


@contextlib.contextmanager
def _worded(place: str | os.PathLike[str], required: str, fix: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # the system may name a path inside the user's place
        inner = f" ({error.filename})" if error.filename not in (None, os.fspath(place)) else ""
        found = f"{error.strerror or error}{inner}"
        raise ConfigError(explain(shown(place), required=required, found=found, fix=fix)) from error


def shown(place: str | os.PathLike[str]) -> str:
    """The place for a message, without the middle of a very long one."""
    text = os.fspath(place)
    return text if len(text) <= 120 else f"{text[:60]}…{text[-50:]}"


def check_target(place: Path, *, folder: bool) -> None:
    """Raise ConfigError if a file or folder cannot be written there. Leaves nothing behind.

    Args:
        folder: whether ``place`` is a folder, which may be missing like its parents. The folder of a file must exist.
    """
    with writing(place):
        if folder:
            _check_folder(place)
        elif place.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(place))
        elif place.exists():
            os.close(os.open(place, os.O_WRONLY))  # does not truncate
        else:
            _check_folder(place.absolute().parent, create=False)


def _check_folder(place: Path, create: bool = True) -> None:
    """Create and remove a folder there, or in its closest parent that exists, to see whether writing works."""
    existing = place.absolute()
    while create and not existing.exists() and existing != existing.parent:
        existing = existing.parent
    probe = existing / f".jetrl-{os.getpid()}"
    os.mkdir(probe)
    os.rmdir(probe)
