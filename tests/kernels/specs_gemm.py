"""Representative arguments of the FP8 products."""

from __future__ import annotations

from jetrl_patch.kernels import (
    gemm,
    gemm_backward,
    gemm_common,
    gemm_grouped,
    gemm_mx,
)
from jetrl_patch.kernels.gemm_backward import HEIGHT, SIDE, STAGES, WGRAD_WARPS
from jetrl_patch.kernels.gemm_common import FEW, NARROW, WIDE, Tile

from .aot import OUTS, SCALES, Spec, box, compiled, pinned, typed

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
