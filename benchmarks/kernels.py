"""Every CPU kernel compared with torch: FP8 and BF16 products, and the ops between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Row, best_of
from jetrl_patch.backends import get_backend
from jetrl_patch.native import ops
from jetrl_patch.sync.digest import digest

BF16 = torch.bfloat16
#: M, N, K
SHAPES = [(2048, n, n) for n in (512, 1024, 1536)] + [(32, n, n) for n in (512, 1024, 1536)]
SHAPES += [(16, 1024, 1024), (4, 1024, 1024), (1, 512, 512), (1, 1024, 1024), (1, 1536, 1536), (1, 8192, 4096)]
#: with up to this many rows, reading the weight bounds a product
FEW = 16
#: bytes of FP8 weights, more than any cache holds
UNCACHED = 96 << 20


@dataclass(frozen=True)
class Weight:
    """One weight [N, K] in each form that a product reads."""

    fp32: Tensor
    bf16: Tensor
    q: Tensor
    s: Tensor
    packed: Tensor

    @classmethod
    def random(cls, N: int, K: int) -> Weight:
        w, backend = torch.randn(N, K), get_backend("native")
        quantized = backend.quantize_weight(w.to(BF16), "pow2")
        return cls(w, w.to(BF16), quantized.q, quantized.s_rows, backend.pack(quantized))


def products() -> Iterator[Row]:
    """GFLOP/s of Y = X W^T. "packed" reads the layout that a rollout makes once after a weight sync.

    Decoding reads every weight of a model for each token. So products of few rows take another weight in each call, and the
    weights together exceed the caches. "What the bytes allow" is the time torch's FP32 product of one row takes per byte.
    """
    backend = get_backend("native")
    for M, N, K in SHAPES:
        weights = [Weight.random(N, K) for _ in range(1 if M > FEW else 1 + UNCACHED // (N * K))]
        x = torch.randn(M, K)
        xb, row = x.to(BF16), x[:1].contiguous()
        qx, sx = backend.quantize_activation(xb, "pow2")

        def each(call: Callable[[Weight], Tensor], weights: list[Weight] = weights) -> Callable[[], Tensor]:
            turns = cycle(weights)
            return lambda: call(next(turns))

        best = best_of(
            {
                "torch FP32": each(lambda w, x=x: F.linear(x, w.fp32)),
                "torch BF16": each(lambda w, x=xb: F.linear(x, w.bf16)),
                "FP8": each(lambda w, x=qx, s=sx: ops.fp8_gemm(x, s, w.q, w.s, BF16)),
                "FP8 packed": each(lambda w, x=qx, s=sx: ops.fp8_gemm(x, s, w.q, w.s, BF16, packed=w.packed)),
                "BF16, exact mode": each(lambda w, x=xb: ops.bf16_gemm(x, w.bf16, BF16)),
                "one row": each(lambda w, x=row: F.linear(x, w.fp32)),
            }
        )
        bytes_allow = best.pop("one row") / torch.float32.itemsize
        yield {
            "M, N, K": f"{M}, {N}, {K}",
            **{name: 2e-9 * M * N * K / seconds for name, seconds in best.items()},
            "FP8 / torch FP32": best["torch FP32"] / best["FP8"],
            "FP8 / torch BF16": best["torch BF16"] / best["FP8"],
            "packed, of what the bytes allow": f"{bytes_allow / best['FP8 packed']:.0%}" if M <= FEW else "",
        }


def layer() -> Iterator[Row]:
    """GFLOP/s of a linear layer's three products, including quantization, and of torch's products of the same shapes."""
    backend = get_backend("native")
    for M, N, K in ((32, 1024, 1024), (512, 768, 256), (2048, 1024, 1024)):
        g, x, w = torch.randn(M, N), torch.randn(M, K), torch.randn(N, K)
        gb, xb, wb = (t.to(BF16) for t in (g, x, w))
        qw, qx = backend.quantize_weight(wb, "pow2"), backend.quantize_activation(xb, "pow2")
        best = best_of(
            {
                "FProp": lambda x=xb, q=qw: backend.fprop(x, q),
                "torch BF16, x W^T": lambda x=xb, w=wb: F.linear(x, w),
                "torch FP32, x W^T": lambda x=x, w=w: F.linear(x, w),
                "DGrad": lambda g=gb, q=qw: backend.dgrad(g, q, BF16),
                "torch BF16, g W": lambda g=gb, w=wb: g @ w,
                "torch FP32, g W": lambda g=g, w=w: g @ w,
                "WGrad": lambda g=gb, q=qx: backend.wgrad(g, q, BF16),
                "torch BF16, g^T x": lambda g=gb, x=xb: g.t() @ x,
                "torch FP32, g^T x": lambda g=g, x=x: g.t() @ x,
            }
        )
        yield {"M, N, K": f"{M}, {N}, {K}", **{name: 2e-9 * M * N * K / seconds for name, seconds in best.items()}}


def operations() -> Iterator[Row]:
    """Milliseconds of every other kernel, of torch's equivalent in BF16 and FP32, and of a copy of the input."""
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
