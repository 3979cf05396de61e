"""The linear layers of a block in a decoding step of the rollout, fused as vLLM fuses them, with the quantization of X."""

from __future__ import annotations

import torch

from benchmarks.counted.counter import Counter, Launch
from benchmarks.counted.hopper import DEVICE, hopper
from benchmarks.gpu.shapes import Model
from jetrl_patch.backends import get_backend
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.kernels.formats import FP8, groups

ROWS = 64


def count_decode(model: Model, fp8: bool, best: str = "deep_gemm", rows: int = ROWS) -> tuple[Launch, ...]:
    """Both align modes have the same FP8 linears."""
    with hopper(best), torch.no_grad(), Counter() as counted:
        empty = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device=DEVICE)  # noqa: E731
        for _, N, K in model.linears:
            x = empty(rows, K)
            if not fp8:
                torch.nn.functional.linear(x, empty(N, K))
                continue
            s_blocks = empty(groups(N), groups(K), dtype=torch.float32)
            get_backend(best).fprop(x, Quantized(empty(N, K, dtype=FP8), s_blocks, "blocks", "pow2"))
    return tuple(counted.launches)
