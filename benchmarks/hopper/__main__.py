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
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.hopper.plan import ALL, BROKEN, ESTIMATED, FAILED, LEFT, LIMIT, PARTS, Part, find, table
from benchmarks.hopper.record import Record, load

ROOT = Path(__file__).resolve().parents[2]
PAGES, SCRATCH, DRY = (ROOT / place for place in ("docs/benchmarks/hopper", "outputs/hopper", "outputs/hopper-dry"))
#: seconds in which the processes of a part may end by themselves after its limit
GRACE = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(arguments)
    out = args.out or (DRY if args.dry else PAGES)
    scratch = args.scratch or (DRY if args.dry else SCRATCH)
    try:
        parts = find(args.part)
        states = _states(out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.pages:
        return _write(out, parts)
    show(parts, states)
    if args.plan:
        return 0
    missing = {} if args.dry else check(parts, scratch, args.without_deep_gemm)
    refused = [text for letter, text in missing.items() if letter == ALL or args.part]
    if refused or len(missing) == len(parts):
        print(*(refused[:1] or missing.values()), sep="\n", file=sys.stderr)
        return 1
    able = [part for part in parts if part.letter not in missing]
    for part in able:
        file = out / f"{part.name}.json"
        if args.again or args.dry:
            file.unlink(missing_ok=True)
        elif args.failed:
            forget(file, part)
    command = f"python -m benchmarks.hopper {shlex.join(arguments)}".strip()
    results = [run(part, out, scratch, command, args.dry, args.without_deep_gemm) for part in able]
    if not args.records:
        _write(out, parts)
    show(parts, _states(out))
    for text in missing.values():
        print(f"not run: {text}")
    print(f"{'records' if args.records else 'pages and records'}: {out}")
    return 0 if all(results) else 1


def _states(out: Path) -> dict[str, str]:
    return {part.letter: load(out / f"{part.name}.json", part.name).state for part in PARTS}


def _write(out: Path, parts: Sequence[Part]) -> int:
    from benchmarks.hopper import page

    page.write(out, parts)
    return 0


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
    parser.add_argument("--without-deep-gemm", action="store_true", help="measure without DeepGEMM, which needs nvcc")
    return parser


def show(parts: Sequence[Part], states: dict[str, str]) -> None:
    """Print the plan."""
    rows = table(parts, states)
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip())
    print(ESTIMATED, flush=True)


def check(parts: Sequence[Part], scratch: Path, without_deep_gemm: bool) -> dict[str, str]:
    """Look at the machine in a process of its own: ``needs.problems``."""
    letters = "".join(part.letter for part in parts)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        command = [sys.executable, "-m", "benchmarks.hopper.needs", letters, "--scratch", str(scratch), "--to", str(answer)]
        command += ["--without-deep-gemm"] * without_deep_gemm
        done = subprocess.run(command, cwd=ROOT, check=False)
        if not answer.exists():
            return {ALL: f"make hopper: the check of this machine ended with status {done.returncode}; it says why above."}
        found: dict[str, str] = json.loads(answer.read_text())
        return found


def forget(file: Path, part: Part) -> None:
    """Let what failed in a record run again."""
    if file.exists():
        record = load(file, part.name)
        record.forget_failures()
        record.save(file)


def run(
    part: Part, out: Path, scratch: Path, command: str, dry: bool, without_deep_gemm: bool, limit: float = LIMIT
) -> bool:
    """Run a part in a process of its own until it ends or its time does. Returns whether it is complete without a failure.

    A process that a piece has ended is followed by another, which goes on there.
    """
    file = out / f"{part.name}.json"
    record = load(file, part.name)
    if record.complete:
        print(f"\npart {part.letter} ({part.name}): {record.state}, kept", flush=True)
        return not record.failed
    scratch.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-u", "-m", "benchmarks.hopper.part", part.letter, "--out", str(out), "--scratch", str(scratch)]
    words += ["--command", command, *["--dry"] * dry, *["--without-deep-gemm"] * without_deep_gemm]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if dry else {}
    end, goes_on, turn = time.monotonic() + limit, True, 0
    while goes_on and (seconds := end - time.monotonic()) > 0:
        turn += 1
        log = scratch / f"{part.name}{f'-{turn}' if turn > 1 else ''}.log"
        print(f"\npart {part.letter} ({part.name}), log {log}", flush=True)
        before = measured(load(file, part.name))
        ended = _process([*words, "--limit", str(seconds)], {**os.environ, **hidden}, log, end)
        record = load(file, part.name)
        goes_on = ended == BROKEN
        if record.running:
            how = f"status {ended}" if ended is not None else f"it did not end within {limit:.0f} s"
            if ended is not None or measured(record) == before:  # else it may have begun late; it is first in the next command
                record.cells[record.running[0]].lose(record.running[1], how)
            print(f"part {part.letter}: {', '.join(record.running)} ended with {how}; it is left for another process", flush=True)
            record.running, goes_on = [], ended is not None
            record.save(file)
        elif ended not in (0, None, FAILED, LEFT, BROKEN) or (ended == FAILED and not record.failed):
            print(f"part {part.letter} ended with status {ended}; see {log}", file=sys.stderr)
    return record.complete and not record.failed


def measured(record: Record) -> int:
    """How many pieces have ended."""
    return sum(len(found.done) + len(found.errors) for found in record.cells.values())


def _process(words: Sequence[str], environment: dict[str, str], log: Path, end: float) -> int | None:
    """Run a process with all that it starts until it ends or ``end``. Returns its status, or None if it was ended."""
    from examples.common.processes import Group

    group, shown = Group(words, environment, ROOT, log), 0
    try:
        while (ended := group.leader.poll()) is None and time.monotonic() < end:
            shown = _follow(log, shown)
            time.sleep(0.2)
    finally:
        group.end(GRACE)
        _follow(log, shown)
    return ended


def _follow(log: Path, shown: int) -> int:
    """Print what the log has gained; returns how much of it has been printed."""
    with log.open("rb") as file:
        file.seek(shown)
        fresh = file.read()
    sys.stdout.write(fresh.decode(errors="replace"))
    sys.stdout.flush()
    return shown + len(fresh)


if __name__ == "__main__":
    sys.exit(main())
