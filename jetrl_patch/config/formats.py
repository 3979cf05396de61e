"""The table of scale formats: which elements of a quantized matrix share a scale, and who multiplies it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ScaleFormat = Literal["pow2", "fp32", "mxfp8"]

#: the major compute capability whose tensor cores take a scale per 32 elements
BLACKWELL = 10


@dataclass(frozen=True, kw_only=True)
class Format:
    """The storage of the FP8 flow's operands.

    Attributes:
        name: the value of ``Config.scale_format``.
        meaning: for the docs.
        block: how many elements along the contraction share a scale.
        square: whether a weight's scale also covers ``block`` rows, so that FProp and DGrad read the same bytes. If not, each row
            has scales of its own, and DGrad reads the weight quantized once more, along its own contraction. Experts, and the
            checkpoints and libraries of others, have only square blocks.
        powers_of_two: whether scales are rounded up to powers of two. Then BF16 holds every q * s.
        cpu_backends: the backends that multiply it on a CPU, the preferred one first.
        gpu_backend: the only backend that multiplies it on a GPU; empty if the user has a choice.
        majors: the major compute capabilities of the GPUs that multiply it; None if the backend decides.
        height: how many rows of a weight share a scale.
    """

    name: ScaleFormat
    meaning: str
    block: int = 128
    square: bool = True
    powers_of_two: bool = True
    cpu_backends: tuple[str, ...] = ("native", "torch")
    gpu_backend: str = ""
    majors: tuple[int, ...] | None = None
    height: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "height", self.block if self.square else 1)

    def cuts(self, part: int, whole: int) -> bool:
        """Whether a range of ``part`` elements, out of a contraction of ``whole`` elements, cuts a block."""
        return part != whole and part % self.block != 0


_TABLE = (
    Format(name="pow2", meaning="rounds them up to powers of two"),
    Format(name="fp32", meaning="does not round them", powers_of_two=False),
    Format(
        name="mxfp8",
        meaning="is [MXFP8](precisions.md#mxfp8), with a power of two for every 32 elements along the contraction, for dense "
        "models on a CPU or a Blackwell GPU, where it has not yet run",
        block=32,
        square=False,
        gpu_backend="mx",
        majors=(BLACKWELL,),
    ),
)

#: name -> format
FORMATS: dict[str, Format] = {form.name: form for form in _TABLE}
#: the default
POW2 = _TABLE[0]
