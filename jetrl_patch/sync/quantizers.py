"""The quantizer of each format of a rollout's linears, for weights that the trainer itself multiplies in BF16."""

from __future__ import annotations

from collections.abc import Callable

import torch

from jetrl_patch.fp8 import channel
from jetrl_patch.fp8.formats import ScaleFormat
from jetrl_patch.fp8.quantize import quantize_weight
from jetrl_patch.int8 import quantize as int8

__all__ = ["QUANTIZERS"]

#: name of a ``RolloutFormat`` -> (BF16 weight [N, K], scale format) -> bytes [N, K] and FP32 scales as they are sent
QUANTIZERS: dict[str, Callable[[torch.Tensor, ScaleFormat], tuple[torch.Tensor, torch.Tensor]]] = {
    "fp8-block": quantize_weight,
    "fp8-channel": channel.quantize_rows,
    "int8-channel": lambda weight, _: int8.quantize_rows(weight),
}
