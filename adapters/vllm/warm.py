"""Compile the FP8 kernels of a loaded model before it serves.

DeepGEMM compiles a kernel for each [N, K] and each tile that it takes for some number of rows. With nvcc that takes seconds,
in the middle of serving if nothing asked before. vLLM's own warm-up (``vllm.model_executor.warmup``) looks for its own kernel
classes, and these layers have none of them. Runs before vLLM measures its memory, so what it allocates is free again by then.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from jetrl_patch.adapters.vllm.formats import BLOCKS, logger
from jetrl_patch.adapters.vllm.linear import ExactRowParallelLinear
from jetrl_patch.adapters.vllm.method import quantized_modules

__all__ = ["warm_up"]


@torch.inference_mode()
def warm_up(model: torch.nn.Module, most: int) -> int:
    """Multiply with one weight of each shape, for batches up to ``most`` rows; say in the log how far it is.

    Returns:
        the number of products: 0 for a backend that compiles nothing.
    """
    kinds: dict[tuple[Any, ...], Any] = {}
    for layer, method in quantized_modules(model):
        partial = isinstance(layer, ExactRowParallelLinear) and layer.tp_size > 1 and layer.reduce_results
        kinds.setdefault((*layer.weight.shape, partial, hasattr(layer, BLOCKS)), (layer, method))
    done = 0
    for number, ((N, K, partial, _), (layer, method)) in enumerate(kinds.items(), 1):
        rows = method.format.compiled_rows(layer.weight.device, most)
        if not rows:
            continue
        start = time.monotonic()
        x_MK = torch.zeros(max(rows), K, dtype=torch.bfloat16, device=layer.weight.device)
        for M in rows:
            (method.partial_sum if partial else method.apply)(layer, x_MK[:M])
        done += len(rows)
        took = time.monotonic() - start
        logger.info("jetrl_patch: FP8 kernels for [%d, %d] are compiled, %d of %d, %.1f s", N, K, number, len(kinds), took)
    if done:
        torch.cuda.empty_cache()
    return done
