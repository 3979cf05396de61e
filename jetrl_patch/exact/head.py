"""``head_dtype="float32"``: the trainer's ``lm_head`` in FP32.

The rollout holds the head in the run's 16-bit dtype. So the trainer first rounds hidden states and weights to that dtype, and
then multiplies in FP32. Both sides have the same operands, and logits are never rounded to 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact import ops
from jetrl_patch.exact.modules import swap


class Fp32Head:
    """Computes FP32 logits ``[..., V]`` from hidden states ``[..., K]``, with autocast off."""

    weight: Tensor
    bias: Tensor | None
    jetrl_dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        rounded = self.jetrl_dtype
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(rounded).float()
            return F.linear(input.to(rounded).float(), self.weight.to(rounded).float(), bias)


class ExactFp32Head:
    """``Fp32Head`` with a batch-invariant GEMM."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        logits = ops.head_linear_fp32(input, self.weight)
        return logits if self.bias is None else logits + self.bias.to(torch.bfloat16).float()


def check_head(model: Any) -> None:
    """Raise ModelError if ``lm_head`` is not a plain ``nn.Linear``."""
    head = getattr(model, "lm_head", None)
    if not isinstance(head, nn.Linear):
        found, fix = f"{type(head).__name__} in {type(model).__name__}", "leave head_dtype at 'auto' for this model"
        raise ModelError(explain("head_dtype='float32'", required="an lm_head that is an nn.Linear", found=found, fix=fix))


def widen_head(model: Any, config: Config) -> None:
    """Give ``model.lm_head`` an FP32 forward, in place. Raises ModelError if there is none."""
    check_head(model)
    swap(model.lm_head, ExactFp32Head if config.exact else Fp32Head)
    model.lm_head.jetrl_dtype = getattr(torch, config.compute_dtype)
