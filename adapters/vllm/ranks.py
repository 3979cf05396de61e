"""Sums over the ranks of an engine.

vLLM rounds each rank's partial sum to BF16 before its all-reduce, which may add in any order. Here partial sums stay FP32: every
rank gathers all of them, adds them in rank order and rounds once. The trainer adds the same parts.
"""

from __future__ import annotations

import torch
from vllm.distributed import tensor_model_parallel_all_gather

from jetrl_patch.fp8.ranks import added

__all__ = ["sum_over_ranks"]


def sum_over_ranks(partial_MN: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's FP32 ``[M, N]``, rounded once: BF16 ``[M, N]``, the same on all."""
    return added(tensor_model_parallel_all_gather(partial_MN.unsqueeze(0), dim=0))
