"""The table of scale formats: the elements of a quantized matrix, which of them share a scale, and who multiplies them.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ScaleFormat = Literal["pow2", "fp32", "mxfp8", "nvfp4"]
Elements = Literal["e4m3", "e2m1"]

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
        elements: their type. In memory every element is the e4m3 byte of its value.
        powers_of_two: whether scales are rounded up to powers of two. Then BF16 holds every q * s.
        two_levels: whether a scale is the product of an e4m3 number and of a power of two for the whole weight, or for the whole
            row of an activation.
        gradients: the format of DGrad's and WGrad's operands; by default this one.
        gpu_backend: the only backend that multiplies it on a GPU; empty if the user has a choice.
        majors: the major compute capabilities of the GPUs that multiply it; None if the backend decides.
        height: how many rows of a weight share a scale.
    """

    name: ScaleFormat
    meaning: str
    block: int = 128
    square: bool = True
    elements: Elements = "e4m3"
    powers_of_two: bool = True
    two_levels: bool = False
    gradients: ScaleFormat | None = None
    gpu_backend: str = ""
    majors: tuple[int, ...] | None = None
    height: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "height", self.block if self.square else 1)

    def cuts(self, part: int, whole: int) -> bool:
        """Whether the scales of ``part`` elements, out of a contraction of ``whole`` elements, depend on the others."""
        return part != whole and (self.two_levels or part % self.block != 0)

    @property
    def unit(self) -> str:
        """What no split may cut, as a phrase."""
        return "a row, which has a scale of its own," if self.two_levels else f"a block of {self.block}"

    @property
    def uncut(self) -> str:
        """How to choose a split that cuts no unit, as a phrase."""
        return "Use size 1" if self.two_levels else f"Use a size that keeps K / size a multiple of {self.block}"


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
    Format(
        name="nvfp4",
        meaning="is [NVFP4](precisions.md#nvfp4), elements of four bits with a scale for every 16, for dense models on a CPU: a "
        "reference without a fast kernel",
        block=16,
        square=False,
        elements="e2m1",
        powers_of_two=False,
        two_levels=True,
        gradients="mxfp8",
        majors=(),
    ),
)

#: name -> format
FORMATS: dict[str, Format] = {form.name: form for form in _TABLE}
#: the default
POW2 = _TABLE[0]
