"""The router's choice in one launch, as ``exact.route`` defines it; one program a token, so that rows are independent.

Scores are computed in FP64 and rounded to FP32, as in torch's operations there: only the order of a softmax's sum differs, which
changes a weight in about one of 10^8. The largest are found by bits that order as the numbers do, with NaN above everything:
k times the largest that is left, the lowest index of those equal. What was chosen lies in ascending order by itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.common import widened
from jetrl_patch.kernels.gemm_common import PINNED, check_device

#: below every number's bits
_LEAST = tl.constexpr(-0x80000000)
WARPS = 1


@triton.jit
def ordered(x):  # type: ignore[no-untyped-def]
    """The bits of FP32 x as integers that compare as the numbers do; both zeros are equal, and NaN is the largest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def largest(keys, e, among, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The index of the largest key of those ``among``, the lowest of equal ones."""
    top = tl.max(tl.where(among, keys, _LEAST), 0)
    return tl.min(tl.where(among & (keys == top), e, WIDTH), 0)


@triton.jit
def at_index(x, e, index):  # type: ignore[no-untyped-def]
    return tl.sum(tl.where(e == index, x, 0.0), 0)


@triton.jit
def route_kernel(  # type: ignore[no-untyped-def]
    logits, bias, weights, ids, E, k, x_t, size, kept, scale,
    RENORMALIZE: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """GROUPS of ``size`` experts, of which ``kept`` are open; 1 if all are. WIDTH is a power of two that covers E."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, WIDTH)
    there = e < E
    x = widened(tl.load(logits + t * x_t + e, mask=there, other=0.0), HARDWARE).to(tl.float64)
    if SIGMOID:
        one = tl.full((WIDTH,), 1.0, tl.float64)
        p = (one / (one + tl.exp(-x))).to(tl.float32)
        score = p + tl.load(bias + e, mask=there, other=0.0)
    else:
        z = tl.where(there, tl.exp(x - tl.max(tl.where(there, x, float("-inf")), 0)), 0.0)
        p = (z / tl.sum(z, 0)).to(tl.float32)
        score = p
    keys = ordered(score)
    if GROUPS > 1:
        group = e // size
        best = tl.zeros((WIDTH,), tl.float32)
        for g in tl.static_range(GROUPS):
            mine = there & (group == g)
            first = largest(keys, e, mine, WIDTH)
            second = largest(keys, e, mine & (e != first), WIDTH)
            best = tl.where(mine, at_index(score, e, first) + at_index(score, e, second), best)
        best_keys = ordered(best)
        opened = tl.zeros((WIDTH,), tl.int32)
        for _ in tl.range(0, kept):
            found = largest(best_keys, e, there & (opened == 0), WIDTH)
            opened = tl.where(group == found // size, 1, opened)
        keys = tl.where(opened == 1, keys, ordered(tl.full((WIDTH,), float("-inf"), tl.float32)))
    chosen = tl.zeros((WIDTH,), tl.int32)
    for _ in tl.range(0, k):
        chosen = tl.where(e == largest(keys, e, there & (chosen == 0), WIDTH), 1, chosen)
    place = tl.cumsum(chosen, 0) - 1
    w = p
    if RENORMALIZE:
        wide = p.to(tl.float64)
        total = tl.sum(tl.where((chosen == 1) & (place == 0), wide, 0.0), 0)
        for j in tl.range(1, k):
            total += tl.sum(tl.where((chosen == 1) & (place == j), wide, 0.0), 0)
        if SIGMOID:
            total += tl.full([], 1e-20, tl.float64)
        w = (wide / total).to(tl.float32)
    if SIGMOID:
        broken = tl.max((there & (p != p)).to(tl.int32), 0)
        w = tl.where(broken == 0, w * scale, float("nan"))
    tl.store(weights + t * k + place, w, mask=chosen == 1)
    tl.store(ids + t * k + place, e.to(tl.int64), mask=chosen == 1)


def route(
    logits_TE: Tensor,
    k: int,
    renormalize: bool,
    bias_E: Tensor | None = None,
    groups: int = 1,
    kept: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Weights FP32 [T, k] and ascending indices int64 [T, k], of a softmax; with a bias FP32 [E], of a sigmoid.

    Args:
        logits_TE: BF16 or FP32.
        groups: of how many equal groups of experts ``kept`` are open.
    """
    if logits_TE.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"the router's logits: expected BF16 or FP32, found {logits_TE.dtype}")
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    (T, E), device = logits_TE.shape, logits_TE.device
    weights, ids = torch.empty(T, k, dtype=torch.float32, device=device), torch.empty(T, k, dtype=torch.int64, device=device)
    bias = weights if bias_E is None else bias_E.contiguous()
    check_device(logits_TE, bias)
    if T:
        route_kernel[(T,)](
            logits_TE, bias, weights, ids, E, k, logits_TE.stride(0), E // groups, kept, scale,
            RENORMALIZE=renormalize, SIGMOID=bias_E is not None, GROUPS=1 if kept == groups else groups,
            WIDTH=triton.next_power_of_2(E), HARDWARE=not triton.knobs.runtime.interpret, num_warps=WARPS, **PINNED,
        )  # fmt: skip
    return weights, ids


def _spec(name: str, dtype: str, sigmoid: bool, groups: int) -> Spec:
    return Spec(
        f"route_{name}_{dtype}", route_kernel,
        {"logits": f"*{dtype}", "bias": "*fp32", "weights": "*fp32", "ids": "*i64", "scale": "fp32"}
        | dict.fromkeys(("E", "k", "x_t", "size", "kept"), "i32"),
        {"RENORMALIZE": True, "SIGMOID": sigmoid, "GROUPS": groups, "WIDTH": 128, "HARDWARE": True},
        {"num_warps": WARPS, **PINNED}, ("E", "x_t"),
    )  # fmt: skip


KERNELS = (
    *(_spec("softmax", dtype, False, 1) for dtype in ("bf16", "fp32")),
    *(_spec(f"sigmoid_groups{groups}", "fp32", True, groups) for groups in (1, 8)),
)
