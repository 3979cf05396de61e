"""``make bench``: the CPU kernels under each instruction set of this processor. ``--write`` writes ``docs/benchmarks/cpu.md``.

Each set is measured in a process of its own, which also restricts torch to that set where torch allows it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import kernels
from benchmarks.harness import Row, markdown, show
from jetrl_patch._versions import VERSION
from jetrl_patch.native import build

PARTS = {
    "Products, GFLOP/s": kernels.products,
    "A linear layer with its quantizers, GFLOP/s": kernels.layer,
    "Other kernels, ms": kernels.operations,
}
#: instruction set -> variables that restrict torch and oneDNN to it. MKL, which torch's FP32 products use, ignores them on AMD
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


def measure() -> dict[str, list[Row]]:
    """The rows of each table, measured in this process."""
    torch.set_num_threads(1)
    console, found = Console(stderr=True), {}
    for title, rows in PARTS.items():
        with console.status(f"{title}, {build.instruction_set()}"):
            found[title] = list(rows())
    return found


def measured(isa: str) -> dict[str, list[Row]]:
    """``measure`` in a process restricted to an instruction set."""
    environ = os.environ | TORCH[isa] | {"JETRL_CPU_ISA": isa}
    command = [sys.executable, "-m", "benchmarks", "--json"]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, list[Row]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sets = [name for name in build.supported() if name != "portable"] or ["portable"]
    parser.add_argument("--isa", choices=build.supported(), action="append", default=[], help=f"by default {', '.join(sets)}")
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    parser.add_argument("--json", action="store_true", help="measure in this process alone, and print JSON")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(measure()))
        return
    pages = []
    for isa in args.isa or sets:
        for name, rows in measured(isa).items():
            title = f"{name}: {isa}"
            pages.append(markdown(show(title, rows), title))
    if args.write:
        head = (
            f"# Speed on the CPU\n\nOne thread of {processor()}, torch {torch.__version__}, jetrl_patch {VERSION}. "
            "Process time, best of interleaved rounds, for each instruction set of this processor; torch is limited to the same "
            "set. As in decoding, products of up to 16 rows read a different weight in each call, and the weights exceed the "
            "caches. Command: `make bench ARGS='--write docs/benchmarks/cpu.md'`.\n\n"
        )
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(head + "\n".join(pages))


if __name__ == "__main__":
    main()
