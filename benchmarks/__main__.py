"""``make bench``: print the tables; with ``--write``, also write them with machine and versions (``docs/benchmarks/cpu.md``)."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import linear, step
from benchmarks.timing import shown
from jetrl_patch._versions import VERSION

PARTS = {
    "gemm": ("GEMMs of a linear layer, including quantization", linear.gemms),
    "quantizers": ("Quantizers", linear.quantizers),
    "step": ("Training step of the demo model", step.training_steps),
}


def processor() -> str:
    """The processor's name, as reported by the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def markdown(title: str, rows: list[dict[str, object]]) -> str:
    """One table as Markdown."""
    names = list(rows[0])
    lines = [f"## {title}", "", "| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(shown(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main(argv: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=sorted(PARTS), action="append", help="run only this part; may be repeated")
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    args = parser.parse_args(None if argv is None else list(argv))
    torch.set_num_threads(1)
    console = Console()
    pages = []
    for name, (title, run) in PARTS.items():
        if args.part and name not in args.part:
            continue
        with console.status(title):
            rows = list(run())
        table = Table(title=title)
        for column in rows[0]:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*(shown(value) for value in row.values()))
        console.print(table)
        pages.append(markdown(title, rows))
    if args.write:
        head = (
            f"# Speed on the CPU\n\nOne thread of {processor()}, torch {torch.__version__}, jetrl_patch {VERSION}. "
            "Process time, best of interleaved rounds. Command: `make bench ARGS='--write docs/benchmarks/cpu.md'`.\n\n"
        )
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(head + "\n".join(pages))


if __name__ == "__main__":
    main()
