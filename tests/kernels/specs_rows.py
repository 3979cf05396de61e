"""Representative arguments of the kernels whose programs take rows or elements: norms, quantizers, routers and others."""

from __future__ import annotations

from jetrl_patch.kernels import (
    digest,
    elementwise,
    head,
    mixture,
    norm,
    quantize,
    silu,
)
from jetrl_patch.kernels.formats import BLOCK

from .aot import OUTS, SCALES, Spec, compiled, pinned, typed

# ---- digest --------------------------------------------------------------------------------------

DIGEST = tuple(
    Spec(
        f"digest_{name}", digest.digest_kernel, typed(f"{kind} x; *i64 out; i32 rows cols ld row0 col0"),
        {"HALVES": halves, "SPECIAL": int(halves), **digest.FIXED}, {"num_warps": 4}, ("cols", "ld"),
    )
    for name, kind, halves in (("bytes", "*u8", False), ("bf16", "*i16", True))
)  # fmt: skip

RANK_SUM = tuple(
    Spec(
        f"rank_sum{ranks}", digest.rank_sum_kernel, typed("*fp32 parts; *bf16 y; i32 M N"),
        {"RANKS": ranks, "SIZE": digest.SIZE}, pinned(digest.WARPS), ("N",),
    )
    for ranks in (2, 8)
)  # fmt: skip


# ---- elementwise ---------------------------------------------------------------------------------

def _rotary_pair(D: int, R: int, backward: bool) -> Spec:
    strides = "q_b q_t q_h k_b k_t k_h c_b c_t"
    return Spec(
        f"rotary_pair_{D}{f'_of_{R}' * (R < D)}{'_backward' * backward}", elementwise.rotary_pair_kernel,
        typed(f"*bf16 q k cos sin q_out k_out; i32 T q_heads k_heads {strides}"),
        {"D": D, "R": R, "HALF": R // 2, "REST": D - R, "HEADS": elementwise.ROTARY_SPAN // D, "BACKWARD": backward,
         "HARDWARE": True},
        pinned(elementwise.ROTARY_WARPS), tuple(strides.split()),
    )  # fmt: skip


