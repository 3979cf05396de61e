"""The precision guard and the monitor in OpenRLHF's weight sync: the policy actors decide, the reference follows.

Before a sync the guard decides from the figures of all ranks, every rank applies the decision, and the sync announces it.
The trainer loop learns of it from the sync's report and tells the reference model's actors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jetrl_patch.adapters.openrlhf.state import DRIVER, WORKER
from jetrl_patch.sync.source import Source

__all__ = ["figures", "take_lines", "tell"]


def figures(source: Source) -> dict[str, float]:
    """Return metrics of the step that this sync ends. Collective. Raises PrecisionError if the monitor must stop the run."""
    metrics = source.end_sync()
    WORKER.lines += source.take_lines()
    return metrics


def take_lines() -> list[str]:
    """Return lines for the trainer loop's log, each only once."""
    lines, WORKER.lines = WORKER.lines, []
    return lines


def tell(trainer: Any, guarded: Sequence[str]) -> None:
    """In the trainer loop, move the reference model's layers to BF16 like the policy's, from the same step on."""
    from jetrl_patch.adapters.openrlhf.audit import ask_actors

    new = [name for name in guarded if name not in DRIVER.guarded]
    if new and trainer.reference_model_group is not None:
        ask_actors(trainer.reference_model_group, {"to_bf16": new})
    DRIVER.guarded += new
