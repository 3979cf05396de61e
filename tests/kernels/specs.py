"""Representative arguments of every Triton kernel, with which the tests compile it for Hopper."""

from __future__ import annotations

from jetrl_patch.kernels import (
    attention,
    attention_backward,
    delta_net,
    digest,
    elementwise,
    gemm,
    gemm_backward,
    gemm_common,
    gemm_grouped,
    gemm_mx,
    head,
    kv_cache,
    latent,
    mixture,
    norm,
    quantize,
    silu,
)
from jetrl_patch.kernels.common import COMPILER
from jetrl_patch.kernels.formats import BLOCK
from jetrl_patch.kernels.gemm_backward import HEIGHT, SIDE, STAGES, WGRAD_WARPS
from jetrl_patch.kernels.gemm_common import FEW, NARROW, PINNED, WIDE, Tile

from .aot import Spec

SCALES = ("pow2", "fp32")


def box(rows: int, columns: int = BLOCK) -> str:
    """Triton's type name for a TMA descriptor with this box."""
    return f"tensordesc<fp8e4nv[{rows},{columns}]>"


def typed(text: str) -> dict[str, str]:
    """``"*bf16 q k; i32 T"`` as argument -> Triton's type."""
    parts = (part.split() for part in text.split(";"))
    return {name: kind for kind, *names in parts for name in names}


def pinned(warps: int, stages: int = 0) -> dict[str, object]:
    return {"num_warps": warps, **({"num_stages": stages} if stages else {}), **PINNED}


def compiled(warps: int, stages: int = 0) -> dict[str, object]:
    return {"num_warps": warps, **({"num_stages": stages} if stages else {}), **COMPILER}


# ---- attention -----------------------------------------------------------------------------------

def _attention(kind: str, D: int) -> Spec:
    rows, keys, stages, warps = attention.TILES[D]
    size, split, fp8 = 0 if kind == "varlen" else 16, kind in ("split", "fp8"), kind == "fp8"
    held, scales, out = "*u8" if fp8 else "*bf16", "*fp32" if fp8 else "*bf16", "*fp32" if split else "*bf16"
    return Spec(
        f"attention_{kind}_{D}", attention.attention_kernel,
        typed(f"*bf16 q; {held} k v; {scales} k_s v_s; {out} out; *fp32 lse; *i32 starts lengths table; i32 R T; fp32 scale; "
              "i32 q_t k_b k_t k_h s_b table_r"),
        {"KH": 4, "PER": 7, "D": D, "ROWS": rows, "KEYS": keys, "CHUNK": attention.CHUNK, "STAGES": stages, "SIZE": size,
         "FP8": fp8, "SPLIT": split, "HARDWARE": True},
        pinned(warps, stages), ("q_t", "k_b", "k_t", "k_h", "s_b"),
    )  # fmt: skip


def _kv_cache(name: str, D: int) -> Spec:
    stored = name == "stored"
    q, s, slots = ("*u8", "*fp32", "*i64") if stored else ("*bf16", "*bf16", "*bf16")
    return Spec(
        f"kv_{name}_{D}", kv_cache.store_kernel,
        typed(f"*bf16 k v; {q} qk qv; {s} sk sv; {slots} slots; i32 k_t v_t q_b s_b"),
        {"KH": 4, "D": D, "SIZE": 16 if stored else 0, "HARDWARE": True}, compiled(kv_cache.WARPS), ("k_t", "v_t", "q_b", "s_b"),
    )  # fmt: skip


ATTENTION = tuple(_attention(kind, D) for D in attention.TILES for kind in ("varlen", "paged", "split", "fp8"))
KV_CACHE = tuple(_kv_cache(name, D) for D in attention.HEAD_DIMS for name in ("rounded", "stored"))
ATTENTION_ALL = (
    *ATTENTION,
    *KV_CACHE,
    Spec(
        "merge", elementwise.merge_kernel, typed("*bf16 w a b y; i32 N K R; fp32 scaling"),
        {"ROWS": elementwise.MERGE_ROWS, "HARDWARE": True}, pinned(elementwise.MERGE_WARPS), ("N", "K"),
    ),
)  # fmt: skip

