"""``make hopper``: measure everything that needs a Hopper GPU, part by part, and write ``docs/benchmarks/hopper/``.

A command goes on where the last one stopped, and tries again what failed. The results of a part are of one machine, software and
code. Parts that lack something are named and skipped, unless ``--part`` asks for them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import multiprocessing
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks.hopper import record as records
from benchmarks.hopper.plan import ALL, CACHES, ESTIMATED, Part, Setup, Step, find, problems, steps, table
from scripts import pack_gpu
from scripts.tables import markdown

PAGES, SCRATCH, DRY = (records.ROOT / folder for folder in ("docs/benchmarks/hopper", "outputs/hopper", "outputs/hopper-dry"))
#: with ``--minutes`` a piece is ended after this many times its estimate, so that one which hangs does not use up the command
PATIENCE = 2.0
#: seconds after which it is ended otherwise
LIMIT = 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    begin, words = time.monotonic(), sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(words)
    args.out, args.again = args.out or (DRY if args.dry else PAGES), args.again or args.dry
    args.command = f"python -m benchmarks.hopper {shlex.join(words)}".strip()
    scratch = (args.scratch or (DRY if args.dry else SCRATCH)).absolute()
    try:
        if args.pack or args.unpack:
            pack_gpu.pack(args.pack) if args.pack else pack_gpu.unpack(*args.unpack)
            return 0
        parts = find(args.part)
        show(parts, args.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.plan:
        return 0
    if args.dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    missing = {} if args.dry else in_a_process(problems, parts, scratch, args.deep_gemm)
    refused = [text for letter, text in missing.items() if letter == ALL or args.part]
    if refused or len(missing) == len(parts):
        print(*(refused[:1] or missing.values()), sep="\n", file=sys.stderr)
        return 1
    scratch.mkdir(parents=True, exist_ok=True)
    for name in CACHES:  # of kernels that pieces compile for each other
        os.environ.setdefault(name, str(scratch / "compiled" / name.lower()))
    setup = Setup(args.dry, scratch, "auto" if args.deep_gemm or args.dry else "triton")
    run = Run(setup, args, begin + 60 * args.minutes)
    succeeded = run.measure([part for part in parts if part.letter not in missing])
    records.write(args.out)
    show(parts, args.out)
    print(*(f"not run: {text}" for text in missing.values()), f"pages and records: {args.out}", sep="\n")
    return 0 if succeeded else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hopper", description=__doc__)
    parser.add_argument("--plan", action="store_true", help="print the parts and what they need, and exit")
    parser.add_argument("--part", action="append", default=[], metavar="LETTER", help="only this part; may be repeated")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU, which measure nothing")
    parser.add_argument("--again", action="store_true", help="measure the chosen parts again")
    parser.add_argument("--out", type=Path, help="folder of records and pages")
    parser.add_argument("--scratch", type=Path, help="folder of checkpoints and logs")
    parser.add_argument("--without-deep-gemm", dest="deep_gemm", action="store_false", help="do not use DeepGEMM (needs nvcc)")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="end within N minutes")
    parser.add_argument("--pack", type=Path, metavar="DIR", help="pack vLLM and verl for a machine without a network, and exit")
    parser.add_argument("--unpack", type=Path, nargs=2, metavar=("DIR", "SITE"), help="unpack them into SITE there, and exit")
    return parser


def show(parts: Sequence[Part], out: Path) -> None:
    """Print the plan with the state of each part's record."""
    print(markdown(table({part: records.state(records.load(out, part)) for part in parts})) + ESTIMATED, flush=True)


