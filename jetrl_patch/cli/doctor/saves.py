"""What a launch validates and writes to disk, and whether the disk has room for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from jetrl_patch.cli.doctor.memory import MOMENTS, Counted
from jetrl_patch.config import Config
from jetrl_patch.config.launches import Layout, Saves
from jetrl_patch.trainer.rules import Check


def check_saves(saves: Saves, layout: Layout, model: Counted | None, config: Config) -> Iterator[Check]:
    """When the run validates, and the size of what it writes; ``model`` is None if its size is not known."""
    yield Check("validation", "ok", saves.validates or "none")
    parts = {
        "model": layout.weights and layout.weights.bytes,
        "optimizer": layout.optimizer and layout.optimizer.bytes + MOMENTS[config.optimizer_states],
        "exported": saves.exported,
    }
    each = [parts[name] for name in saves.contents]
    checkpoint = None if None in each or model is None else sum(found for found in each if found) * model.parameters
    final = None if model is None else saves.exported * model.parameters
    lines, needed = [], 0.0
    if saves.when and saves.contents:
        kept = "all of them kept" if saves.kept is None else f"the last {saves.kept} kept"
        lines.append(f"a checkpoint of {_size(checkpoint)} {saves.when}, {kept}, in {saves.folder}")
        needed += checkpoint or 0.0
    if saves.final:
        lines.append(f"the model, {_size(final)}, at the end in {saves.final}")
        needed += final or 0.0
    where = saves.folder if saves.when else saves.final
    room = _room(where) if lines else None
    finding = "; ".join(lines) or "no checkpoint"
    if room is None:
        yield Check("writes", "ok", finding)
    elif room < needed:
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
    if count is None:
        return "unknown size"
    return f"{count / 1e12:.1f} TB" if count >= 1e12 else f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
