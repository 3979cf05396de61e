"""Every CPU kernel beside torch: the products of FP8 and BF16, and the ops between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import best_of
from jetrl_patch.fp8.backends import get_backend
from jetrl_patch.fp8.quantize import expand_weight_scale
from jetrl_patch.native import ops
from jetrl_patch.sync.digest import digest

BF16 = torch.bfloat16
#: M, N, K. The last weights of one row fit in no cache.
SHAPES = [(2048, n, n) for n in (512, 1024, 1536)] + [(32, n, n) for n in (512, 1024, 1536)]
SHAPES += [(16, 1024, 1024), (4, 1024, 1024), (1, 512, 512), (1, 1024, 1024), (1, 1536, 1536), (1, 8192, 4096)]
#: up to so many rows a product is bound by the weight's bytes
FEW = 16


def products() -> Iterator[dict[str, object]]:
    """GFLOP/s of Y = X W^T. "packed" reads what a rollout lays out once after a weight sync.

    What the bytes allow is the time in which torch's FP32 product of one row of the same weight, of four bytes an element,
    reads as many bytes.
    """
    backend = get_backend("native")
    for M, N, K in SHAPES:
        x, w = torch.randn(M, K), torch.randn(N, K)
        xb, wb = x.to(BF16), w.to(BF16)
        qx, sx = backend.quantize_activation(xb, "pow2")
        q, blocks = backend.quantize_weight(wb, "pow2")
        s, packed, row = expand_weight_scale(blocks, N), backend.pack(q), x[:1].contiguous()
        best = best_of(
            {
                "torch FP32": lambda x=x, w=w: F.linear(x, w),
                "torch BF16": lambda x=xb, w=wb: F.linear(x, w),
                "FP8": lambda q=q, s=s, x=qx, sx=sx: ops.fp8_gemm(x, sx, q, s, BF16),
                "FP8 packed": lambda q=q, s=s, x=qx, sx=sx, p=packed: ops.fp8_gemm(x, sx, q, s, BF16, packed=p),
                "BF16, exact mode": lambda x=xb, w=wb: ops.bf16_gemm(x, w, BF16),
                "one row": lambda x=row, w=w: F.linear(x, w),
            }
        )
        bytes_allow = best.pop("one row") / w.element_size()
        yield {
            "M, N, K": f"{M}, {N}, {K}",
            **{name: 2e-9 * M * N * K / seconds for name, seconds in best.items()},
            "FP8 / torch FP32": best["torch FP32"] / best["FP8"],
            "FP8 / torch BF16": best["torch BF16"] / best["FP8"],
            "packed, of what the bytes allow": f"{bytes_allow / best['FP8 packed']:.0%}" if M <= FEW else "",
        }


def layer() -> Iterator[dict[str, object]]:
    """GFLOP/s of the three products of a linear layer with their quantizers, and of torch's products of the same shapes."""
    backend = get_backend("native")
    for M, N, K in ((32, 1024, 1024), (512, 768, 256), (2048, 1024, 1024)):
        g, x, w = torch.randn(M, N), torch.randn(M, K), torch.randn(N, K)
        gb, xb, wb = (t.to(BF16) for t in (g, x, w))
        q, s = backend.quantize_weight(wb, "pow2")
        rows, (qx, sx) = expand_weight_scale(s, N), backend.quantize_activation(xb, "pow2")
        best = best_of(
            {
                "FProp": lambda x=xb, q=q, s=rows: backend.fprop(x, q, s, "pow2"),
                "torch BF16, x W^T": lambda x=xb, w=wb: F.linear(x, w),
                "torch FP32, x W^T": lambda x=x, w=w: F.linear(x, w),
                "DGrad": lambda g=gb, q=q, s=s: backend.dgrad(g, q, s, "pow2", BF16),
                "torch BF16, g W": lambda g=gb, w=wb: g @ w,
                "torch FP32, g W": lambda g=g, w=w: g @ w,
                "WGrad": lambda g=gb, q=qx, s=sx: backend.wgrad(g, q, s, "pow2", BF16),
                "torch BF16, g^T x": lambda g=gb, x=xb: g.t() @ x,
                "torch FP32, g^T x": lambda g=g, x=x: g.t() @ x,
            }
        )
        yield {"M, N, K": f"{M}, {N}, {K}", **{name: 2e-9 * M * N * K / seconds for name, seconds in best.items()}}


def operations() -> Iterator[dict[str, object]]:
    """Milliseconds of every other kernel, of what torch has in its place in BF16 and FP32, and of a copy of what it reads."""
    for name, (read, ours, torchs) in _cases().items():
        functions: dict[str, Callable[[], object]] = {"ours": ours, "copy": read.clone}
        if torchs is not None:
            functions |= {"torch BF16": lambda f=torchs: f(BF16), "torch FP32": lambda f=torchs: f(torch.float32)}
        best = {key: 1e3 * seconds for key, seconds in best_of(functions).items()}
        yield {"kernel": name, **{key: best.get(key, "") for key in ("ours", "torch BF16", "torch FP32", "copy")}}


Case = tuple[Tensor, Callable[[], object], Callable[[torch.dtype], object] | None]


def _cases() -> Mapping[str, Case]:
    M, K, heads, width = 2048, 1024, 16, 64
    x, up = torch.randn(M, K).to(BF16), torch.randn(M, K).to(BF16)
    both = {dtype: (x.to(dtype), up.to(dtype), torch.ones(K, dtype=dtype)) for dtype in (BF16, torch.float32)}
    backend = get_backend("native")
    q, s = backend.quantize_activation(x, "pow2")
    table = torch.randn(4096, width // 2).to(BF16)
    positions = torch.arange(M)
    rows = x.view(M, heads, width)
    lengths, longest = 8, M // 8
    starts = torch.arange(lengths + 1, dtype=torch.int32) * longest
    cache = rows[:, None, :4].contiguous()
    blocks = starts[:-1, None] + torch.arange(longest, dtype=torch.int32)
    sizes = torch.full((lengths,), longest, dtype=torch.int32)

    def attend(dtype: torch.dtype) -> Tensor:
        query, key = (t.to(dtype).view(lengths, longest, -1, width).transpose(1, 2) for t in (rows, cache))
        return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)

    one = "2048 x 1024"
    return {
        f"RMSNorm, {one}": (x, lambda: ops.rms_norm(x, both[BF16][2], 1e-6), lambda t: F.rms_norm(both[t][0], (K,), both[t][2])),
        f"SiLU(gate) * up, {one}": (x, lambda: ops.silu_mul(x, up), lambda t: F.silu(both[t][0]) * both[t][1]),
        f"rotary embedding, {heads} heads of {width}": (x, lambda: ops.rotary(rows, table, table, positions), None),
        f"attention, 8 x {longest} tokens, 16 and 4 heads of {width}": (
            x, lambda: ops.attention(rows, cache, cache, blocks, sizes, starts, width**-0.5), attend,
        ),
        f"quantize 1 x 128, {one}": (x, lambda: backend.quantize_activation(x, "pow2"), None),
        f"quantize 128 x 1, {one}": (x, lambda: backend.quantize_tokens(x, "pow2"), None),
        f"quantize 128 x 128, {one}": (x, lambda: backend.quantize_weight(x, "pow2"), None),
        f"dequantize to BF16, {one}": (q, lambda: ops.dequantize(q, s, 1, 128, BF16), None),
        f"pack, {one}": (q, lambda: ops.pack(q), None),
        f"fingerprint, {one}": (x, lambda: ops.fingerprint(x), None),
        f"digest, {one}": (x, lambda: digest(x), None),
    }  # fmt: skip