CHUNKS = tuple(
    Spec(
        f"attention_combine_{D}", attention.combine_kernel,
        typed("*fp32 sums ends lse; *bf16 out; *i32 starts lengths; i32 R T"),
        {"KH": 4, "PER": 7, "CHUNK": attention.CHUNK, "STAGES": attention.COMBINE_STAGES, "HARDWARE": True, "D": D, "ROWS": rows},
        pinned(attention.COMBINE_WARPS, attention.COMBINE_STAGES),
    )
    for D, rows in attention.COMBINE_ROWS.items()
)  # fmt: skip


def _attention_backward(D: int) -> tuple[Spec, ...]:
    heads = {"KH": 4, "PER": 7, "D": D, "HARDWARE": True}
    inputs = "*bf16 q k v grad; *fp32 level delta; *i32 starts; i32 R T; fp32 scale natural"

    def spec(name: str, kernel: object, tile: attention_backward.Tile, sizes: tuple[str, str], written: str) -> Spec:
        fixed = {**heads, "STAGES": attention_backward.STAGES, **dict(zip(sizes, tile, strict=False))}
        options = pinned(tile.warps, attention_backward.STAGES)
        return Spec(f"attention_{name}_{D}", kernel, typed(f"{inputs}; *bf16 {written}"), fixed, options)

    return (
        spec("dq", attention_backward.dq_kernel, attention_backward.DQ[D], ("ROWS", "KEYS"), "dq"),
        spec("dkdv", attention_backward.dkdv_kernel, attention_backward.DKDV[D], ("HELD", "WALKED"), "dk dv"),
        row_sums(f"attention_row_sums_{D}", heads),
    )


def row_sums(name: str, heads: dict[str, object]) -> Spec:
    types = typed("*bf16 grad out; *fp32 lse delta level; i32 T")
    fixed = {**heads, "SUMMED": attention_backward.SUMMED}
    return Spec(name, attention_backward.row_sums_kernel, types, fixed, pinned(attention_backward.WARPS))


ATTENTION_BACKWARD = tuple(spec for D in attention.HEAD_DIMS for spec in _attention_backward(D))


# ---- delta nets ----------------------------------------------------------------------------------

def _delta_nets(K: int, width: int) -> tuple[Spec, ...]:
    numbers, pool, heads = "*fp32 q k decay beta", "*i32 starts slots; *u8 fresh", "i32 KH H"
    hardware, columns = {"HARDWARE": True}, {"COLUMNS": delta_net.BACK_COLUMNS}
    kernels = {
        "inputs": (
            delta_net.inputs_kernel, f"{numbers}; *bf16 y a b A bias; i32 a_t b_t; {heads}; fp32 scale",
            {"GATES": delta_net.GATES, **hardware}, 1,
        ),
        "rule": (
            delta_net.rule_kernel, f"{numbers}; *bf16 y o; {pool}; *fp32 state u; i32 stride held kept; {heads}",
            {"COLUMNS": delta_net.COLUMNS, **hardware}, delta_net.WARPS,
        ),
        "backwards": (
            delta_net.backwards_kernel, f"{numbers} u grad dk dv dbeta; *i32 starts; i32 T; {heads}", columns,
            delta_net.BACK_WARPS,
        ),
        "forwards": (
            delta_net.forwards_kernel, f"{numbers} u grad dq dk dv dlog; *bf16 y; *i32 starts; i32 T; {heads}",
            {**columns, **hardware}, delta_net.BACK_WARPS,
        ),
    }  # fmt: skip
    return tuple(
        Spec(f"delta_{name}_{K}", kernel, typed(types), {"K": K, "V": K, "WIDTH": width, **fixed}, pinned(warps))
        for name, (kernel, types, fixed, warps) in kernels.items()
    )


