"""The weighted sum of a mixture and its gradients, without the products.

    y_t = sum over the token's pairs, experts ascending, of w * out[place]        FP32, or rounded once to BF16

A product and a sum are each rounded to FP32, as in ``fp8.mixture``: fusion is off. A token's pairs are added in ascending
position, which is ascending expert, in whatever order the token lists them.

Backward, for each position, with u = dy Wd unrounded and h = SiLU(a) * b as it was quantized:

    dw = <u, h>        dh = bf16(w u)        (da, db) = the gradients of SiLU(a) * b for dh, each rounded to BF16
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.e4m3 import bf16_value, decode
from jetrl_patch.kernels.gemm_common import PINNED, check_device, check_output, converted
from jetrl_patch.kernels.plan import Plan
from jetrl_patch.kernels.silu_backward import silu_mul_gradients
from jetrl_patch.kernels.tiles import load_tile

#: columns of a token that a program adds up, and its warps
COLUMNS, WARPS = 1024, 4
#: positions of a program in backward, and its warps
ROWS = 8
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
            COLUMNS=COLUMNS, CHOSEN=triton.next_power_of_2(k), WEIGHTED=weights_Tk is not None, PART=part, num_warps=WARPS,
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
        pair_backward_kernel[(-(-P // ROWS),)](
            u_PI, ab_PF, qh_PI.view(torch.uint8), sh_PG, weights_Tk, plan.order, plan.offsets, dab, dweights, P, plan.experts, I,
            *sh_PG.stride(), ROWS=ROWS, HARDWARE=not triton.knobs.runtime.interpret, num_warps=WARPS, **PINNED,
        )  # fmt: skip
    return dab, dweights


KERNELS = (
    *(
        Spec(
            f"combine_{out}{'_weighted' * weighted}{'_part' * part}", combine_kernel,
            {"out": "*fp32", "weights": "*fp32", "ids": "*i64", "place": "*i32", "y": f"*{out}"}
            | dict.fromkeys(("E", "k", "H"), "i32"),
            {"COLUMNS": COLUMNS, "CHOSEN": 8, "WEIGHTED": weighted, "PART": part}, {"num_warps": WARPS, **PINNED}, ("H",),
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
        {"ROWS": ROWS, "HARDWARE": True}, {"num_warps": WARPS, **PINNED}, ("I",),
    ),
)  # fmt: skip
