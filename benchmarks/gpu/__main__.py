"""``make bench-gpu``: measure the FP8 linears on a Hopper GPU and write ``docs/benchmarks/h200.md`` and ``.json``.

Needs a Hopper GPU and a CUDA build of torch; otherwise it prints one line and exits with 1. ARGS: ``--part NAME`` (may be
repeated; writes ``h200-NAME.md``), ``--seconds N`` for the whole run, ``--write PAGE``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu import block, launches, parts, report
from benchmarks.gpu import machine as machines
from benchmarks.gpu.floors import Peaks, floors
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.targets import targets
from benchmarks.gpu.timing import Budget
from jetrl_patch.fp8.backends import capability

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks" / "h200.md"
#: name -> title, function, share of the time budget
PARTS: dict[str, tuple[str, Callable[[Machine], Iterator[dict[str, Any]]], float]] = {
    "rows": ("Batch invariance: backends that may serve a rollout", parts.rows, 0.16),
    "layers": ("A linear layer, forward and backward", parts.layers, 0.18),
    "products": ("FProp, quantized operands", parts.products, 0.24),
    "decode": ("Decoding: the linears of a block, including quantization", launches.decode, 0.08),
    "quantizers": ("Quantizers vs. a copy", parts.quantizers, 0.08),
    "blocks": ("A block without attention, forward and backward", block.blocks, 0.06),
    "profile": ("Kernels of a block's step", block.profiles, 0.06),
    "gradients": ("DGrad and WGrad, including quantization", parts.gradients, 0.14),
}
#: seconds for all parts; with start-up, ceilings and one late row per part, a run takes less than nine minutes
SECONDS = 420.0
FAILED = "This part failed"
TARGETS = "Targets"
Tables = dict[str, tuple[str, Sequence[dict[str, Any]], str]]


def measure(machine: Machine, names: Sequence[str], seconds: float, console: Console) -> Tables:
    """Measure the ceilings, then the parts within their shares of the time, and compute the floors from the ceilings."""
    tables: Tables = {"ceilings": ("Ceilings of this device", machines.measure_ceilings(machine), "")}
    report.show(console, *tables["ceilings"][:2])
    whole = sum(PARTS[name][2] for name in names)
    for name in names:
        title, run, share = PARTS[name]
        budget, rows, note = Budget(seconds * share / whole), [], ""
        try:
            with console.status(title):
                for row in run(machine):
                    rows.append(row)
                    if budget.spent:
                        note = f"Time ran out after {len(rows)} rows."
                        break
        except Exception as error:  # the other parts still run; the page and the exit status show the failure
            note = f"{FAILED} after {len(rows)} rows: {type(error).__name__}: {error}".splitlines()[0]
            console.print(f"{title}: {note}", markup=False)
        if rows:
            report.show(console, title, rows)
        tables[name] = (title, rows, note)
    top = machine.ceilings
    peaks = Peaks(top["BF16 TFLOP/s"], top["FP8 TFLOP/s"], top["FP8 TFLOP/s"], top["copy GB/s"])
    tables["floors"] = ("Floors computed from these ceilings", list(floors(peaks)), "Computed, not measured.")
    report.show(console, *tables["floors"][:2])
    verdicts = targets(tables)
    report.show(console, TARGETS, verdicts)
    return {"targets": (TARGETS, verdicts, ""), **tables}


def page_of(names: Sequence[str] | None) -> Path:
    """The page of a complete run, or a separate page if only some parts run."""
    return PAGE if not names else PAGE.with_stem("-".join([PAGE.stem, *dict.fromkeys(names)]))


def main(argv: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--part", choices=sorted(PARTS), action="append", help="run only this part; may be repeated")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time budget of all parts together")
    parser.add_argument("--write", type=Path, help="the page to write; the figures go to a .json file beside it")
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(arguments)
    if args.seconds <= 0:
        parser.error(f"--seconds {args.seconds:g} must be positive")
    ok, reason = capability.check_hopper()
    if not ok:
        print(f"make bench-gpu needs a Hopper GPU and a CUDA build of torch, but {reason}", file=sys.stderr)
        return 1
    console, start = Console(), time.monotonic()
    machine = machines.this_machine()
    tables = measure(machine, args.part or list(PARTS), args.seconds, console)
    record = {
        "versions": machines.versions(),
        "command": " ".join(["python -m benchmarks.gpu", *arguments]),
        "seconds": time.monotonic() - start,
        "missing": machine.missing,
    }
    report.write(args.write or page_of(args.part), f"Speed on {reason}", record, tables)
    return 1 if any(note.startswith(FAILED) for _, _, note in tables.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
