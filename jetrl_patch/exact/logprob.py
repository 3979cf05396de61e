"""The log-prob of a token, defined once: log-softmax in FP32 of the logits after temperature."""

from __future__ import annotations

import torch
from torch import Tensor


def token_log_probs(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """FP32 log-probs [...] of ``labels`` [...] under ``logits`` [..., V].

    The logits go to FP32 first and are divided there, as vLLM's sampler does; verl divides in BF16 and
    takes another formula per dtype. ``temperature`` is a number or a tensor that broadcasts against [..., 1].
    """
    x = logits.float()
    if isinstance(temperature, Tensor) or temperature != 1.0:
        x = x / temperature
    return torch.log_softmax(x, dim=-1).gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)
