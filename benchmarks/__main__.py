"""``make bench``: print the tables for each instruction set of this processor; with ``--write``, also write them with machine
and versions (``docs/benchmarks/cpu.md``).

Each set is measured in a process of its own, in which torch is held to the same set as far as it lets itself be.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import kernels
from benchmarks.harness import Row, markdown, show
from jetrl_patch._versions import VERSION
from jetrl_patch.native import build

PARTS = {
    "products": ("Products, GFLOP/s", kernels.products),
    "layer": ("A linear layer with its quantizers, GFLOP/s", kernels.layer),
    "operations": ("Other kernels, ms", kernels.operations),
    "step": ("Training step of the demo model", kernels.training_steps),
}
#: instruction set -> variables that hold torch and its oneDNN to it. MKL, in torch's FP32 products, heeds none on AMD.
TORCH = {
    "avx512_bf16": {},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "portable": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}


def processor() -> str:
    """The processor's name, as reported by the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def measure(parts: list[str]) -> dict[str, list[Row]]:
    """The rows of each part, in this process."""
    torch.set_num_threads(1)
    console, found = Console(stderr=True), {}
    for name in parts:
        with console.status(f"{PARTS[name][0]}, {build.instruction_set()}"):
            found[name] = list(PARTS[name][1]())
    return found


def measured(isa: str, parts: list[str]) -> dict[str, Any]:
    """``measure`` in a process that is held to an instruction set."""
    command = [sys.executable, "-m", "benchmarks", "--json", *(word for part in parts for word in ("--part", part))]
    environ = os.environ | TORCH[isa] | {"JETRL_CPU_ISA": isa}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=sorted(PARTS), action="append", help="run only this part; may be repeated")
    sets = [name for name in build.supported() if name != "portable"] or ["portable"]
    parser.add_argument("--isa", choices=build.supported(), action="append", default=[], help=f"by default {', '.join(sets)}")
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    parser.add_argument("--json", action="store_true", help="print the figures of this process alone")
    args = parser.parse_args(None if argv is None else list(argv))
    parts = [name for name in PARTS if not args.part or name in args.part]
    if args.json:
        print(json.dumps(measure(parts)))
        return
    pages = []
    for isa in args.isa or sets:
        for name, rows in measured(isa, parts).items():
            title = f"{PARTS[name][0]}: {isa}"
            pages.append(markdown(show(title, rows), title))
    if args.write:
        only = "".join(f"--part {part} " for part in args.part or ())
        head = (
            f"# Speed on the CPU\n\nOne thread of {processor()}, torch {torch.__version__}, jetrl_patch {VERSION}. "
            "Process time, best of interleaved rounds, for each instruction set of this processor; torch is limited to the same "
            "set. As in decoding, products of up to 16 rows read a different weight in each call, and the weights exceed the "
            "caches. "
            f"Command: `make bench ARGS='{only}--write docs/benchmarks/cpu.md'`.\n\n"
        )
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(head + "\n".join(pages))


if __name__ == "__main__":
    main()
