"""The linear layer on the CPU: FProp, DGrad, WGrad and the quantizers, by shape."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.timing import best_of
from jetrl_patch.fp8.backends import get_backend
from jetrl_patch.fp8.quantize import expand_weight_scale

SHAPES = [(1, 1024, 1024), (8, 1024, 1024), (64, 1024, 1024), (512, 768, 256), (512, 1024, 1024), (2048, 1024, 1024)]


def gemms() -> Iterator[dict[str, object]]:
    """Time of each GEMM with its quantization, relative to the BF16 GEMM of the same shape."""
    backend = get_backend("native")
    for M, N, K in SHAPES:
        x, w = torch.randn(M, K).to(torch.bfloat16), torch.randn(N, K).to(torch.bfloat16)
        g = torch.randn(M, N).to(torch.bfloat16)
        q, s = backend.quantize_weight(w, "pow2")
        rows = expand_weight_scale(s, N)
        qx, sx = backend.quantize_activation(x, "pow2")
        pairs = {
            "FProp": (lambda x=x, w=w: F.linear(x, w), lambda x=x, q=q, r=rows: backend.fprop(x, q, r, "pow2")),
            "DGrad": (
                lambda g=g, w=w: g @ w,
                lambda g=g, q=q, s=s: backend.dgrad(g, q, s, "pow2", torch.bfloat16),
            ),
            "WGrad": (
                lambda g=g, x=x: g.t() @ x,
                lambda g=g, qx=qx, sx=sx: backend.wgrad(g, qx, sx, "pow2", torch.bfloat16),
            ),
        }
        row: dict[str, object] = {"M, N, K": f"{M}, {N}, {K}"}
        for name, (baseline, ours) in pairs.items():
            best = best_of({"bf16": baseline, "fp8": ours})
            row[f"{name} BF16 ms"] = best["bf16"] * 1e3
            row[f"{name} FP8 / BF16"] = best["fp8"] / best["bf16"]
        yield row


def quantizers() -> Iterator[dict[str, object]]:
    """Time of the quantizers relative to a copy of the same BF16 matrix."""
    backend = get_backend("native")
    for M, K in ((64, 1024), (2048, 1024), (4096, 4096)):
        x = torch.randn(M, K).to(torch.bfloat16)
        best = best_of(
            {
                "copy": lambda x=x: x.clone(),
                "activation 1x128": lambda x=x: backend.quantize_activation(x, "pow2"),
                "tokens 128x1": lambda x=x: backend.quantize_tokens(x, "pow2"),
                "weight 128x128": lambda x=x: backend.quantize_weight(x, "pow2"),
                "fingerprint": lambda x=x: backend.fingerprint(x),
            }
        )
        row: dict[str, object] = {"M, K": f"{M}, {K}", "copy GB/s": x.nbytes / best["copy"] / 1e9}
        row |= {f"{name} / copy time": value / best["copy"] for name, value in best.items() if name != "copy"}
        yield row
