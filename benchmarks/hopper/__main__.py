"""``make hopper``: measure everything that needs a Hopper GPU, part by part, and write ``docs/benchmarks/hopper/``.

A command goes on where the last one stopped, and tries again what failed. The results of a part are of one machine, software and
code. Parts that lack something are named and skipped, unless ``--part`` asks for them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks.hopper import record as records
from benchmarks.hopper.plan import ALL, ESTIMATED, LIMIT, Part, Setup, find, problems, table
from scripts import pack_gpu
from scripts.tables import markdown

PAGES, SCRATCH, DRY = (records.ROOT / folder for folder in ("docs/benchmarks/hopper", "outputs/hopper", "outputs/hopper-dry"))
#: no piece begins in the last seconds of a part's limit, so that few are cut off
MARGIN = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
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
    setup = Setup(args.dry, scratch, "auto" if args.deep_gemm or args.dry else "triton")
    succeeded = [run(part, setup, args) for part in parts if part.letter not in missing]
    records.write(args.out)
    show(parts, args.out)
    print(*(f"not run: {text}" for text in missing.values()), f"pages and records: {args.out}", sep="\n")
    return 0 if all(succeeded) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hopper", description=__doc__)
    parser.add_argument("--plan", action="store_true", help="print the parts and what they need, and exit")
    parser.add_argument("--part", action="append", default=[], metavar="LETTER", help="only this part; may be repeated")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU, which measure nothing")
    parser.add_argument("--again", action="store_true", help="measure the chosen parts again")
    parser.add_argument("--out", type=Path, help="folder of records and pages")
    parser.add_argument("--scratch", type=Path, help="folder of checkpoints and logs")
    parser.add_argument("--without-deep-gemm", dest="deep_gemm", action="store_false", help="do not use DeepGEMM (needs nvcc)")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="of each part, 500 if not given")
    parser.add_argument("--pack", type=Path, metavar="DIR", help="pack vLLM and verl for a machine without a network, and exit")
    parser.add_argument("--unpack", type=Path, nargs=2, metavar=("DIR", "SITE"), help="unpack them into SITE there, and exit")
    return parser


def show(parts: Sequence[Part], out: Path) -> None:
    """Print the plan with the state of each part's record."""
    print(markdown(table({part: records.state(records.load(out, part)) for part in parts})) + ESTIMATED, flush=True)


def run(part: Part, setup: Setup, args: argparse.Namespace) -> bool:
    """Measure what is left, each piece in a process of its own. Returns whether everything has ended without a failure."""
    end = time.monotonic() + args.limit
    if args.again:
        (args.out / f"{part.name}.json").unlink(missing_ok=True)
    module = importlib.import_module(f"benchmarks.hopper.{part.name}")
    here, record = records.environment(setup.backend), records.load(args.out, part)
    print(f"\npart {part.letter} ({part.name}): {records.state(record)}", flush=True)
    changed = sorted(key for key in here | record["environment"] if here.get(key) != record["environment"].get(key))
    if changed and record["rows"]:
        before, now = (", ".join(f"{key} {side.get(key, 'none')}" for key in changed) for side in (record["environment"], here))
        print(f"its results are of {before}, found {now}. Measure all again (add --again), or choose another --out.", flush=True)
        return False
    record |= {"dry": setup.dry, "planned": module.pieces(setup.dry), "environment": here}
    record["commands"] += [args.command] * (args.command not in record["commands"])
    for name in records.left(record):
        if time.monotonic() > end - MARGIN:
            break
        print(f"{part.name}: {name}", flush=True)
        record["errors"].pop(name, None)
        given = setup._replace(share=part.share, earlier=tuple(records.rows_of(record)))
        try:
            record["rows"][name] = in_a_process(module.measure, name, given, seconds=end - time.monotonic())
            print(markdown(record["rows"][name]), flush=True)
        except Exception as failure:  # the other pieces still run
            record["errors"][name] = f"{type(failure).__name__}: {failure}"[:2000]
            print(record["errors"][name], flush=True)
        records.save(args.out, part, record)
    if unfinished := records.left(record):
        print(f"{len(unfinished)} pieces are left for the next command", flush=True)
    return not unfinished and not records.failed(record)


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