class Run:
    """What one command measures: step by step, until ``end``, which is a time of ``time.monotonic``."""

    def __init__(self, setup: Setup, args: argparse.Namespace, end: float) -> None:
        self.setup, self.args, self.end = setup, args, end
        self.records: dict[str, records.Record] = {}
        self.parts: dict[str, Part] = {}
        self.lock = threading.Lock()  # of the records and the output

    def measure(self, parts: Sequence[Part]) -> bool:
        """Measure what is left and fits. Returns whether everything has ended without a failure."""
        opened = [part for part in parts if self.open(part)]
        done = {(part, name) for part, record in self.records.items() for name in record["rows"]}
        failed = {(part, name) for part, record in self.records.items() for name in record["errors"]}
        plan = [step.left(done) for step in steps({part: self.records[part.name]["planned"] for part in opened})]
        for step in sorted(plan, key=lambda step: bool(failed & {*step.pieces})):  # what failed is tried again at the end
            if step.pieces and self.fits(step.seconds):
                self.take(step)
        unfinished = sum(len(records.left(record)) for record in self.records.values())
        if unfinished:
            print(f"{unfinished} pieces are left for the next command", flush=True)
        return len(opened) == len(parts) and not unfinished and not any(map(records.failed, self.records.values()))

    def fits(self, seconds: float) -> bool:
        return self.setup.dry or time.monotonic() + seconds <= self.end

    def open(self, part: Part) -> bool:
        """Load a part's record. Returns whether its results are of this machine, software and code."""
        if self.args.again:
            (self.args.out / f"{part.name}.json").unlink(missing_ok=True)
        module = importlib.import_module(f"benchmarks.hopper.{part.name}")
        here, record = records.environment(self.setup.backend), records.load(self.args.out, part)
        print(f"part {part.letter} ({part.name}): {records.state(record)}", flush=True)
        changed = sorted(key for key in here | record["environment"] if here.get(key) != record["environment"].get(key))
        if changed and record["rows"]:
            sides = (record["environment"], here)
            before, now = (", ".join(f"{key} {side.get(key, 'none')}" for key in changed) for side in sides)
            fix = "Measure all again (add --again), or choose another --out."
            print(f"its results are of {before}, found {now}. {fix}", flush=True)
            return False
        record |= {"dry": self.setup.dry, "planned": module.pieces(self.setup.dry), "environment": here}
        record["commands"] += [self.args.command] * (self.args.command not in record["commands"])
        self.records[part.name], self.parts[part.name] = record, part
        return True

    def take(self, step: Step) -> None:
        """Measure each piece of a step in a process of its own."""
        for part, name in step.pieces:
            self.records[part]["rows"].pop(name, None)
        seconds = step.seconds if step.together else step.seconds / len(step.pieces)
        with ThreadPoolExecutor(len(step.pieces) if step.together else 1) as pool:
            for _ in pool.map(lambda piece: self.piece(*piece, seconds), step.pieces):
                pass

    def piece(self, part: str, name: str, expected: float) -> None:
        """Measure a piece if it is expected to end in time, and save its result or why it has none."""
        begin, record = time.monotonic(), self.records[part]
        if not self.fits(expected):
            return
        patience = LIMIT if self.setup.dry or self.end == math.inf else PATIENCE * expected
        with self.lock:
            print(f"{part}: {name}", flush=True)
            given = self.setup._replace(share=self.parts[part].share, earlier=tuple(records.rows_of(record)))
        measure = importlib.import_module(f"benchmarks.hopper.{part}").measure
        rows, error = None, ""
        try:
            rows = in_a_process(measure, name, given, seconds=min(self.end - begin, patience))
        except Exception as failure:  # the other pieces still run
            error = f"{type(failure).__name__}: {failure}"[:2000]
        with self.lock:
            record["errors"].pop(name, None)
            record["errors" if error else "rows"][name] = error or rows
            took = f"\n{part}: {name}, {time.monotonic() - begin:.0f} s"
            print(took, error or markdown(rows or []), sep="\n", flush=True)
            records.save(self.args.out, self.parts[part], record)


def in_a_process(function: Callable[..., Any], *arguments: object, seconds: float | None = None) -> Any:
    """Call it in a new process, because a GPU's memory, and a device that an illegal access broke, belong to a process.

    Ends all that it started. Raises what it raises, BrokenProcessPool if the process died, TimeoutError after ``seconds``.
    """
    import psutil

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        process = psutil.Process(pool.submit(os.getpid).result())
        found = pool.submit(function, *arguments)
        ended = not wait([found], seconds).not_done
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in [*process.children(recursive=True), *([] if ended else [process])]:
                each.kill()
        if not ended:
            raise TimeoutError(f"it did not end within {seconds:.0f} s")
        return found.result()


if __name__ == "__main__":
    sys.exit(main())
