"""Where a model is: a folder, a snapshot in the hub's cache, or a name on a hub, from which nothing is downloaded here."""

from __future__ import annotations

import os
from typing import Any


def local_folder(path: Any) -> str:
    """The folder of a model: the path itself, or the snapshot of a hub id in the local cache; empty without either."""
    folder = os.path.expanduser(str(path or ""))
    if os.path.isdir(folder):
        return folder
    return _cached(folder) if is_hub_id(folder) else ""


def is_hub_id(path: str) -> bool:
    """Whether a path can be a model on a hub: ``name`` or ``owner/name``."""
    return bool(path) and path.count("/") <= 1 and not path.startswith(("/", ".", "~")) and "://" not in path


def how_to_download(name: str) -> str:
    """The command that puts a model of a hub into a folder."""
    return f"`hf download {name} --local-dir {name.rpartition('/')[2]}`"


def _cached(name: str) -> str:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return ""
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return ""
    return os.path.dirname(found) if isinstance(found, str) else ""
