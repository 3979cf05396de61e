"""Where an installed framework's files are, without importing it (which would load its plugins, ours among them)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["file_of"]


def file_of(package: str, *parts: str) -> Path | None:
    """A file or folder inside an installed top-level package; None if it is not there."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder).joinpath(*parts)
        if path.exists():
            return path
    return None
