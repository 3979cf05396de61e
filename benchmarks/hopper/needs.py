"""Whether this machine can run parts of ``make hopper``: the first thing that is missing, in one line.

``python -m benchmarks.hopper.needs LETTERS`` looks in a process of its own, because asking for the GPU's memory takes some of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.hopper.plan import Part, find

GIB = 2**30


def problem(parts: Sequence[Part], scratch: Path, deep_gemm: bool = True) -> str:
    """What keeps these parts from running here; "" if nothing does."""
    return next(_problems(parts, scratch, deep_gemm), "")


def _problems(parts: Sequence[Part], scratch: Path, deep_gemm: bool) -> Iterator[str]:
    for part in parts:
        absent = [name for name in part.packages if importlib.util.find_spec(name) is None]
        if absent:
            yield _words(part, f"the packages {', '.join(part.packages)}", f"no {', no '.join(absent)}", "see docs/install.md")
    try:  # the clone's folder is importable without an installation, but has no adapters then
        importlib.metadata.version("jetrl_patch")
    except importlib.metadata.PackageNotFoundError:
        yield f"make hopper: required an installed jetrl_patch, found none in {sys.executable}. Run pip install -e . first."
    from jetrl_patch import support
    from jetrl_patch.fp8.backends import capability

    ok, found = capability.check_hopper()
    if not ok:
        required = "an NVIDIA GPU with FP8 of compute capability 9.0 (H100, H200)"
        yield f"make hopper: required {required}, found: {found}. Use such a machine."
    for part in parts:
        for name in part.frameworks:
            ok, found = support.check_framework(name)
            if not ok:
                yield _words(part, f"a supported {name}", found, "see docs/install.md")
    if deep_gemm and capability.deep_gemm_installed() and (using := next((p for p in parts if p.deep_gemm), None)):
        ok, found = capability.check_deep_gemm()
        if not ok:
            fix = "install it, or add --without-deep-gemm"
            yield _words(using, "a compiler for the DeepGEMM that is installed", found, fix)
    import torch

    free, total = torch.cuda.mem_get_info()
    place = next(folder for folder in (scratch.absolute(), *scratch.absolute().parents) if folder.exists())
    for part in parts:
        if free < part.gpu_gib * GIB:
            there = f"{free / GIB:.0f} of {total / GIB:.0f} GiB"
            fix = "end what else uses the GPU, or leave this part out"
            yield _words(part, f"{part.gpu_gib} GiB of free GPU memory", there, fix)
        if (room := shutil.disk_usage(place).free) < part.disk_gib * GIB:
            yield _words(part, f"{part.disk_gib} GiB of disk under {scratch}", f"{room / GIB:.1f} GiB", "give another --scratch")


def _words(part: Part, required: str, found: str, fix: str) -> str:
    return f"part {part.letter} ({part.name}): required {required}, found {found}. {fix[0].upper()}{fix[1:]}."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("letters")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--without-deep-gemm", action="store_true")
    args = parser.parse_args(argv)
    found = problem(find(args.letters), args.scratch, not args.without_deep_gemm)
    if found:
        print(found, file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