#: heads of 128 (Qwen3-Next), and of a width that is no power of two
DELTA_NET = (
    Spec(
        "delta_conv", delta_net.conv_kernel,
        typed("*bf16 x w y state; *i32 starts slots; *u8 fresh; i32 C x_t stride held"),
        {"W": 4, "ROWS": delta_net.ROWS, "CHANNELS": delta_net.CHANNELS, "HARDWARE": True}, pinned(delta_net.CONV_WARPS),
        ("C", "x_t"),
    ),
    *_delta_nets(128, 128),
    *_delta_nets(40, 64),
)  # fmt: skip


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


# ---- gemm ----------------------------------------------------------------------------------------

def _gemm(tile: Tile, out: str, splits: int, blocks: bool) -> Spec:
    return Spec(
        f"fprop_{tile.rows}x{tile.columns}_{out}" + "_blocks" * blocks + (f"_splits{splits}" if splits > 1 else ""),
        gemm.fprop_kernel,
        typed(f"{box(tile.rows)} x_MK; {box(tile.columns)} w_NK; *fp32 sx sw; *{out} y; "
              "i32 M N K sx_m sx_g sw_n sw_g programs"),
        {"BLOCKS": blocks, "SPLITS": splits, "ROWS": tile.rows, "COLUMNS": tile.columns, "STAGES": tile.stages,
         "HEIGHT": gemm.HEIGHT},
        pinned(tile.warps, tile.stages), ("N", "K"),
    )  # fmt: skip


def _decode(tile: Tile, out: str, scale: str, blocks: bool) -> Spec:
    stages, _ = gemm.PIPELINE[tile.columns]
    return Spec(
        f"decode_{gemm.ROWS}x{tile.columns}_{out}{'_blocks' * blocks}_{scale}", gemm.decode_kernel,
        typed(f"*bf16 x; {box(tile.columns)} w_NK; *fp32 sw; *{out} y; i32 M N K x_m sw_n sw_g programs"),
        {"BLOCKS": blocks, "ROWS": gemm.ROWS, "COLUMNS": tile.columns, "STAGES": stages, "POW2": scale == "pow2",
         "HARDWARE": True},
        compiled(tile.warps, stages), ("N", "K", "x_m"),
    )  # fmt: skip


OUTS = ("bf16", "fp32")
GEMM = (
    *(
        _gemm(tile, out, splits, blocks)
        for blocks in (False, True) for tile in (NARROW, WIDE) for out in OUTS for splits in (1, 2, 4, 8)
    ),
    *(_gemm(tile, out, 1, blocks) for blocks in (False, True) for tile in FEW for out in OUTS),
)  # fmt: skip
GEMM_DECODE = tuple(
    _decode(tile, out, scale, blocks)
    for blocks in (False, True) for scale in SCALES for tile in gemm.TILES[blocks] for out in OUTS
)  # fmt: skip
GEMM_ALL = GEMM + GEMM_DECODE

#: for Blackwell, and therefore not in ``ALL``
GEMM_MX = tuple(
    Spec(
        f"mx_{out}", gemm_mx.fprop_mx_kernel, typed(f"*fp8e4nv x w; *u8 sx sw; *{out} y; i32 M N K G x_m w_n"),
        {"ROWS": gemm_mx.ROWS, "COLUMNS": gemm_mx.COLUMNS, "DEPTH": gemm_mx.DEPTH}, pinned(gemm_mx.WARPS, gemm_mx.STAGES),
        ("N", "K", "x_m", "w_n"),
    )
    for out in OUTS
)  # fmt: skip

GEMM_DGRAD = (
    Spec(
        "transpose", gemm_backward.transpose_kernel, typed("*u8 w transposed; i32 N K w_n pitch"), {},
        pinned(gemm_backward.WARPS), ("N", "K", "w_n", "pitch"),
    ),
)  # fmt: skip
GEMM_WGRAD = tuple(
    Spec(
        f"wgrad_{SIDE}x{SIDE}_{out}" + "_add" * add, gemm_backward.wgrad_kernel,
        typed(f"{box(SIDE)} g_NM x_KM; *fp32 sg sx; *{out} dw; i32 M N K sg_g sx_g programs"),
        {"sg_n": 1, "sx_k": 1, "ADD": add, "SIDE": SIDE, "STAGES": STAGES, "HEIGHT": HEIGHT},
        pinned(WGRAD_WARPS, STAGES), ("N", "K", "sg_g", "sx_g"),
    )
    for out, add in (("bf16", False), ("fp32", False), ("fp32", True))
)  # fmt: skip

