"""The single definition of a token's log-prob: log-softmax in FP32 of the logits after temperature."""

from __future__ import annotations

import torch
from torch import Tensor


def log_probs(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """FP32 log-probs [..., V] of every token under ``logits`` [..., V].

    The logits are converted to FP32 before the division, as in vLLM's sampler; verl divides in BF16 and uses a
    different formula for each dtype. ``temperature`` is a number or a tensor that broadcasts against [..., 1].

    On CUDA this is also vLLM's own formula: torch's log-softmax, one thread block per row, whose size depends on V. It
    groups a row's elements by the row's alignment to 16 bytes, which is the same for all rows if V is a multiple of 4 (or
    at most 1024). For other vocabularies ``exact.trial`` tests it on the machine.
    """
    x = logits.float()
    if x.is_cuda and not isinstance(temperature, Tensor):
        # CUDA multiplies by the reciprocal of a number; vLLM divides by a tensor
        temperature = torch.full((), temperature, dtype=torch.float32, device=x.device)
    if isinstance(temperature, Tensor) or temperature != 1.0:
        x = x / temperature
    return torch.log_softmax(x, dim=-1)


def pick(every: Tensor, labels: Tensor) -> Tensor:
    """The values [...] of ``labels`` [...] among ``every`` [..., V]."""
    return every.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)


def token_log_probs(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """FP32 log-probs [...] of ``labels`` [...] under ``logits`` [..., V]; see ``log_probs``."""
    return pick(log_probs(logits, temperature), labels)
