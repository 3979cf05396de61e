"""Measure the pieces of one part and keep what each found. ``__main__`` starts this process, and another if a piece ends it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.hopper.device import is_broken, versions
from benchmarks.hopper.record import Piece, Record, Setup, load

#: the error of a piece that ended its process, or was ended with it
UNENDED = "began and did not end"


def measure(record: Record, file: Path, pieces: Iterable[Piece], end: float = math.inf) -> bool:
    """Measure what is left, but begin no piece after ``end`` (``time.monotonic``).

    Returns whether the device still works: after an illegal access, this process cannot use it.
    """
    by_name = {piece.name: piece for piece in pieces}
    record.planned = {name: piece.table for name, piece in by_name.items()}
    for name in record.left:
        if time.monotonic() > end:
            print(f"{len(record.left)} pieces are left for the next command", flush=True)
            break
        print(f"{record.planned[name]}: {name}", flush=True)
        record.errors[name] = UNENDED  # stays if the piece ends this process
        record.save(file)
        try:
            rows = list(by_name[name].rows())
        except Exception as failure:  # the other pieces still run
            record.errors[name] = f"{type(failure).__name__}: {failure}"[:2000]
        else:
            if is_broken():
                record.errors[name] = "the device broke in a call that had returned"
            else:
                record.rows[name] = rows
                del record.errors[name]
                print("".join("  " + "  ".join(f"{k} {v}" for k, v in row.items()) + "\n" for row in rows), end="", flush=True)
        record.save(file)
        if name in record.errors:
            print(f"  failed: {record.errors[name]}", flush=True)
        if is_broken():
            return False
        gc.collect()
        with contextlib.suppress(RuntimeError):  # the next piece will report a broken device
            torch.cuda.empty_cache()
    return True


def main(part: str, out: Path, scratch: Path, command: str, dry: bool, deep_gemm: bool, seconds: float) -> bool:
    """Measure what is left of a part; the record notes ``command``. Returns whether the device still works."""
    file, end = out / f"{part}.json", time.monotonic() + seconds
    record = load(file, part)
    environment = versions() | {"options": "none" if deep_gemm else "--without-deep-gemm"}
    if refused := record.other(environment):
        print(refused, flush=True)
        return True
    record.dry, record.environment = dry, environment
    record.commands += [command] * (command not in record.commands)
    setup = Setup(dry, scratch, record, deep_gemm)
    return measure(record, file, importlib.import_module(f"benchmarks.hopper.{part}").pieces(setup), end)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if not main(**given | {key: Path(given[key]) for key in ("out", "scratch")}):
        sys.stdout.flush()
        os._exit(1)  # freeing memory at a normal exit would fail too
