"""The weight quantizer of each rollout format, for a trainer that computes in BF16 itself."""

from __future__ import annotations

from collections.abc import Callable

import torch

from jetrl_patch.fp8 import channel
from jetrl_patch.fp8.formats import ScaleFormat
from jetrl_patch.fp8.quantize import quantize_weight
from jetrl_patch.int8 import quantize as int8

__all__ = ["QUANTIZERS"]

#: name of a ``RolloutFormat`` -> (BF16 weight [N, K], scale format) -> bytes [N, K] and the FP32 scales to send
QUANTIZERS: dict[str, Callable[[torch.Tensor, ScaleFormat], tuple[torch.Tensor, torch.Tensor]]] = {
    "fp8-block": quantize_weight,
    "fp8-channel": channel.quantize_rows,
    "int8-channel": lambda weight, _: int8.quantize_rows(weight),
}
