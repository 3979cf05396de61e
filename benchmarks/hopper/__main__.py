"""``make hopper``: measure everything that needs a Hopper GPU, part by part, and write ``docs/benchmarks/hopper/``.

A command goes on where the last one stopped. What was measured is kept unless ``--again`` or ``--failed`` asks for it. Parts that
lack something are named and skipped, unless ``--part`` asks for them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.hopper.plan import ALL, ESTIMATED, LIMIT, PARTS, Part, find, problems, table
from benchmarks.hopper.record import load, write
from scripts.tables import markdown

ROOT = Path(__file__).resolve().parents[2]
PAGES, SCRATCH, DRY = (ROOT / folder for folder in ("docs/benchmarks/hopper", "outputs/hopper", "outputs/hopper-dry"))
#: seconds that the processes of a part get to end by themselves after its limit
GRACE = 10.0
#: a process begins no piece in the last seconds of a part's limit, so that none is cut off
MARGIN = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(arguments)
    args.out = args.out or (DRY if args.dry else PAGES)
    args.scratch = args.scratch or (DRY if args.dry else SCRATCH)
    args.command = f"python -m benchmarks.hopper {shlex.join(arguments)}".strip()
    try:
        parts = find(args.part)
        show(parts, args.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.pages:
        write(args.out, parts)
    if args.pages or args.plan:
        return 0
    missing = {} if args.dry else check(parts, args.scratch, args.deep_gemm)
    refused = [text for letter, text in missing.items() if letter == ALL or args.part]
    if refused or len(missing) == len(parts):
        print(*(refused[:1] or missing.values()), sep="\n", file=sys.stderr)
        return 1
    results = []
    for part in [part for part in parts if part.letter not in missing]:
        forget(args.out / f"{part.name}.json", part, everything=args.again or args.dry, failed=args.failed)
        results.append(run(part, args))
    write(args.out, parts)
    show(parts, args.out)
    for text in missing.values():
        print(f"not run: {text}")
    print(f"pages and records: {args.out}")
    return 0 if all(results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hopper", description=__doc__)
    parser.add_argument("--plan", action="store_true", help="print the parts and what they need, and exit")
    parser.add_argument("--part", action="append", default=[], metavar="LETTER", help="only this part; may be repeated")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU, which measure nothing")
    parser.add_argument("--again", action="store_true", help="measure the chosen parts again")
    parser.add_argument("--failed", action="store_true", help="run again what failed in the chosen parts")
    parser.add_argument("--pages", action="store_true", help="write the pages of the existing records, and exit")
    parser.add_argument("--out", type=Path, help="folder of records and pages")
    parser.add_argument("--scratch", type=Path, help="folder of checkpoints and logs")
    parser.add_argument(
        "--without-deep-gemm", dest="deep_gemm", action="store_false", help="measure without DeepGEMM, which needs nvcc"
    )
    return parser


def show(parts: Sequence[Part], out: Path) -> None:
    """Print the plan with the state of each part's record."""
    states = {part.letter: load(out / f"{part.name}.json", part.name).state for part in PARTS}
    print(markdown(table(parts, states)) + ESTIMATED, flush=True)


def check(parts: Sequence[Part], scratch: Path, deep_gemm: bool) -> dict[str, str]:
    """``plan.problems`` in a process of its own, because asking for the GPU's memory takes some of it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(problems, parts, scratch, deep_gemm).result()


def forget(file: Path, part: Part, everything: bool, failed: bool) -> None:
    """Let everything, or what failed, run again."""
    if everything:
        file.unlink(missing_ok=True)
    elif failed and file.exists():
        record = load(file, part.name)
        record.errors = {}
        record.save(file)


def run(part: Part, args: argparse.Namespace, limit: float = LIMIT) -> bool:
    """Run a part until it is complete or its time is up. Returns whether it is complete without a failure.

    It runs in a process of its own. After a piece that ends this process, another one goes on with the next piece.
    """
    file, end = args.out / f"{part.name}.json", time.monotonic() + limit
    args.scratch.mkdir(parents=True, exist_ok=True)
    given = {"part": part.name, "out": str(args.out), "scratch": str(args.scratch), "command": args.command}
    given |= {"dry": args.dry, "deep_gemm": args.deep_gemm}
    record, processes = load(file, part.name), 0
    print(f"\npart {part.letter} ({part.name}): {record.state}", flush=True)
    while not record.complete and (seconds := end - time.monotonic()) > MARGIN:
        processes += 1
        before, log = record, args.scratch / f"{part.name}-{processes}.log"
        words = [sys.executable, "-u", "-m", "benchmarks.hopper.worker", json.dumps({**given, "seconds": seconds - MARGIN})]
        status = _process(words, args.dry, log, end)
        record = load(file, part.name)
        if status != 0:
            how = "was ended at the limit" if status is None else f"ended with status {status}"
            print(f"part {part.letter}: its process {how}; see {log}", file=sys.stderr)
        if (record.rows.keys(), record.errors.keys()) == (before.rows.keys(), before.errors.keys()):
            break
    return record.complete and not record.errors


def _process(words: Sequence[str], dry: bool, log: Path, end: float) -> int | None:
    """Run a process and show its log until it ends or ``end``; then end all that it started. Returns its status; None if late."""
    from examples.common.processes import Group

    group = Group(words, {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if dry else {})}, ROOT, log)
    with log.open("rb") as output:

        def follow() -> None:
            sys.stdout.write(output.read().decode(errors="replace"))
            sys.stdout.flush()
            if time.monotonic() > end:
                raise TimeoutError

        try:
            return group.wait(follow, 0.2)
        except TimeoutError:
            return None
        finally:
            group.end(GRACE)


if __name__ == "__main__":
    sys.exit(main())
