"""The experts of a mixture without their products: which pairs of token and expert there are, and the weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.common import bf16_value, decode, load_tile
from jetrl_patch.kernels.formats import BLOCK
from jetrl_patch.kernels.gemm_common import PINNED, check_device, check_output, converted
from jetrl_patch.kernels.silu import silu_mul_gradients

# ---- Sort the pairs of token and expert by expert, on the device: no count is read back, so that no launch waits for the host
#     ids [T, k]  ->  order [P], place [P], offsets [E + 1], and tables of tiles and groups        P = T * k pairs
#
# Pair t * k + j is token t's j-th expert. Sorted by expert, and by token within one, pair ``order[p]`` stands at position p and
# pair i at ``place[i]``; expert e has the positions ``offsets[e]`` to ``offsets[e + 1]``. A product needs one tile for each 64
# positions of an expert, WGrad one group for each 128. How many there are is known only on the device: grids follow from the
# upper bound P // size + min(E, P), and programs without a tile end.
#
# An index beyond the experts gets no position. ``combine`` turns its token into NaN.

#: rows of a product's tile: the least that FP8 ``wgmma`` has, because a decoding step gives an expert few tokens
ROWS = 64
#: pairs that a program reads at once, and its warps
STEP, WARPS = 1024, 4


class Table(NamedTuple):
    """Ranges of positions of one expert each: ``entries`` [bound, 3] of expert, first position, end; ``first`` [E + 1] of an
    expert's first entry, and last the number of entries."""

    entries: Tensor
    first: Tensor


class Plan(NamedTuple):
    """The sorted pairs of a batch; everything is int32 but ``ids``.

    Attributes:
        ids: indices of the experts [T, k], contiguous.
        order, place, offsets: see the module.
        tiles: ranges of at most ``ROWS`` positions. groups: of at most 128.
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
        """Everything, for ``of``."""
        return (*self[:4], *self.tiles, *self.groups)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Plan:
        """The plan that consists of these tensors."""
        ids, order, place, offsets, *tables = tensors
        return cls(ids, order, place, offsets, Table(*tables[:2]), Table(*tables[2:]))


@triton.jit(do_not_specialize=["P"])  # one binary for every batch
def count_kernel(ids, counts, P, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program an expert: the number of its pairs."""
    expert = tl.program_id(0)
    total = tl.zeros((STEP,), tl.int32)
    for start in tl.range(0, P, STEP):
        pair = start + tl.arange(0, STEP)
        total += (tl.load(ids + pair, mask=pair < P, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0))