GEMM_COMMON = (
    Spec(
        "block_scales", gemm_common.block_scales_kernel, typed("*fp32 s out; i32 N G s_n s_g"), {"WIDTH": gemm_common.WIDTH},
        pinned(4), ("N",),
    ),
)  # fmt: skip


# ---- gemm_grouped --------------------------------------------------------------------------------

def _grouped(name: str, out: str, tokens: bool, beside: int, summed: int) -> Spec:
    tile = gemm_grouped.TILE
    return Spec(
        f"grouped_{name}_{out}", gemm_grouped.grouped_kernel,
        typed(f"*fp8e4nv x; {box(tile.columns)} w_SNK; *fp32 sx sw; *{out} y; *i32 order tiles tile_first; "
              "i32 E N K k x_r sx_r sx_g sw_s sw_n sw_g programs"),
        {"TOKENS": tokens, "BESIDE": beside, "SUMMED": summed, "ROWS": tile.rows, "COLUMNS": tile.columns,
         "STAGES": tile.stages, "HEIGHT": gemm_grouped.HEIGHT},
        pinned(tile.warps, tile.stages), ("N", "K", "x_r"),
    )  # fmt: skip


GEMM_GROUPED = (
    _grouped("gate_up", "bf16", True, 2, 1),
    _grouped("down", "fp32", False, 1, 1),
    _grouped("down_dgrad", "fp32", True, 1, 1),
    _grouped("gate_up_dgrad", "fp32", False, 1, 2),
)


def _saved(scale: str, tokens: bool) -> tuple[Spec, Spec]:
    tables = "*i32 order groups group_first; *u8 q; *fp32 s; i32 E W k x_r pitch"
    fixed = {"TOKENS": tokens, "COLUMNS": gemm_grouped.SAVED_COLUMNS, "POW2": scale == "pow2", "HARDWARE": True}
    how = (fixed, compiled(4), ("W", "x_r", "pitch"))
    weighted, regroup = f"group_tokens{'_weighted' * tokens}_{scale}", f"regroup{'_tokens' * tokens}_{scale}"
    return (
        Spec(weighted, gemm_grouped.group_tokens_kernel, typed(f"*bf16 x; *fp32 weights; {tables}"), *how),
        Spec(regroup, gemm_grouped.regroup_kernel, typed(f"*u8 x; *fp32 sx; {tables}; i32 s_r s_g"), *how),
    )


