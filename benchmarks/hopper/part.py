"""Run the cells of one part in this process and keep what each piece found. ``__main__`` starts it.

A cell that runs out of its time stays open, and so does one whose piece broke the device: after an illegal access every call of
the process fails, so the process ends. What is open goes on where it was, in this command if time is left, or in the next.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.device import is_broken
from benchmarks.hopper.cells import Cell, Setup
from benchmarks.hopper.clocks import Clocks
from benchmarks.hopper.plan import BROKEN, DONE, FAILED, LEFT, LIMIT, REFUSED, find
from benchmarks.hopper.record import Found, Record, load


class BrokenDeviceError(RuntimeError):
    """The device does not answer this process any more. The message says after which error."""


class Run:
    """One command of a part.

    Args:
        file: of the record, which is written after each piece.
        command: what the record says.
        environment: of all rows of this command.
    """

    def __init__(
        self, record: Record, file: Path, command: str, environment: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.record, self.file, self.clock = record, file, clock
        self.command, self.environment = command, dict(environment)

    def cells(self, cells: Mapping[str, Cell], limit: float = LIMIT) -> int:
        """Run what is left. Begins no cell that may not end before ``limit`` seconds, except for a first one."""
        start, record = self.clock(), self.record
        record.planned = list(cells)
        turns, begun = deque(record.left), False
        while turns:
            name = turns.popleft()
            if begun and self.clock() - start + cells[name].seconds > limit:
                print(f"{', '.join([name, *turns])}: not enough time is left; the same command goes on there", flush=True)
                return LEFT
            begun = True
            try:
                self.cell(name, cells[name])
            except BrokenDeviceError as error:
                print(f"  {error}\nthe device is broken for this process; another one goes on", flush=True)
                return BROKEN
            if not record.cells[name].complete:
                turns.append(name)
        return FAILED if record.failed else DONE

    def cell(self, name: str, cell: Cell) -> None:
        """Measure pieces of one cell until none is left or its time is over, but one at least. It keeps their errors too."""
        print(f"{name}: {cell.title}", flush=True)
        found = self.record.cells.setdefault(name, Found(cell.title))
        found.command, found.environment, start = self.command, self.environment, self.clock()
        with Clocks() as clocks:
            try:
                found.complete = "" in found.errors or self._pieces(name, cell, found, start + cell.seconds)
            except BrokenDeviceError:
                raise
            except Exception as error:  # of what makes the pieces; the record keeps it, and the other cells still run
                self._failed(found, "", error)
                found.complete = True
            finally:
                found.seconds += self.clock() - start
        found.clocks = clocks.found or found.clocks
        self.record.save(self.file)

    def _pieces(self, name: str, cell: Cell, found: Found, end: float) -> bool:
        """Whether none is left."""
        passed: set[str] = {*found.done, *found.errors}
        pieces = cell.run(frozenset(passed))
        measured = False
        with contextlib.closing(pieces) if isinstance(pieces, Generator) else contextlib.nullcontext():
            for piece in pieces:
                if piece.name in passed:
                    continue
                if measured and self.clock() >= end:
                    print(f"  its {cell.seconds:.0f} s are over; it goes on later", flush=True)
                    return False
                self.record.running = [name, piece.name]
                self.record.save(self.file)
                try:
                    rows = list(piece.rows())
                    if is_broken():
                        raise RuntimeError("the device broke in a call that had returned")
                except Exception as error:  # the record keeps it, and the other pieces still run
                    self._failed(found, piece.name, error)
                else:
                    for row in rows:
                        print("  " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                    found.rows += rows
                    found.done.append(piece.name)
                    found.lost.pop(piece.name, None)
                self.record.running, measured = [], True
                self.record.save(self.file)
                release()
        return True

    def _failed(self, found: Found, piece: str, error: Exception) -> None:
        """Keep the error. Where the device is broken, raise: another process tries the piece once more."""
        text = f"{type(error).__name__}: {error}"[:2000]
        if is_broken():
            found.lose(piece, text)
            self.record.running = []
            self.record.save(self.file)
            raise BrokenDeviceError(text) from error
        found.errors[piece] = text
        print(f"  failed: {text}", flush=True)


def other(record: Record, here: Mapping[str, str], command: str) -> str:
    """Why this command must not go on with a record: it has rows of another environment. "" if it may."""
    for environment in record.environments():
        keys = [key for key in {**environment, **here} if environment.get(key) != here.get(key) and key != "commit"]
        if keys:
            before, now = (", ".join(f"{key} {side.get(key, 'none')}" for key in keys) for side in (environment, here))
            return (
                f"part {record.part}: required {before}, with which its other rows were measured, found {now}. "
                f"Measure all anew (add --again to {command!r}), or keep both (give another --out)."
            )
    return ""


def release() -> None:
    """Give back the device memory of a piece."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # of a broken device the next piece will tell
            torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--command", required=True, help="what the record says")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of this process")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--without-deep-gemm", action="store_true")
    args = parser.parse_args(argv)
    (part,) = find([args.part])
    file = args.out / f"{part.name}.json"
    record = load(file, part.name)
    from benchmarks.gpu.machine import versions

    environment = versions() | {"options": "--without-deep-gemm" if args.without_deep_gemm else "none"}
    if refused := other(record, environment, args.command):
        print(refused, flush=True)
        return REFUSED
    record.dry = args.dry
    setup = Setup(args.dry, args.scratch, record, not args.without_deep_gemm)
    cells = importlib.import_module(f"benchmarks.hopper.{part.name}").cells(setup)
    return Run(record, file, args.command, environment).cells(cells, args.limit)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    if status == BROKEN:
        os._exit(status)  # what frees memory at the end of the process would fail too
    sys.exit(status)
