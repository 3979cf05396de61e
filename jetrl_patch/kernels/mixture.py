"""A mixture of experts without the experts' products: the router, the sorted pairs of token and expert, the weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.common import bf16_value, decode, load_tile, widened
from jetrl_patch.kernels.formats import BLOCK
from jetrl_patch.kernels.gemm_common import PINNED, check_device, converted, new_output
from jetrl_patch.kernels.silu import silu_mul_gradients

# ---- Sort the pairs of token and expert by expert, on the device: the host reads no count back ----
#     ids [T, k]  ->  order [P], place [P], offsets [E + 1], and tables of tiles and groups        P = T * k pairs
#
# Pair t * k + j is token t's j-th expert. Pairs are sorted by expert, then by token: pair ``order[p]`` has position p, and pair i
# has position ``place[i]``. Expert e has the positions ``offsets[e]`` to ``offsets[e + 1]``. A product needs one tile per 64
# positions of an expert, WGrad one group per 128. Only the device knows how many there are, so grids have the size of the upper
# bound, P // size + min(E, P), and programs without a tile end at once.
#
# A pair whose expert index is out of range gets no position, and ``combine`` makes its token NaN.

#: rows of a product's tile: the fewest of FP8 ``wgmma``, because a decode step gives each expert few tokens
ROWS = 64
#: pairs that a program reads at once, and its warps
STEP, WARPS = 1024, 4


class Table(NamedTuple):
    """Ranges of positions, each of one expert.

    Attributes:
        entries: [bound, 3], one per range: expert, first position, end.
        first: [E + 1], the first entry of each expert, then the number of entries.
    """

    entries: Tensor
    first: Tensor


class Plan(NamedTuple):
    """The sorted pairs of a batch. All tensors but ``ids`` are int32.

    Attributes:
        ids: indices of the experts [T, k], contiguous.
        order, place, offsets: see the comment above.
        tiles: ranges of at most ``ROWS`` positions.
        groups: ranges of at most 128 positions.
    """

    ids: Tensor
    order: Tensor
    place: Tensor
    offsets: Tensor
    tiles: Table
    groups: Table

    @property
    def experts(self) -> int:
        return self.offsets.shape[0] - 1

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of ``of``."""
        return (*self[:4], *self.tiles, *self.groups)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Plan:
        """The plan of ``tensors``."""
        ids, order, place, offsets, *tables = tensors
        return cls(ids, order, place, offsets, Table(*tables[:2]), Table(*tables[2:]))


