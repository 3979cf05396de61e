"""Run the cells of one part in this process, each once, and keep what each found. ``__main__`` starts it."""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.hopper.cells import Cell, Setup
from benchmarks.hopper.clocks import Clocks
from benchmarks.hopper.plan import LIMIT, find
from benchmarks.hopper.record import Found, Record, load

DONE, FAILED, LEFT = 0, 1, 3


def run(
    cells: Mapping[str, Cell], record: Record, file: Path, command: str, limit: float = LIMIT,
    clock: Callable[[], float] = time.monotonic,
) -> int:  # fmt: skip
    """Run what is left. Begins no cell that may not end before ``limit`` seconds, except for a first one."""
    start, record.planned = clock(), list(cells)
    for i, name in enumerate(record.left):
        cell = cells[name]
        if i and clock() - start + cell.seconds > limit:
            print(f"{', '.join(record.left)}: not enough time is left; the same command goes on there", flush=True)
            return LEFT
        record.running = name
        record.save(file)
        record.cells[name] = measure(name, cell, command, clock)
        record.running = ""
        record.save(file)
        release()
    return FAILED if record.failed else DONE


def measure(name: str, cell: Cell, command: str, clock: Callable[[], float] = time.monotonic) -> Found:
    """Run one cell. An error is part of what it found, so that the other cells still run."""
    print(f"{name}: {cell.title}", flush=True)
    found, start = Found(cell.title, command=command), clock()
    with Clocks() as clocks:
        try:
            rows = iter(cell.run())
            for row in rows:
                print("  " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                found.rows.append(row)
                if clock() - start >= cell.seconds and next(rows, None) is not None:
                    found.note = f"Time ran out after {len(found.rows)} rows."
                    break
        except Exception as error:  # the record keeps it, and the other cells still run
            found.error = f"failed after {len(found.rows)} rows: {type(error).__name__}: {error}"[:2000]
            print(f"  {found.error}", flush=True)
    found.seconds, found.clocks = clock() - start, clocks.found
    return found


def release() -> None:
    """Give back the device memory of a cell."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--command", required=True, help="what the record says")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--without-deep-gemm", action="store_true")
    args = parser.parse_args(argv)
    (part,) = find([args.part])
    file = args.out / f"{part.name}.json"
    record = load(file, part.name)
    from benchmarks.gpu.machine import versions

    record.dry, record.versions = args.dry, versions()
    setup = Setup(args.dry, args.scratch, record, not args.without_deep_gemm)
    cells = importlib.import_module(f"benchmarks.hopper.{part.name}").cells(setup)
    return run(cells, record, file, args.command)


if __name__ == "__main__":
    sys.exit(main())