ROTARY = tuple(
    _rotary_pair(D, R, backward) for D, R in ((64, 64), (BLOCK, BLOCK), (BLOCK, 64)) for backward in (False, True)
)
ELEMENTWISE_ALL = (
    Spec(
        "silu_mul", elementwise.silu_mul_kernel, typed("*bf16 gate up y; i32 M K gate_m up_m"),
        {"ROWS": elementwise.ROWS, "HARDWARE": True}, pinned(elementwise.WARPS), ("K", "gate_m", "up_m"),
    ),
    *(
        Spec(
            f"rotary_{D}", elementwise.rotary_kernel, typed("*bf16 x y cos sin; *i64 positions; i32 heads x_t x_h"),
            {"D": D, "HEADS": elementwise.SPAN // D, "HARDWARE": True}, pinned(elementwise.WARPS), ("x_t", "x_h"),
        )
        for D in (64, BLOCK)
    ),
    *ROTARY,
)  # fmt: skip


# ---- head ----------------------------------------------------------------------------------------

LOGPROB_BACKWARD = tuple(
    Spec(
        f"log_prob_backward_{name}", head.log_prob_backward_kernel,
        typed(f"*{name} x dx; *i64 labels; *fp32 dy top top_log_prob temperature; i32 V x_m dx_m t_m"),
        {"COLUMNS": head.LOGPROB_COLUMNS, "HARDWARE": True}, pinned(head.LOGPROB_WARPS), ("V", "x_m", "dx_m"),
    )
    for name in OUTS
)  # fmt: skip
HEAD_ALL = (
    *(
        Spec(
            f"bf16_gemm_{out}", head.bf16_gemm_kernel, typed(f"*bf16 x w; *{out} y; i32 M N K x_m w_n"),
            {"ROWS": head.ROWS, "COLUMNS": head.COLUMNS, "STEP": head.STEP, "STAGES": head.STAGES, "HEIGHT": head.HEIGHT},
            pinned(head.WARPS, head.STAGES), ("N", "K", "x_m", "w_n"),
        )
        for out in OUTS
    ),
    *LOGPROB_BACKWARD,
)  # fmt: skip


# ---- mixture -------------------------------------------------------------------------------------

def _combine(out: str, weighted: bool, part: bool) -> Spec:
    return Spec(
        f"combine_{out}{'_weighted' * weighted}{'_part' * part}", mixture.combine_kernel,
        typed(f"*fp32 out weights; *i64 ids; *i32 place; *{out} y; i32 E k H"),
        {"COLUMNS": mixture.COLUMNS, "CHOSEN": 8, "WEIGHTED": weighted, "PART": part}, pinned(mixture.COMBINE_WARPS), ("H",),
    )  # fmt: skip


def _route(name: str, dtype: str, sigmoid: bool, groups: int) -> Spec:
    return Spec(
        f"route_{name}_{dtype}", mixture.route_kernel,
        typed(f"*{dtype} logits; *fp32 bias weights; *i64 ids; fp32 scale; i32 E k x_t size kept"),
        {"RENORMALIZE": True, "SIGMOID": sigmoid, "GROUPS": groups, "WIDTH": 128, "HARDWARE": True},
        pinned(mixture.ROUTE_WARPS), ("E", "x_t"),
    )  # fmt: skip


PLAN = (
    Spec(
        "expert_counts", mixture.count_kernel, typed("*i64 ids; *i32 counts; i32 P"), {"STEP": mixture.STEP},
        pinned(mixture.WARPS),
    ),
    Spec(
        "expert_plan", mixture.plan_kernel,
        typed("*i64 ids; *i32 counts order place offsets tiles tile_first groups group_first; i32 P E"),
        {"ROWS": mixture.ROWS, "STEP": mixture.STEP, "EXPERTS": 128}, pinned(mixture.WARPS),
    ),
)  # fmt: skip
COMBINE = (
    *(_combine(out, weighted, part) for weighted, part in ((True, False), (True, True), (False, False)) for out in OUTS),
    Spec(
        "pair_backward", mixture.pair_backward_kernel,
        typed("*fp32 u sh weights dweights; *bf16 a dab; *u8 qh; *i32 order offsets; i32 P E I sh_m sh_g"),
        {"ROWS": mixture.COMBINE_ROWS, "HARDWARE": True}, pinned(mixture.COMBINE_WARPS), ("I",),
    ),
)  # fmt: skip

ROUTE = (
    *(_route("softmax", dtype, False, 1) for dtype in OUTS),
    *(_route(f"sigmoid_groups{groups}", "fp32", True, groups) for groups in (1, 8)),
)


# ---- norm ----------------------------------------------------------------------------------------

def _norm_backward(width: int) -> Spec:
    shape = norm.shape_for(width)
    return Spec(
        f"rms_norm_backward{width}", norm.rms_norm_backward_kernel,
        typed("*bf16 x w dy dx; *fp32 rstd dw; i32 M K x_m dy_m programs"),
        {"ROWS": shape.rows, "WIDTH": shape.width, "WEIGHT": True, "HARDWARE": True}, pinned(shape.warps),
        ("K", "x_m", "dy_m"),
    )  # fmt: skip


NORM = tuple(
    Spec(
        f"rms_norm{covering * 128}{'_one_plus' * one_plus}", norm.rms_norm_kernel, typed("*bf16 x w y; *fp32 rstd; i32 K x_m"),
        {"EPS": 1e-6, "GROUPS": covering, "ONE_PLUS": one_plus, "HARDWARE": True}, pinned(norm.warps_for(covering)),
        ("K", "x_m"),
    )
    for covering, one_plus in ((1, False), (8, False), (32, False), (64, False), (128, False), (16, True))
)  # fmt: skip
NORM_ROWS = tuple(
    Spec(
        f"norm_rows{covering * 128}{'_added' * add}{'_kept' * keep}_{scale}", norm.norm_rows_kernel,
        typed("*bf16 x residual w total y; *u8 q; *fp32 s rstd; i32 K x_m r_m s_m s_g"),
        {"EPS": 1e-6, "GROUPS": covering, "ADD": add, "KEEP": keep, "POW2": scale == "pow2", "HARDWARE": True},
        compiled(norm.warps_for(covering)), ("K", "x_m", "r_m"),
    )
    for scale in SCALES
    for add, keep in ((False, False), (True, False), (False, True))
    for covering in (8, 32, 64, 128)
)  # fmt: skip
NORM_BACKWARD = tuple(_norm_backward(width) for width in (128, 1024, 2048, 4096, 8192, 16384))


# ---- quantize ------------------------------------------------------------------------------------

def _quantize(scale: str) -> tuple[Spec, ...]:
    fixed = {"POW2": scale == "pow2", "HARDWARE": True}
    x = "*bf16 x; *u8 q; *fp32 s; i32 M K x_m"
    return (
        *(
            Spec(
                f"quantize_rows{rows}_{scale}", quantize.rows_kernel, typed(f"{x} s_m s_g"), {"ROWS": rows, **fixed},
                compiled(warps), ("K", "x_m", "s_m"),
            )
            for rows, warps in ((quantize.ROWS, 4), (quantize.FEW_ROWS, 1))
        ),
        Spec(
            f"quantize_transposed_{scale}", quantize.tokens_kernel, typed(f"{x} pitch"), {"COLUMNS": quantize.COLUMNS, **fixed},
            compiled(4), ("K", "x_m", "pitch"),
        ),
        Spec(
            f"quantize_both_{scale}", quantize.both_kernel, typed(f"{x} s_m s_g pitch; *u8 qt; *fp32 st"), fixed,
            compiled(quantize.BOTH_WARPS), ("K", "x_m", "pitch"),
        ),
        *(
            Spec(
                f"quantize_weight_{dtype}{'_transposed' * transposed}_{scale}", quantize.weight_kernel,
                typed(f"*{dtype} w; *u8 q qt; *fp32 s; i32 N K w_n pitch"), {"TRANSPOSED": transposed, **fixed},
                compiled(quantize.WEIGHT_WARPS[transposed]), ("N", "K", "w_n", "pitch"),
            )
            for dtype in OUTS for transposed in (False, True)
        ),
    )  # fmt: skip


QUANTIZE_ALL = (
    *(spec for scale in SCALES for spec in _quantize(scale)),
    *(
        Spec(
            f"requantize_tokens_{scale}", quantize.requantize_kernel, typed("*u8 q qt; *fp32 s st; i32 M K q_m s_m s_g pitch"),
            {"COLUMNS": quantize.COLUMNS, "POW2": scale == "pow2", "HARDWARE": True}, compiled(4), ("K", "q_m", "pitch"),
        )
        for scale in SCALES
    ),
)  # fmt: skip


# ---- silu ----------------------------------------------------------------------------------------

_BACKWARD = "*bf16 gate up dy dgate dup; i32 M K gate_m up_m dy_m"

SILU = tuple(
    Spec(
        f"silu_mul_rows{rows}{'_kept' * keep}_{scale}", silu.silu_mul_rows_kernel,
        typed("*bf16 gate up y; *u8 q; *fp32 s; i32 M K gate_m up_m s_m s_g"),
        {"ROWS": rows, "KEEP": keep, "POW2": scale == "pow2", "HARDWARE": True}, compiled(warps), ("K", "gate_m", "up_m"),
    )
    for scale in SCALES for rows, warps in (silu.TILE, silu.TILE_OF_FEW) for keep in (False, True)
)  # fmt: skip
SILU_BACKWARD = (
    Spec(
        "silu_mul_backward", silu.silu_mul_backward_kernel, typed(_BACKWARD), {"ROWS": silu.BACKWARD_ROWS, "HARDWARE": True},
        pinned(silu.WARPS), ("K", "gate_m", "up_m", "dy_m"),
    ),
    *(
        Spec(
            f"silu_mul_backward_both_{scale}", silu.silu_mul_backward_both_kernel,
            typed(f"{_BACKWARD} s_m s_g pitch; *u8 qg qgt qu qut; *fp32 sg sgt su sut"),
            {"POW2": scale == "pow2", "HARDWARE": True}, compiled(quantize.BOTH_WARPS), ("K", "gate_m", "up_m", "dy_m", "pitch"),
        )
        for scale in SCALES
    ),
)  # fmt: skip
