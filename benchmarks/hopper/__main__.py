"""``make hopper``: measure everything that needs a Hopper GPU, part by part, and write ``docs/benchmarks/hopper/``.

Goes on where it was stopped. What a part has found is never measured again unless ``--again`` or ``--failed`` asks for it. Parts
for which something is missing are named and left out, unless ``--part`` asks for them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.hopper import worker
from benchmarks.hopper.plan import ALL, ESTIMATED, LIMIT, PARTS, Part, find, table
from benchmarks.hopper.record import load, write

ROOT = Path(__file__).resolve().parents[2]
PAGES, SCRATCH, DRY = (ROOT / folder for folder in ("docs/benchmarks/hopper", "outputs/hopper", "outputs/hopper-dry"))
#: seconds in which the processes of a part may end by themselves after its limit
GRACE = 10.0


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
    if not args.records:
        write(args.out, parts)
    show(parts, args.out)
    for text in missing.values():
        print(f"not run: {text}")
    print(f"{'records' if args.records else 'pages and records'}: {args.out}")
    return 0 if all(results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hopper", description=__doc__)
    parser.add_argument("--plan", action="store_true", help="print what there is and what it needs, and exit")
    parser.add_argument("--part", action="append", default=[], metavar="LETTER", help="only this part; may be repeated")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU; nothing it writes is a measurement")
    parser.add_argument("--again", action="store_true", help="measure the chosen parts anew")
    parser.add_argument("--failed", action="store_true", help="run what failed in the chosen parts again")
    parser.add_argument("--records", action="store_true", help="write records alone, one file a part, and no pages")
    parser.add_argument("--pages", action="store_true", help="write the pages of the records that are there, and exit")
    parser.add_argument("--out", type=Path, help="folder of records and pages")
    parser.add_argument("--scratch", type=Path, help="folder for checkpoints and logs")
    parser.add_argument(
        "--without-deep-gemm", dest="deep_gemm", action="store_false", help="measure without DeepGEMM, which needs nvcc"
    )
    return parser


def show(parts: Sequence[Part], out: Path) -> None:
    """Print the plan with the state of each part's record."""
    rows = table(parts, {part.letter: load(out / f"{part.name}.json", part.name).state for part in PARTS})
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip())
    print(ESTIMATED, flush=True)


def check(parts: Sequence[Part], scratch: Path, deep_gemm: bool) -> dict[str, str]:
    """Look at the machine in a process of its own: ``plan.problems``."""
    letters = "".join(part.letter for part in parts)
    command = [sys.executable, "-m", "benchmarks.hopper.plan", letters, str(scratch), str(deep_gemm)]
    done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {ALL: f"make hopper: the check of this machine ended with status {done.returncode}; it says why above."}
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def forget(file: Path, part: Part, everything: bool, failed: bool) -> None:
    """Let what was measured, or what failed, run again."""
    if everything:
        file.unlink(missing_ok=True)
    elif failed and file.exists():
        record = load(file, part.name)
        record.errors, record.lost = {}, {}
        record.save(file)


def run(part: Part, args: argparse.Namespace, limit: float = LIMIT) -> bool:
    """Run a part in a process of its own until it ends or its time does. Returns whether it is complete without a failure.

    A process that a piece has ended is followed by another, which goes on behind that piece.
    """
    file = args.out / f"{part.name}.json"
    record = load(file, part.name)
    if record.complete:
        print(f"\npart {part.letter} ({part.name}): {record.state}, kept", flush=True)
        return not record.errors
    args.scratch.mkdir(parents=True, exist_ok=True)
    given = {"part": part.name, "out": str(args.out), "scratch": str(args.scratch), "command": args.command}
    given |= {"dry": args.dry, "deep_gemm": args.deep_gemm}
    end, turn = time.monotonic() + limit, 0
    while (seconds := end - time.monotonic()) > 0:
        turn += 1
        log = args.scratch / f"{part.name}-{turn}.log"
        print(f"\npart {part.letter} ({part.name}), log {log}", flush=True)
        words = [sys.executable, "-u", "-m", "benchmarks.hopper.worker", json.dumps({**given, "limit": seconds})]
        ended, status = record.ended, _process(words, args.dry, log, end)
        record = load(file, part.name)
        if status == worker.BROKEN:
            continue
        if not record.running:
            if status not in (worker.DONE, worker.REFUSED, worker.LEFT) and not record.errors:
                print(f"part {part.letter} ended with status {status}; see {log}", file=sys.stderr)
            break
        how = f"it did not end within {limit:.0f} s" if status is None else f"status {status}"
        if status is not None or record.ended == ended:  # else it may have begun late, and it comes first in the next command
            record.lose(record.running, how)
        print(f"part {part.letter}: {record.running} ended with {how}; it is left for another process", flush=True)
        record.running = ""
        record.save(file)
    return record.complete and not record.errors


def _process(words: Sequence[str], dry: bool, log: Path, end: float) -> int | None:
    """Run a process with all that it starts until it ends or ``end``. Returns its status, or None if it was ended."""
    from examples.common.processes import Group

    group, printed = Group(words, {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if dry else {})}, ROOT, log), 0
    try:
        while (status := group.leader.poll()) is None and time.monotonic() < end:
            printed = _follow(log, printed)
            time.sleep(0.2)
    finally:
        group.end(GRACE)
        _follow(log, printed)
    return status


def _follow(log: Path, printed: int) -> int:
    """Print what the log has gained; returns how much of it has been printed."""
    with log.open("rb") as file:
        file.seek(printed)
        fresh = file.read()
    sys.stdout.write(fresh.decode(errors="replace"))
    sys.stdout.flush()
    return printed + len(fresh)


if __name__ == "__main__":
    sys.exit(main())
