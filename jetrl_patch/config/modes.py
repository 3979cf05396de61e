"""The table of precisions, from which settings, checks, wire format and rollout derive. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Precision = Literal["bf16", "fp8-unified", "fp8-rollout", "int8-rollout", "fp16"]
Granularity = Literal["block", "channel"]
ResolvedAlign = Literal["exact", "linear", "none"]

E4M3 = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class RolloutFormat:
    """The format of the rollout's quantized linears.

    Attributes:
        name: key in the tables of quantizers and products.
        dtype: torch dtype of the weights.
        granularity: scales per 128x128 block, or per output channel and token.
        quantization: vLLM's name for the format.
        capability: minimum compute capability of a CUDA device, in vLLM's notation (89 for 8.9).
        sent: dtype of the weights as the trainer sends them; "bfloat16" if the rollout quantizes them.
        own_product: name of the format's own matmul, if the FP8 backends do not compute it.
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
        """Whether it is FP8: an FP8 backend multiplies it, and ``scale_format`` applies."""
        return self.dtype == E4M3


_BLOCK = RolloutFormat(name="fp8-block", dtype=E4M3, granularity="block", quantization="jetrl_fp8", capability=89, sent=E4M3)
_CHANNEL = replace(_BLOCK, name="fp8-channel", granularity="channel")
_INT8 = RolloutFormat(
    name="int8-channel", dtype="int8", granularity="channel", quantization="jetrl_int8", capability=75, sent="int8",
    own_product="int8",
)  # fmt: skip

#: name -> format
ROLLOUT_FORMATS: dict[str, RolloutFormat] = {found.name: found for found in (_BLOCK, _CHANNEL, _INT8)}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One precision.

    Attributes:
        name: the value of ``Config.precision``.
        meaning: one line for the docs.
        dtype: torch's name of the 16-bit dtype on both sides.
        trains_fp8: whether the trainer's linears are FP8; the rollout then gets their bytes.
        formats: possible formats of the rollout's linears, the default first; empty if they are not quantized.
        align: default of ``Config.align``. If it is "none", ``align`` cannot be set.
        smoothing: default of ``Config.smoothing``.
        rollout_log_probs: whether the trainer always computes log-probs by the rollout's formula. Frameworks round them to
            the logits' dtype, which can add more noise than the rest of the mode.
        backends: allowed values of ``Config.backend``; empty allows all.
        one_granularity: why ``Config.rollout_granularity`` cannot be set, and what to do instead.
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
    one_granularity: str = "only 'fp8-rollout' has a choice of granularity. Drop rollout_granularity."

    @property
    def only_measures(self) -> bool:
        """Whether the mode changes only what is logged."""
        return not self.formats and self.dtype == "bfloat16"

    @property
    def scales_loss(self) -> bool:
        """Whether the dtype has five exponent bits. Training then needs a loss scale, and weights may overflow."""
        return self.dtype == "float16"

    @property
    def quantizes(self) -> bool:
        """Whether the rollout's linears are quantized."""
        return bool(self.formats)

    @property
    def is_unified(self) -> bool:
        """Whether both sides use the same linears and can be aligned."""
        return self.align != "none"

    @property
    def has_granularity(self) -> bool:
        """Whether ``rollout_granularity`` has a choice."""
        return len(self.formats) > 1

    def format(self, granularity: str) -> RolloutFormat | None:
        """The rollout's format for this granularity, or the only one; None if its linears are not quantized."""
        return next((found for found in self.formats if found.granularity == granularity or not self.has_granularity), None)


_TABLE = (
    Mode(name="bf16", meaning="only measures"),
    Mode(
        name="fp8-unified",
        meaning="runs training and rollout in the same FP8 flow",
        trains_fp8=True,
        formats=(_BLOCK,),
        align="exact",
        one_granularity="the trainer's FP8 flow has 128-blocks, and the rollout must have the same. Use "
        "rollout_granularity='block' or precision='fp8-rollout'.",
    ),
    Mode(
        name="fp8-rollout",
        meaning="trains in BF16 with an FP8 rollout, the baseline to beat",
        formats=(replace(_BLOCK, sent="bfloat16"), _CHANNEL),
    ),
    Mode(
        name="int8-rollout",
        meaning="trains in BF16 with an INT8 rollout, with scales per channel and per token",
        formats=(_INT8,),
        smoothing=0.5,  # measured in docs/precisions.md
        backends=("auto", "torch"),
        one_granularity="INT8 always has one scale per output channel. Drop rollout_granularity.",
    ),
    Mode(name="fp16", meaning="uses FP16 on both sides, with a loss scale", dtype="float16", rollout_log_probs=True),
)

#: vLLM's names of the plugin's quantizations
QUANTIZATIONS = tuple(dict.fromkeys(found.quantization for found in ROLLOUT_FORMATS.values()))

#: name -> precision
MODES: dict[str, Mode] = {mode.name: mode for mode in _TABLE}
#: the names of the precisions
PRECISIONS = tuple(MODES)
#: the default precision
DEFAULT: Precision = "fp8-unified"
