"""Find an installed framework's files without importing it: an import would load its plugins, jetrl_patch among them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["file_of"]


def file_of(package: str, *parts: str) -> Path | None:
    """The path of a file or folder inside an installed top-level package; None if there is none."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder).joinpath(*parts)
        if path.exists():
            return path
    return None
