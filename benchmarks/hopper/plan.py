"""The parts of ``make hopper`` and what each needs. Standard library only, so that the plan can be read anywhere.

A part consists of cells, and a cell of pieces. A piece that is done is kept, and a command of a part that would take longer than
``LIMIT`` begins no further cell; the next command goes on there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

#: seconds of one command of a part, after which its processes are ended; with checks and pages less than nine minutes
LIMIT = 500.0
#: exit statuses of a part's process
DONE, FAILED, REFUSED, LEFT, BROKEN = 0, 1, 2, 3, 4
#: key of what keeps every part from running, beside the parts' letters
ALL = ""
_COMMON = ("torch", "triton", "rich", "psutil")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part.

    Attributes:
        letter, name: what ``--part`` accepts; the name is also that of the module with its cells, of its record and of its page.
        gpu_gib: free memory of the GPU that it needs at least. disk_gib: free space under ``--scratch``.
        share: of the GPU's whole memory that its engine takes (vLLM's ``gpu_memory_utilization``), which must be free.
        minutes: of all its cells, estimated until it was measured.
        packages: modules that must be there. frameworks: names in ``jetrl_patch._versions.SUPPORTED``.
        deep_gemm: whether a DeepGEMM that is installed computes in it.
    """

    letter: str
    name: str
    title: str
    what: str
    gpu_gib: int
    share: float = 0.0
    disk_gib: int = 1
    minutes: float
    packages: tuple[str, ...] = _COMMON
    frameworks: tuple[str, ...] = ("torch",)
    deep_gemm: bool = True

    @property
    def commands(self) -> int:
        """How many commands of ``LIMIT`` its cells take, by the estimate."""
        return math.ceil(60 * self.minutes / LIMIT)

    @property
    def memory(self) -> str:
        """What it needs of the GPU's memory, in words."""
        return f"{self.gpu_gib} GiB" + (f" and {self.share:.0%}" if self.share else "")


_ENGINE = ("torch", "transformers", "vllm")
PARTS = (
    Part(
        letter="a", name="tests", title="Tests on a GPU", what="`pytest tests/gpu`, one function after the other",
        gpu_gib=24, minutes=6, packages=(*_COMMON, "pytest", "hypothesis", "transformers"), frameworks=("torch", "transformers"),
    ),
    Part(
        letter="b", name="kernels", title="Kernels",
        what="linears, gradients, quantizers, decoding, attention, `lm_head`, log-probs and a block of 7B and 8B models, against "
        "BF16 and against ceilings of the same run",
        gpu_gib=48, minutes=14,
    ),
    Part(
        letter="c", name="parity", title="Parity through vLLM",
        what="`jetrl parity` of a small trained model: 2,048 tokens a response, batches of 1 to 256, exact mode from CUDA graphs "
        "and eagerly, beside BF16 and shared linears alone",
        gpu_gib=24, share=0.4, minutes=9, packages=(*_COMMON, "vllm", "transformers"), frameworks=_ENGINE,
    ),
    Part(
        letter="d", name="rollout", title="Rollout of an 8B shape",
        what="prefill and decoding in vLLM, random weights made on the spot: BF16, vLLM's own FP8, shared linears, exact mode",
        gpu_gib=60, share=0.85, disk_gib=20, minutes=12, packages=(*_COMMON, "vllm", "transformers"), frameworks=_ENGINE,
    ),
    Part(
        letter="e", name="training", title="A training step",
        what="forward, backward and AdamW of four blocks of an 8B model with `lm_head` and log-probs: BF16 as transformers runs "
        "it, compiled BF16, shared linears, exact mode; with and without checkpointing",
        gpu_gib=70, minutes=7, packages=(*_COMMON, "transformers"), frameworks=("torch", "transformers"),
    ),
    Part(
        letter="f", name="sync", title="Weight sync of an 8B shape",
        what="bytes, seconds and peak memory of a sync within one GPU, FP8 with its proof against plain BF16 in the same buckets",
        gpu_gib=60, minutes=3, packages=(*_COMMON, "transformers"), frameworks=("torch", "transformers"),
    ),
    Part(
        letter="g", name="loop", title="A GRPO loop",
        what="the demo's task in verl with vLLM on one GPU in four modes: time by phase, mismatch",
        gpu_gib=24, share=0.3, disk_gib=2, minutes=8, packages=(*_COMMON, "vllm", "transformers", "verl", "ray"),
        frameworks=(*_ENGINE, "verl", "ray"),
    ),
)  # fmt: skip
ESTIMATED = "Memory and minutes are estimated."


def find(names: Iterable[str]) -> list[Part]:
    """The parts of these letters or names in the order of a run; all if there are none.

    Raises:
        ValueError: there is no such part.
    """
    wanted = list(names)
    known = {key: part for part in PARTS for key in (part.letter, part.name)}
    for name in wanted:
        if name not in known:
            raise ValueError(f"no part is called {name!r}. There are {', '.join(f'{p.letter} ({p.name})' for p in PARTS)}")
    chosen = {known[name].letter for name in wanted}
    return [part for part in PARTS if not wanted or part.letter in chosen]


def table(parts: Iterable[Part], states: dict[str, str]) -> list[dict[str, str]]:
    """One row per part: what it needs and how far it is. ``states`` are those of their records, by letter."""
    return [
        {
            "part": f"{part.letter}, {part.name}",
            "GPU memory": part.memory,
            "disk": f"{part.disk_gib} GiB",
            "minutes": f"{part.minutes:g}",
            "commands": str(part.commands),
            "packages": ", ".join(part.packages),
            "state": states.get(part.letter, "not measured"),
        }
        for part in parts
    ]
