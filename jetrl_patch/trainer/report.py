"""Cost of a weight sync: each training process reports it, the trainer loop logs it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jetrl_patch import active
from jetrl_patch.sync.stream import SyncStats

__all__ = ["sync_metrics", "sync_report"]

#: fields of a report that are logged unchanged; not every framework and precision has all of them
_LOGGED = (
    "sync_bytes",
    "sync_bytes_bf16",
    "sync_bytes_total",
    "sync_bytes_full",
    "sync_changed_fraction",
    "sync_calls",
    "quantized_layers",
    "cut_layers",
    "loss_scale",
    "skipped_steps",
)


def sync_report(stats: SyncStats, start: float) -> dict[str, Any]:
    """Report one process's part of a sync that began at ``start`` (``time.perf_counter``), in plain types."""
    cut = active.notes().cut
    return {
        "pid": os.getpid(),
        "sync_seconds": time.perf_counter() - start,
        "sync_bytes": stats.quantized,
        "sync_bytes_bf16": stats.quantized_as_bf16,
        "sync_bytes_total": stats.total,
        "quantized_layers": stats.layers,
        **({"cut_layers": len(cut)} if cut else {}),
        **({"sync_bytes_full": stats.full, "sync_changed_fraction": stats.changed / stats.full} if stats.full else {}),
    }


def sync_metrics(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Combine the reports of all ranks: the first rank's figures and the slowest rank's seconds."""
    first = reports[0]
    found = {f"jetrl/{name}": first[name] for name in _LOGGED if name in first}
    return {**found, **first["monitor"], "jetrl/sync_seconds": max(report["sync_seconds"] for report in reports)}
