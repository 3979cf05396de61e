"""The precisions there are: one record each, from which settings, checks, wire and rollout derive. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = [
    "DEFAULT",
    "MODES",
    "PRECISIONS",
    "QUANTIZATIONS",
    "ROLLOUT_FORMATS",
    "Granularity",
    "Mode",
    "Precision",
    "ResolvedAlign",
    "RolloutFormat",
]  # fmt: skip

Precision = Literal["bf16", "fp8-unified", "fp8-rollout", "int8-rollout", "fp16"]
Granularity = Literal["block", "channel"]
ResolvedAlign = Literal["exact", "linear", "none"]

E4M3 = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class RolloutFormat:
    """How the rollout holds its quantized linears.

    Attributes:
        name: what tables of quantizers and products call it.
        dtype: of the weights, as torch calls it.
        granularity: scales per block of 128x128, or per output channel and token.
        quantization: what vLLM calls it.
        capability: of a CUDA device that can serve it, as vLLM counts.
        sent: the dtype that the trainer sends these weights in; "bfloat16" where the rollout quantizes them.
        own_product: the name of its product where no FP8 backend computes it.
    """

    name: str
    dtype: str
    granularity: Granularity
    quantization: str
    capability: int
    sent: str
    own_product: str = ""

    @property
    def is_fp8(self) -> bool:
        """Whether an FP8 backend multiplies it, under a scale format."""
        return self.dtype == E4M3

    @property
    def is_sent(self) -> bool:
        """Whether the trainer sends bytes and scales."""
        return self.sent == self.dtype

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the scales of a weight ``[N, K]`` as they are sent."""
        n, k = shape
        return (n, 1) if self.granularity == "channel" else (-(-n // 128), -(-k // 128))


_BLOCK = RolloutFormat(
    name="fp8-block", dtype=E4M3, granularity="block", quantization="jetrl_fp8", capability=89, sent=E4M3
)
_CHANNEL = replace(_BLOCK, name="fp8-channel", granularity="channel")
_INT8 = RolloutFormat(
    name="int8-channel", dtype="int8", granularity="channel", quantization="jetrl_int8", capability=75, sent="int8",
    own_product="int8",
)  # fmt: skip

#: by name, as tables of quantizers and products have them
ROLLOUT_FORMATS: dict[str, RolloutFormat] = {found.name: found for found in (_BLOCK, _CHANNEL, _INT8)}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One precision.

    Attributes:
        name: the value of ``Config.precision``.
        meaning: in a line.
        dtype: the 16-bit dtype of both sides, as torch calls it.
        trains_fp8: whether the trainer's linears are FP8; their bytes are then what the rollout gets.
        formats: the formats that the rollout's linears can have, the default first; none: they are not quantized.
        align: what ``Config.align`` comes to where it is not set; only where it is not "none" can it be set.
        smoothing: what ``Config.smoothing`` comes to where it is not set.
        rollout_log_probs: whether the trainer takes log-probs by the rollout's formula whatever ``align`` says:
            frameworks round them to the logits' dtype, which can be coarser than all other noise of a mode.
        backends: the values of ``Config.backend`` that mean something here; none: all of them.
        one_granularity: why ``Config.rollout_granularity`` cannot be set, and what to do.
    """

    name: Precision
    meaning: str
    dtype: str = "bfloat16"
    trains_fp8: bool = False
    formats: tuple[RolloutFormat, ...] = ()
    align: ResolvedAlign = "none"
    smoothing: float = 0.0
    rollout_log_probs: bool = False
    backends: tuple[str, ...] = ()
    one_granularity: str = ""

    @property
    def only_measures(self) -> bool:
        """Whether nothing is changed but what is logged."""
        return not self.formats and self.dtype == "bfloat16"

    @property
    def scales_loss(self) -> bool:
        """Whether training needs a loss scale, and weights may not fit: a dtype with five bits of exponent."""
        return self.dtype == "float16"

    @property
    def quantizes(self) -> bool:
        """Whether the rollout's linears are quantized."""
        return bool(self.formats)

    @property
    def is_unified(self) -> bool:
        """Whether both sides have the same linears, so that they can be aligned."""
        return self.align != "none"

    @property
    def has_granularity(self) -> bool:
        """Whether there is a choice of scales."""
        return len(self.formats) > 1

    def format(self, granularity: str) -> RolloutFormat | None:
        """The format of the rollout's linears with these scales; the only one where there is no choice."""
        if not self.has_granularity:
            return self.formats[0] if self.formats else None
        return next((found for found in self.formats if found.granularity == granularity), None)


_NO_CHOICE = "only 'fp8-rollout' has a choice of scales; drop it"

_TABLE = (
    Mode(
        name="bf16",
        meaning="measures and changes nothing else",
        one_granularity=_NO_CHOICE,
    ),
    Mode(
        name="fp8-unified",
        meaning="trains and rolls out in one FP8 flow",
        trains_fp8=True,
        formats=(_BLOCK,),
        align="exact",
        one_granularity="the trainer's FP8 flow has 128-blocks, and the rollout must have the same; use "
        "precision='fp8-rollout' or rollout_granularity='block'",
    ),
    Mode(
        name="fp8-rollout",
        meaning="BF16 training with FP8 rollout, the baseline to beat",
        formats=(replace(_BLOCK, sent="bfloat16"), _CHANNEL),
    ),
    Mode(
        name="int8-rollout",
        meaning="BF16 training with INT8 rollout, scales per channel and token",
        formats=(_INT8,),
        smoothing=0.5,  # measured in docs/precisions.md
        backends=("auto", "torch"),
        one_granularity="INT8 always has one scale per output channel; drop it",
    ),
    Mode(
        name="fp16",
        meaning="FP16 on both sides, with a loss scale",
        dtype="float16",
        rollout_log_probs=True,
        one_granularity=_NO_CHOICE,
    ),
)

#: what vLLM calls our quantizations
QUANTIZATIONS = tuple(dict.fromkeys(found.quantization for found in ROLLOUT_FORMATS.values()))

#: every precision by its name
MODES: dict[str, Mode] = {mode.name: mode for mode in _TABLE}
#: their names, in that order
PRECISIONS = tuple(MODES)
#: the one that is meant where none is said
DEFAULT: Precision = "fp8-unified"
