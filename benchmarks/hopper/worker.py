"""Measure the pieces of one part in this process and keep what each found. ``__main__`` starts it.

After an illegal access every call of the process fails, so a broken device ends the process; another one goes on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import Row
from benchmarks.hopper.plan import LIMIT
from benchmarks.hopper.record import Record, load

#: exit statuses of this process
DONE, FAILED, REFUSED, LEFT, BROKEN = 0, 1, 2, 3, 4


@dataclass
class Setup:
    """What a part is given.

    Attributes:
        dry: tiny sizes on a CPU.
        scratch: folder for checkpoints and logs.
        record: what has been found so far.
        deep_gemm: whether DeepGEMM takes part.
        at_end: closes what pieces left open, such as an engine.
    """

    dry: bool
    scratch: Path
    record: Record
    deep_gemm: bool = True
    at_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def backend(self) -> str:
        """The setting of every mode of the plugin."""
        return "auto" if self.deep_gemm or self.dry else "triton"

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"


class Piece(NamedTuple):
    """What is measured at once, in turns: the unit in which a run is kept and goes on.

    Attributes:
        table: the title of the table that has its rows.
        seconds: none is begun without so many left of a command.
    """

    table: str
    name: str
    rows: Callable[[], Iterable[Row]]
    seconds: float = 20.0


def measure(
    record: Record, file: Path, pieces: Sequence[Piece], limit: float = LIMIT, clock: Callable[[], float] = time.monotonic
) -> int:
    """Measure what is left. Begins no piece that may not end before ``limit`` seconds, except for a first one."""
    from benchmarks.hopper.device import Clocks, is_broken

    start, by_name, begun = clock(), {piece.name: piece for piece in pieces}, False
    record.planned = {piece.name: piece.table for piece in pieces}
    with Clocks() as clocks:
        for name in record.left:
            piece = by_name[name]
            if begun and clock() - start + piece.seconds > limit:
                print(f"{len(record.left)} pieces: not enough time is left; the same command goes on there", flush=True)
                return LEFT
            print(f"{piece.table}: {name}", flush=True)
            begun, record.running, clocks.table = True, name, piece.table
            record.save(file)
            error = ""
            try:
                rows = list(piece.rows())
            except Exception as failure:  # the record keeps it, and the other pieces still run
                error = f"{type(failure).__name__}: {failure}"[:2000]
            record.running, broken = "", is_broken()
            if broken:
                record.lose(name, error or "the device broke in a call that had returned")
            elif error:
                record.errors[name] = error
            else:
                record.rows[name] = rows
                for row in rows:
                    print("  " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            record.clocks |= clocks.found()
            record.save(file)
            if broken or error:
                print(f"  failed: {error}" + broken * "\nthe device is broken for this process; another one goes on", flush=True)
            if broken:
                return BROKEN
            release()
    return FAILED if record.errors else DONE


def release() -> None:
    """Give back the device memory of a piece."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # of a broken device the next piece will tell
            torch.cuda.empty_cache()


def main(part: str, out: Path, scratch: Path, command: str, dry: bool, deep_gemm: bool, limit: float) -> int:
    """Measure what is left of a part; ``command`` is what the record says."""
    from benchmarks.hopper.device import versions

    file = out / f"{part}.json"
    record = load(file, part)
    environment = versions() | {"options": "none" if deep_gemm else "--without-deep-gemm"}
    if refused := record.other(environment):
        print(refused, flush=True)
        return REFUSED
    record.dry, record.environment = dry, environment
    record.commands += [command] * (command not in record.commands)
    setup = Setup(dry, scratch, record, deep_gemm)
    with setup.at_end:
        return measure(record, file, list(importlib.import_module(f"benchmarks.hopper.{part}").pieces(setup)), limit)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    status = main(**given | {key: Path(given[key]) for key in ("out", "scratch")})
    sys.stdout.flush()
    if status == BROKEN:
        os._exit(status)  # what frees memory at the end of the process would fail too
    sys.exit(status)
