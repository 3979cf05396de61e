"""Part f: a weight sync of eight billion parameters within one GPU. The frameworks' transports are in part g, not here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.hopper.record import Piece, Record, Setup, Table
from benchmarks.sync import OVERLAPPED, PLAIN, model
from jetrl_patch.backends import choose_backend


def pieces(setup: Setup) -> Iterator[Piece]:
    backend = choose_backend(setup.backend, setup.device)
    parameters, turns = (1e8, 1) if setup.dry else (8e9, 6)  # the first also compiles
    yield Piece("Syncs", "syncs", partial(model, parameters, setup.device, backend, turns))


def derive(record: Record) -> list[Table]:
    found = {row[""]: row for row in record.tables().get("Syncs", [])}
    if not found:
        return []
    ratios = {f"{key}, FP8 / BF16": found[OVERLAPPED][key] / found[PLAIN][key] for key in ("GB", "seconds")}
    return [("FP8 relative to plain BF16", [ratios], "")]