@triton.jit
def fill_table(entries, first, expert, E, counts, offset, SIZE: tl.constexpr, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the entries of one expert, from the counts of all."""
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
    """One program an expert: the positions of its pairs, and its entries. EXPERTS is a power of two that covers E."""
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
    """Sort the pairs by expert, in two launches.

    Args:
        ids_Tk: indices of experts, int64 or int32.

    Raises:
        TypeError: the indices have another dtype.
        ValueError, ConfigError: as ``check_device``.
    """
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


_OUTPUTS = ("order", "place", "offsets", "tiles", "tile_first", "groups", "group_first")
PLAN_KERNELS = (
    Spec(
        "expert_counts", count_kernel, {"ids": "*i64", "counts": "*i32", "P": "i32"}, {"STEP": STEP},
        {"num_warps": WARPS, **PINNED},
    ),
    Spec(
        "expert_plan", plan_kernel,
        {"ids": "*i64", "counts": "*i32", **dict.fromkeys(_OUTPUTS, "*i32"), "P": "i32", "E": "i32"},
        {"ROWS": ROWS, "STEP": STEP, "EXPERTS": 128}, {"num_warps": WARPS, **PINNED},
    ),
)  # fmt: skip


# ---- The weighted sum of a mixture and its gradients, without the products -----------------------
#     y_t = sum over the token's pairs, experts ascending, of w * out[place]        FP32, or rounded once to BF16
#
# A product and a sum are each rounded to FP32, as in ``fp8.mixture``: fusion is off. A token's pairs are added in ascending
# position, which is ascending expert, in whatever order the token lists them.
#
# Backward, for each position, with u = dy Wd unrounded and h = SiLU(a) * b as it was quantized:
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
    """One token and COLUMNS columns; CHOSEN is a power of two that covers k. A wrong index makes the token NaN, but in a PART
    it is an expert of another rank.
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
        there = tl.where(last == _NONE, 0, last).to(tl.int64)  # any row for a wrong index
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


def combine(
    out_PH: Tensor, plan: Plan, weights_Tk: Tensor | None, out_dtype: torch.dtype, part: bool = False
) -> Tensor:
    """Y [T, H] in BF16, or the unrounded sum in FP32.

    Args:
        out_PH: FP32, a row for each position.
        weights_Tk: FP32, contiguous; None adds the rows as they are.
        part: leave out pairs with an index beyond the experts; else it makes its token NaN.
    """
    check_output(out_dtype)
    (T, k), H = plan.ids.shape, out_PH.shape[1]
    if out_PH.dtype != torch.float32 or not out_PH.is_contiguous() or out_PH.shape[0] != T * k:
        raise ValueError(f"expected contiguous torch.float32 [{T * k}, H], found {out_PH.dtype} {list(out_PH.shape)}")
    check_device(out_PH, plan.ids)
    y = torch.empty(T, H, dtype=out_dtype, device=out_PH.device)
    if y.numel():
        combine_kernel[(T * -(-H // COLUMNS),)](
            out_PH, out_PH if weights_Tk is None else weights_Tk, plan.ids, plan.place, y, plan.experts, k, H,
            COLUMNS=COLUMNS, CHOSEN=triton.next_power_of_2(k), WEIGHTED=weights_Tk is not None, PART=part,
            num_warps=COMBINE_WARPS,
            **PINNED,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["E", "P"])  # one binary for every batch
def pair_backward_kernel(  # type: ignore[no-untyped-def]
    u, a, qh, sh, weights, order, offsets, dab, dweights, P, E, I, sh_m, sh_g, ROWS: tl.constexpr, HARDWARE: tl.constexpr
):
    """ROWS positions, all of I. ``a`` and ``dab`` are [P, 2I]: gate, then up. Positions past the last pair stay unwritten."""
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


COMBINE_KERNELS = (
    *(
        Spec(
            f"combine_{out}{'_weighted' * weighted}{'_part' * part}", combine_kernel,
            {"out": "*fp32", "weights": "*fp32", "ids": "*i64", "place": "*i32", "y": f"*{out}"}
            | dict.fromkeys(("E", "k", "H"), "i32"),
            {"COLUMNS": COLUMNS, "CHOSEN": 8, "WEIGHTED": weighted, "PART": part}, {"num_warps": COMBINE_WARPS, **PINNED}, ("H",),
        )
        for out, weighted, part in (
            ("bf16", True, False), ("fp32", True, False), ("bf16", True, True), ("fp32", True, True), ("bf16", False, False),
            ("fp32", False, False),
        )
    ),
    Spec(
        "pair_backward", pair_backward_kernel,
        {"u": "*fp32", "a": "*bf16", "qh": "*u8", "sh": "*fp32", "weights": "*fp32", "order": "*i32", "offsets": "*i32",
         "dab": "*bf16", "dweights": "*fp32"} | dict.fromkeys(("P", "E", "I", "sh_m", "sh_g"), "i32"),
        {"ROWS": COMBINE_ROWS, "HARDWARE": True}, {"num_warps": COMBINE_WARPS, **PINNED}, ("I",),
    ),
)  # fmt: skip

KERNELS: tuple[Spec, ...] = PLAN_KERNELS + COMBINE_KERNELS
