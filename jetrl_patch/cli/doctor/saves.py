"""What a launch validates and writes to disk, and whether the disk has room for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from jetrl_patch.cli.doctor.memory import MOMENTS, Counted, size
from jetrl_patch.config import Config
from jetrl_patch.config.launches import Saves, Storage
from jetrl_patch.trainer.rules import Check


def check_saves(saves: Saves, storage: Storage, model: Counted | None, config: Config) -> Iterator[Check]:
    """When the run validates, and the size of what it writes; ``model`` is None if its size is not known."""
    yield Check("validation", "ok", saves.validates or "none")
    parts = {
        "model": storage.weights and storage.weights.bytes,
        "optimizer": storage.optimizer and storage.optimizer.bytes + MOMENTS[config.optimizer_states],
        "exported": saves.exported,
    }
    each = [parts[name] for name in saves.contents]
    checkpoint = None if None in each or model is None else sum(found for found in each if found) * model.parameters
    writes = []  # words, bytes, folder
    if saves.when and saves.contents:
        kept = "all of them kept" if saves.kept is None else f"the last {saves.kept} kept"
        words = f"a checkpoint of {_size(checkpoint)} {saves.when}, {kept}, in {saves.folder}"
        writes.append((words, checkpoint, saves.folder))
    if saves.final:
        final = None if model is None else saves.exported * model.parameters
        writes.append((f"the model, {_size(final)}, at the end in {saves.final}", final, saves.final))
    finding = "; ".join(words for words, _, _ in writes) or "no checkpoint"
    room = _room(writes[0][2]) if writes else None
    if room is None:
        yield Check("writes", "ok", finding)
    elif room < sum(count or 0.0 for _, count, _ in writes):
        fix = "free some space, write elsewhere, or save less often"
        yield Check("writes", "warning", f"{finding}; the disk has {_size(room)} left here", fix)
    else:
        yield Check("writes", "ok", f"{finding} ({_size(room)} are free here)")


def _room(folder: str) -> float | None:
    """Free bytes where a folder is or will be; None for an address that is no folder here."""
    if "://" in folder:
        return None
    place = Path(folder).absolute()
    found = next(parent for parent in (place, *place.parents) if parent.exists())
    return float(shutil.disk_usage(found).free)


def _size(count: float | None) -> str:
    return "unknown size" if count is None else size(count)
