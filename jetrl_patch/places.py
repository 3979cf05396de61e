"""Files and folders that a command reads or writes: what the system refuses is said in one line."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from jetrl_patch.errors import ConfigError, explain

__all__ = ["check_target", "reading", "shown", "writing"]


@contextlib.contextmanager
def reading(place: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError into a ConfigError about a place that should be readable."""
    with _worded(place, "a place that can be read", "check the path and its permissions"):
        yield


@contextlib.contextmanager
def writing(place: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError into a ConfigError about a place that should be writable."""
    with _worded(place, "a place that can be written", "choose another place"):
        yield


@contextlib.contextmanager
def _worded(place: str | os.PathLike[str], required: str, fix: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # the path that the system names may be inside the place that the user named
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
        folder: whether ``place`` is a folder, which is created if missing together with its parents; the folder of a file
            must exist.
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
    """Make a file, in the folder or in a folder beside it, and remove it again."""
    existing = place.absolute()
    while create and not existing.exists() and existing != existing.parent:
        existing = existing.parent
    probe = existing / f".jetrl-{os.getpid()}"
    os.mkdir(probe)
    os.rmdir(probe)