@triton.jit(do_not_specialize=["P"])  # one binary for every batch
def count_kernel(ids, counts, P, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per expert: the number of its pairs."""
    expert = tl.program_id(0)
    total = tl.zeros((STEP,), tl.int32)
    for start in tl.range(0, P, STEP):
        pair = start + tl.arange(0, STEP)
        total += (tl.load(ids + pair, mask=pair < P, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0))


@triton.jit
def fill_table(entries, first, expert, E, counts, offset, SIZE: tl.constexpr, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the entries of one expert, from the number of pairs of every expert."""
    each = (counts + (SIZE - 1)) // SIZE
    index = tl.arange(0, EXPERTS)
    mine = tl.sum(tl.where(index == expert, each, 0), 0)
    end = offset + tl.sum(tl.where(index == expert, counts, 0), 0)
    start = tl.sum(tl.where(index < expert, each, 0), 0)
    tl.store(first + expert, start)
    if expert == E - 1:
        tl.store(first + E, start + mine)
    for i in tl.range(0, mine, 64):
        j = i + tl.arange(0, 64)
        at = entries + (start + j) * 3
        tl.store(at, tl.full((64,), 0, tl.int32) + expert, mask=j < mine)
        tl.store(at + 1, offset + j * SIZE, mask=j < mine)
        tl.store(at + 2, tl.minimum(offset + (j + 1) * SIZE, end), mask=j < mine)


@triton.jit(do_not_specialize=["E", "P"])  # one binary for every batch
def plan_kernel(  # type: ignore[no-untyped-def]
    ids, counts, order, place, offsets, tiles, tile_first, groups, group_first, P, E,
    ROWS: tl.constexpr, STEP: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """One program per expert: the positions of its pairs, and its entries. EXPERTS is a power of two, at least E."""
    expert = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    every = tl.load(counts + index, mask=index < E, other=0)
    at = tl.sum(tl.where(index < expert, every, 0), 0)
    tl.store(offsets + expert, at)
    if expert == E - 1:
        tl.store(offsets + E, tl.sum(every, 0))
    fill_table(tiles, tile_first, expert, E, every, at, ROWS, EXPERTS)
    fill_table(groups, group_first, expert, E, every, at, 128, EXPERTS)
    for start in tl.range(0, P, STEP):
        pair = start + tl.arange(0, STEP)
        mine = tl.load(ids + pair, mask=pair < P, other=-1) == expert
        one = mine.to(tl.int32)
        position = at + tl.cumsum(one, 0) - 1
        tl.store(order + position, pair, mask=mine)
        tl.store(place + pair, position, mask=mine)
        at += tl.sum(one, 0)


def plan(ids_Tk: Tensor, experts: int) -> Plan:
    """Sort the pairs by expert, in two launches. ``ids_Tk`` holds indices of experts, int64 or int32."""
    if ids_Tk.dtype not in (torch.int32, torch.int64) or ids_Tk.dim() != 2:
        raise TypeError(f"indices of experts: expected int32 or int64 [T, k], found {ids_Tk.dtype} {list(ids_Tk.shape)}")
    check_device(ids_Tk)
    ids, P = ids_Tk.contiguous(), ids_Tk.numel()
    few = min(experts, P)
    sizes = (experts, P, P, experts + 1, (P // ROWS + few) * 3, experts + 1, (P // BLOCK + few) * 3, experts + 1)
    counts, order, place, offsets, *tables = (torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes)
    count_kernel[(experts,)](ids, counts, P, STEP=STEP, num_warps=WARPS, **PINNED)
    plan_kernel[(experts,)](
        ids, counts, order, place, offsets, *tables, P, experts,
        ROWS=ROWS, STEP=STEP, EXPERTS=triton.next_power_of_2(experts), num_warps=WARPS, **PINNED,
    )  # fmt: skip
    tiles, tile_first, groups, group_first = tables
    return Plan(ids, order, place, offsets, Table(tiles.view(-1, 3), tile_first), Table(groups.view(-1, 3), group_first))


# ---- The weighted sum of a mixture and its gradients, without the products -----------------------
#     y_t = sum over the token's pairs, experts ascending, of w * out[place]        FP32, or rounded once to BF16
#
# Each product and each sum is rounded to FP32, as in ``fp8.mixture``, so fusion is off. The pairs of a token are added by
# ascending position, which is ascending expert, whatever their order in ``ids``.
#
# Backward, for each position, with u = dy Wd (unrounded) and h = SiLU(a) * b (quantized):
#
#     dw = <u, h>        dh = bf16(w u)        (da, db) = the gradients of SiLU(a) * b for dh, each rounded to BF16

#: columns of a token that a program adds up, and its warps
COLUMNS, COMBINE_WARPS = 1024, 4
#: positions of a program in backward, and its warps
COMBINE_ROWS = 8
#: above every position
_NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["E"])
def combine_kernel(  # type: ignore[no-untyped-def]
    out, weights, ids, place, y, E, k, H,
    COLUMNS: tl.constexpr, CHOSEN: tl.constexpr, WEIGHTED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One token and COLUMNS columns. CHOSEN is a power of two, at least k.

    An index out of range makes the token NaN. With PART, it is an expert of another rank and is skipped.
    """
    wide = tl.cdiv(H, COLUMNS)
    t = (tl.program_id(0) // wide).to(tl.int64)
    h = (tl.program_id(0) % wide) * COLUMNS + tl.arange(0, COLUMNS)
    j = tl.arange(0, CHOSEN)
    listed = j < k
    expert = tl.load(ids + t * k + j, mask=listed, other=0)
    right = (expert >= 0) & (expert < E)
    position = tl.load(place + t * k + j, mask=listed & right, other=_NONE)
    weight = tl.load(weights + t * k + j, mask=listed, other=0.0)
    total = tl.zeros((COLUMNS,), tl.float32)
    last = -1
    for _ in tl.range(0, k):
        last = tl.min(tl.where(position > last, position, _NONE), 0)
        there = tl.where(last == _NONE, 0, last).to(tl.int64)  # any row if the index is out of range
        row = tl.load(out + there * H + h, mask=h < H, other=0.0)
        if WEIGHTED:
            row = row * tl.sum(tl.where(position == last, weight, 0.0), 0)
        if PART:
            row = tl.where(last == _NONE, 0.0, row)
        total = total + row
    if not PART:
        wrong = tl.max((listed & (right == 0)).to(tl.int32), 0)
        total = tl.where(wrong == 0, total, float("nan"))
    tl.store(y + t * H + h, converted(total, y), mask=h < H)


def combine(out_PH: Tensor, plan: Plan, weights_Tk: Tensor | None, out_dtype: torch.dtype, part: bool = False) -> Tensor:
    """Y [T, H] in BF16, or the unrounded sum in FP32.

    Args:
        out_PH: FP32, a row per position.
        weights_Tk: FP32, contiguous. None adds the rows without weights.
        part: skip pairs whose index is out of range, instead of making their token NaN.
    """
    (T, k), H = plan.ids.shape, out_PH.shape[1]
    if out_PH.dtype != torch.float32 or not out_PH.is_contiguous() or out_PH.shape[0] != T * k:
        raise ValueError(f"expected contiguous torch.float32 [{T * k}, H], found {out_PH.dtype} {list(out_PH.shape)}")
    y = new_output((T, H), out_dtype, out_PH, plan.ids)
    if y.numel():
        combine_kernel[(T * -(-H // COLUMNS),)](
            out_PH, out_PH if weights_Tk is None else weights_Tk, plan.ids, plan.place, y, plan.experts, k, H,
            COLUMNS=COLUMNS, CHOSEN=triton.next_power_of_2(k), WEIGHTED=weights_Tk is not None, PART=part,
            num_warps=COMBINE_WARPS, **PINNED,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["E", "P"])  # one binary for every batch
def pair_backward_kernel(  # type: ignore[no-untyped-def]
    u, a, qh, sh, weights, order, offsets, dab, dweights, P, E, I, sh_m, sh_g, ROWS: tl.constexpr, HARDWARE: tl.constexpr
):
    """ROWS positions and all I columns. ``a`` and ``dab`` are [P, 2I]: gate, then up. Positions without a pair stay unwritten."""
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = p < tl.load(offsets + E)
    pair = tl.load(order + p, mask=there, other=0)
    weight = tl.load(weights + pair, mask=there, other=0.0)[:, None]
    inner = tl.zeros((ROWS,), tl.float32)
    row = p.to(tl.int64)[:, None]
    for g in tl.range(0, tl.cdiv(I, 128)):
        i = g * 128 + tl.arange(0, 128)
        inside = there[:, None] & (i < I)[None, :]
        us = tl.load(u + row * I + i[None, :], mask=inside, other=0.0)
        codes = tl.load(qh + row * I + i[None, :], mask=inside, other=0)
        hs = decode(codes, HARDWARE) * tl.load(sh + p.to(tl.int64) * sh_m + g * sh_g, mask=there, other=0.0)[:, None]
        inner += tl.sum(us * hs, 1)
        gate = load_tile(a, p, i, P, I, 2 * I, HARDWARE)
        up = load_tile(a + I, p, i, P, I, 2 * I, HARDWARE)
        da, db = silu_mul_gradients(gate, up, bf16_value(weight * us, HARDWARE))
        tl.store(dab + row * (2 * I) + i[None, :], converted(da, dab), mask=inside)
        tl.store(dab + row * (2 * I) + I + i[None, :], converted(db, dab), mask=inside)
    tl.store(dweights + pair, inner, mask=there)


def pair_backward(
    u_PI: Tensor, ab_PF: Tensor, qh_PI: Tensor, sh_PG: Tensor, weights_Tk: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, BF16 [P, 2I], and of the routing weights, FP32 [T, k].

    Args:
        u_PI: FP32, dy Wd. ab_PF: BF16, gate and up [P, 2I]. qh_PI, sh_PG: their quantized product.
        weights_Tk: FP32, contiguous.
    """
    check_device(u_PI, ab_PF, qh_PI, sh_PG, weights_Tk)
    P, I = u_PI.shape
    dab, dweights = torch.empty_like(ab_PF), torch.zeros_like(weights_Tk)
    if P:
        pair_backward_kernel[(-(-P // COMBINE_ROWS),)](
            u_PI, ab_PF, qh_PI.view(torch.uint8), sh_PG, weights_Tk, plan.order, plan.offsets, dab, dweights, P, plan.experts, I,
            *sh_PG.stride(), ROWS=COMBINE_ROWS, HARDWARE=not triton.knobs.runtime.interpret, num_warps=COMBINE_WARPS, **PINNED,
        )  # fmt: skip
    return dab, dweights


# ---- The router's choice of experts in one launch, as ``exact.route`` defines it -----------------
# Each program takes one token, so rows are independent. Scores are computed in FP64 and rounded to FP32, as torch does it. Only
# the order of the softmax's sum differs, which changes about one weight in 10^8. The choice compares bits that order as the
# numbers do, with NaN above everything: k times the largest that is not yet chosen, the lowest index on a tie. A cumulative sum
# puts the chosen experts in ascending order.

#: less than ``ordered`` of any number
_LEAST = tl.constexpr(-0x80000000)
ROUTE_WARPS = 1


@triton.jit
def ordered(x):  # type: ignore[no-untyped-def]
    """The bits of FP32 x as integers that order as the numbers do. Both zeros are equal. NaN is the largest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def largest(keys, e, among, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The index of the largest key where ``among`` is true, the lowest index on a tie."""
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
    """``kept`` of GROUPS groups of ``size`` experts are open. GROUPS is 1 if all are. WIDTH is a power of two, at least E."""
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
    logits_TE: Tensor, k: int, renormalize: bool, rule: tuple[Tensor, int, int, float] | None = None
) -> tuple[Tensor, Tensor]:
    """Weights FP32 [T, k] and ascending indices int64 [T, k] of logits in BF16 or FP32. ``rule`` as in ``exact.route.route``."""
    bias_E, groups, kept, scale = rule or (None, 1, 1, 1.0)
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
            WIDTH=triton.next_power_of_2(E), HARDWARE=not triton.knobs.runtime.interpret, num_warps=ROUTE_WARPS, **PINNED,
        )  # fmt: skip
    return weights, ids
