"""The log-prob of a token, defined once: log-softmax in FP32 of the logits after temperature."""

from __future__ import annotations

import torch
from torch import Tensor


def token_log_probs(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """FP32 log-probs [...] of ``labels`` [...] under ``logits`` [..., V].

    The logits go to FP32 first and are divided there, as vLLM's sampler does; verl divides in BF16 and
    takes another formula per dtype. ``temperature`` is a number or a tensor that broadcasts against [..., 1].

    On CUDA too this is vLLM's own formula: torch's log-softmax, one block of threads a row, whose size follows from V. It
    groups a row's elements by the row's alignment to 16 bytes, which is the same for all rows if V is a multiple of 4 (or
    at most 1024); for other vocabularies the trial of ``exact.trial`` decides.
    """
    x = logits.float()
    if x.is_cuda and not isinstance(temperature, Tensor):
        # a number would become a product with its reciprocal there; vLLM divides by a tensor
        temperature = torch.full((), temperature, dtype=torch.float32, device=x.device)
    if isinstance(temperature, Tensor) or temperature != 1.0:
        x = x / temperature
    return torch.log_softmax(x, dim=-1).gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)