GEMM_GROUPED_WGRAD = (
    *(
        Spec(
            f"grouped_wgrad_{out}", gemm_grouped.grouped_wgrad_kernel,
            typed(f"{box(SIDE)} g_NM x_KM; *fp32 sg sx; *{out} dw; *i32 group_first; i32 E N K programs"),
            {"SIDE": SIDE, "STAGES": STAGES, "HEIGHT": HEIGHT}, pinned(WGRAD_WARPS, STAGES), ("N", "K"),
        )
        for out in OUTS
    ),
    *(spec for scale in SCALES for tokens in (False, True) for spec in _saved(scale, tokens)),
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


# ---- latent attention ----------------------------------------------------------------------------

def latent_spec(name: str, size: int = 0, split: bool = False, heads: int = 16) -> Spec:
    """A forward kernel at the widths of DeepSeek-V3 and Moonlight."""
    held, walked, stages, warps = latent.TILE
    return Spec(
        name, latent.latent_kernel,
        typed(f"*bf16 q keys; {'*fp32' if split else '*bf16'} out; *fp32 lse; *i32 starts lengths table; i32 REQUESTS T; "
              "fp32 scale; i32 k_b k_t table_r"),
        {"PER": heads, "L": 512, "R": 64, "PART": latent.PART, "ROWS": held, "KEYS": walked, "CHUNK": attention.CHUNK,
         "STAGES": stages, "SIZE": size, "SPLIT": split, "HARDWARE": True},
        pinned(warps, stages), ("k_b", "k_t"),
    )  # fmt: skip


def _latent_backward(name: str, kernel: object, tile: tuple[int, int, int, int], sizes: tuple[str, str]) -> Spec:
    held, walked, stages, warps = tile
    return Spec(
        f"latent_{name}", kernel,
        typed(f"*bf16 q keys grad {name}; *fp32 level delta; *i32 starts; i32 REQUESTS T; fp32 scale natural"),
        {"PER": 16, "L": 512, "R": 64, "PART": latent.BACK_PART, sizes[0]: held, sizes[1]: walked, "STAGES": stages,
         "HARDWARE": True},
        pinned(warps, stages),
    )  # fmt: skip


def _latent_product(N: int, K: int) -> Spec:
    rows, columns, inner = latent.PRODUCT
    return Spec(
        f"latent_product_{N}", latent.product_kernel, typed("*bf16 x w y; i32 T x_t x_h w_h w_n w_k"),
        {"H": 16, "N": N, "K": K, "ROWS": rows, "COLUMNS": columns, "INNER": inner, "STAGES": latent.PRODUCT_STAGES,
         "HARDWARE": True},
        pinned(latent.PRODUCT_WARPS, latent.PRODUCT_STAGES), ("x_t", "x_h", "w_h"),
    )  # fmt: skip


LATENT = (
    latent_spec("latent_varlen"),
    latent_spec("latent_paged", 64),
    latent_spec("latent_split", 64, True),
    _latent_backward("dq", latent.dq_kernel, latent.DQ, ("ROWS", "KEYS")),
    _latent_backward("dkeys", latent.dkeys_kernel, latent.DKEYS, ("HELD", "ROWS")),
    row_sums("latent_row_sums", {"KH": 1, "PER": 16, "D": 512, "HARDWARE": True}),
    _latent_product(512, 128),
    _latent_product(128, 512),
)


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

def _norm_backward(width: int, add: bool) -> Spec:
    shape = norm.shape_for(width)
    return Spec(
        f"rms_norm_backward{width}{'_added' * add}", norm.rms_norm_backward_kernel,
        typed("*bf16 x w dy other dx; *fp32 rstd dw; i32 M K x_m dy_m other_m programs"),
        {"ROWS": shape.rows, "WIDTH": shape.width, "WEIGHT": True, "ADD": add, "HARDWARE": True}, pinned(shape.warps),
        ("K", "x_m", "dy_m", "other_m"),
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
NORM_BACKWARD = tuple(_norm_backward(width, add) for add in (False, True) for width in (128, 1024, 2048, 4096, 8192, 16384))


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


#: every kernel of ``jetrl_patch.kernels`` for Hopper
ALL = (
    *ATTENTION_ALL, *CHUNKS, *ATTENTION_BACKWARD, *DELTA_NET, *DIGEST, *RANK_SUM, *ELEMENTWISE_ALL, *GEMM_ALL, *GEMM_DGRAD,
    *GEMM_WGRAD, *GEMM_COMMON, *GEMM_GROUPED, *GEMM_GROUPED_WGRAD, *HEAD_ALL, *LATENT, *PLAN, *COMBINE, *NORM, *NORM_ROWS,
    *NORM_BACKWARD, *QUANTIZE_ALL, *ROUTE, *SILU, *SILU_BACKWARD,
)  # fmt: skip


def specs() -> dict[str, Spec]:
    """All kernels by name.

    Raises:
        ValueError: two kernels have the same name.
    """
    found: dict[str, Spec] = {}
    for spec in ALL:
        if spec.name in found:
            raise ValueError(f"two kernels are registered as {spec.name}")
        found[spec.name] = spec
    return found
