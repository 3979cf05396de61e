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


def box(rows: int, columns: int = BLOCK) -> str:
    """Triton's type name for a TMA descriptor with this box."""
    return f"tensordesc<fp8e4nv[{rows},{columns}]>"


# ---- attention -----------------------------------------------------------------------------------

def _attention_specs() -> tuple[Spec, ...]:
    integers = dict.fromkeys(("starts", "lengths", "table"), "*i32") | {"R": "i32", "T": "i32"}
    numbers = integers | {"scale": "fp32"} | dict.fromkeys(("q_t", "k_b", "k_t", "k_h", "s_b", "table_r"), "i32")
    kinds = {"varlen": (0, False), "paged": (16, False), "split": (16, True), "fp8": (16, True)}
    found = []
    for D, (rows, keys, stages, warps) in attention.TILES.items():
        fixed = {"KH": 4, "PER": 7, "D": D, "ROWS": rows, "KEYS": keys, "CHUNK": attention.CHUNK, "STAGES": stages}
        for kind, (size, split) in kinds.items():
            fp8 = kind == "fp8"
            types = {"q": "*bf16"} | dict.fromkeys(("k", "v"), "*u8" if fp8 else "*bf16")
            types |= dict.fromkeys(("k_s", "v_s"), "*fp32" if fp8 else "*bf16")
            types |= {"out": "*fp32" if split else "*bf16", "lse": "*fp32"}
            found.append(
                Spec(
                    f"attention_{kind}_{D}", attention.attention_kernel, types | numbers,
                    {**fixed, "SIZE": size, "FP8": fp8, "SPLIT": split, "HARDWARE": True},
                    {"num_warps": warps, "num_stages": stages, **PINNED}, ("q_t", "k_b", "k_t", "k_h", "s_b"),
                )
            )  # fmt: skip
    return tuple(found)


ATTENTION = _attention_specs()


def _kv_cache_specs() -> tuple[Spec, ...]:
    found = []
    for D in attention.HEAD_DIMS:
        for name, size in (("rounded", 0), ("stored", 16)):
            types = dict.fromkeys(("k", "v"), "*bf16") | dict.fromkeys(("qk", "qv"), "*u8" if size else "*bf16")
            types |= dict.fromkeys(("sk", "sv"), "*fp32" if size else "*bf16") | {"slots": "*i64" if size else "*bf16"}
            types |= dict.fromkeys(("k_t", "v_t", "q_b", "s_b"), "i32")
            fixed = {"KH": 4, "D": D, "SIZE": size, "HARDWARE": True}
            options = {"num_warps": kv_cache.WARPS, **COMPILER}
            found.append(Spec(f"kv_{name}_{D}", kv_cache.store_kernel, types, fixed, options, ("k_t", "v_t", "q_b", "s_b")))
    return tuple(found)


KV_CACHE = _kv_cache_specs()


MERGE = (
    Spec(
        "merge", elementwise.merge_kernel, dict.fromkeys(("w", "a", "b", "y"), "*bf16")
        | dict.fromkeys(("N", "K", "R"), "i32") | {"scaling": "fp32"},
        {"ROWS": elementwise.MERGE_ROWS, "HARDWARE": True}, {"num_warps": elementwise.MERGE_WARPS, **PINNED}, ("N", "K"),
    ),
)  # fmt: skip


ATTENTION_ALL = ATTENTION + KV_CACHE + MERGE


# ---- chunks --------------------------------------------------------------------------------------

def _chunks_specs() -> tuple[Spec, ...]:
    types = {"sums": "*fp32", "ends": "*fp32", "out": "*bf16", "lse": "*fp32", "starts": "*i32", "lengths": "*i32"}
    fixed = {"KH": 4, "PER": 7, "CHUNK": attention.CHUNK, "STAGES": attention.COMBINE_STAGES, "HARDWARE": True}
    options = {"num_warps": attention.COMBINE_WARPS, "num_stages": attention.COMBINE_STAGES, **PINNED}
    return tuple(
        Spec(
            f"attention_combine_{D}", attention.combine_kernel, types | {"R": "i32", "T": "i32"},
            {**fixed, "D": D, "ROWS": attention.COMBINE_ROWS[D]}, options,
        )
        for D in attention.COMBINE_ROWS
    )  # fmt: skip


CHUNKS = _chunks_specs()


# ---- attention_backward --------------------------------------------------------------------------

def _attention_backward_specs() -> tuple[Spec, ...]:
    inputs = dict.fromkeys(("q", "k", "v", "grad"), "*bf16") | dict.fromkeys(("level", "delta"), "*fp32")
    numbers = {"starts": "*i32", "R": "i32", "T": "i32", "scale": "fp32", "natural": "fp32"}
    found = []
    for D in attention.HEAD_DIMS:
        heads = {"KH": 4, "PER": 7, "D": D, "HARDWARE": True}
        for name, kernel, tile, sizes, written in (
            ("dq", attention_backward.dq_kernel, attention_backward.DQ[D], ("ROWS", "KEYS"), ("dq",)),
            ("dkdv", attention_backward.dkdv_kernel, attention_backward.DKDV[D], ("HELD", "WALKED"), ("dk", "dv")),
        ):
            fixed = {**heads, "STAGES": attention_backward.STAGES, **dict(zip(sizes, tile, strict=False))}
            options = {"num_warps": tile.warps, "num_stages": attention_backward.STAGES, **PINNED}
            types = inputs | dict.fromkeys(written, "*bf16") | numbers
            found.append(Spec(f"attention_{name}_{D}", kernel, types, fixed, options))
        types = dict.fromkeys(("grad", "out"), "*bf16") | dict.fromkeys(("lse", "delta", "level"), "*fp32") | {"T": "i32"}
        options = {"num_warps": attention_backward.WARPS, **PINNED}
        heads |= {"SUMMED": attention_backward.SUMMED}
        found.append(Spec(f"attention_row_sums_{D}", attention_backward.row_sums_kernel, types, heads, options))
    return tuple(found)


ATTENTION_BACKWARD = _attention_backward_specs()


# ---- delta nets ----------------------------------------------------------------------------------

def _delta_net_specs() -> tuple[Spec, ...]:
    """Heads of 128 (Qwen3-Next), and of a width that is no power of two."""
    pool = {"starts": "*i32", "slots": "*i32", "fresh": "*u8"}
    conv = {"x": "*bf16", "w": "*bf16", "y": "*bf16", **pool, "state": "*bf16"}
    found = [
        Spec(
            "delta_conv", delta_net.conv_kernel, conv | dict.fromkeys(("C", "x_t", "stride", "held"), "i32"),
            {"W": 4, "ROWS": delta_net.ROWS, "CHANNELS": delta_net.CHANNELS, "HARDWARE": True},
            {"num_warps": delta_net.CONV_WARPS, **PINNED}, ("C", "x_t"),
        )
    ]  # fmt: skip
    numbers = dict.fromkeys(("q", "k", "y", "decay", "beta"), "*fp32") | {"y": "*bf16"}
    back = dict.fromkeys(("u", "grad", "starts", "dq", "dk", "dv", "dlog"), "*fp32") | {"starts": "*i32"}
    heads = {"KH": "i32", "H": "i32"}
    for K, width in ((128, 128), (40, 64)):
        sizes = {"K": K, "V": K, "WIDTH": width}
        gates = dict.fromkeys(("y", "a", "b", "A", "bias"), "*bf16") | dict.fromkeys(("q", "k", "decay", "beta"), "*fp32")
        kernels = {
            "inputs": (
                delta_net.inputs_kernel, gates | {"a_t": "i32", "b_t": "i32"} | heads | {"scale": "fp32"},
                {"GATES": delta_net.GATES, "HARDWARE": True}, 1,
            ),
            "rule": (
                delta_net.rule_kernel, numbers | pool | {"state": "*fp32", "o": "*bf16", "u": "*fp32"}
                | dict.fromkeys(("stride", "held", "kept"), "i32") | heads,
                {"COLUMNS": delta_net.COLUMNS, "HARDWARE": True}, delta_net.WARPS,
            ),
            "backwards": (
                delta_net.backwards_kernel,
                {name: kind for name, kind in numbers.items() if name != "y"}
                | {"u": "*fp32", "grad": "*fp32", "starts": "*i32", "dk": "*fp32", "dv": "*fp32", "dbeta": "*fp32", "T": "i32"}
                | heads,
                {"COLUMNS": delta_net.BACK_COLUMNS}, delta_net.BACK_WARPS,
            ),
            "forwards": (
                delta_net.forwards_kernel, numbers | back | {"T": "i32"} | heads,
                {"COLUMNS": delta_net.BACK_COLUMNS, "HARDWARE": True}, delta_net.BACK_WARPS,
            ),
        }  # fmt: skip
        found += [
            Spec(f"delta_{name}_{K}", kernel, types, sizes | fixed, {"num_warps": warps, **PINNED})
            for name, (kernel, types, fixed, warps) in kernels.items()
        ]
    return tuple(found)


DELTA_NET = _delta_net_specs()


# ---- digest --------------------------------------------------------------------------------------

_DIGEST = {"out": "*i64", "rows": "i32", "cols": "i32", "ld": "i32", "row0": "i32", "col0": "i32"}


DIGEST = (
    Spec(
        "digest_bytes", digest.digest_kernel, {"x": "*u8", **_DIGEST}, {"HALVES": False, "SPECIAL": 0, **digest.FIXED},
        {"num_warps": 4}, ("cols", "ld"),
    ),
    Spec(
        "digest_bf16", digest.digest_kernel, {"x": "*i16", **_DIGEST}, {"HALVES": True, "SPECIAL": 1, **digest.FIXED},
        {"num_warps": 4}, ("cols", "ld"),
    ),
)  # fmt: skip


RANK_SUM = tuple(
    Spec(
        f"rank_sum{ranks}", digest.rank_sum_kernel, {"parts": "*fp32", "y": "*bf16", "M": "i32", "N": "i32"},
        {"RANKS": ranks, "SIZE": digest.SIZE}, {"num_warps": digest.WARPS, **PINNED}, ("N",),
    )
    for ranks in (2, 8)
)  # fmt: skip


DIGEST_ALL = DIGEST + RANK_SUM


# ---- elementwise ---------------------------------------------------------------------------------

ELEMENTWISE = (
    Spec(
        "silu_mul", elementwise.silu_mul_kernel, dict.fromkeys(("gate", "up", "y"), "*bf16")
        | dict.fromkeys(("M", "K", "gate_m", "up_m"), "i32"),
        {"ROWS": elementwise.ROWS, "HARDWARE": True}, {"num_warps": elementwise.WARPS, **PINNED}, ("K", "gate_m", "up_m"),
    ),
    *(
        Spec(
            f"rotary_{D}", elementwise.rotary_kernel, dict.fromkeys(("x", "y", "cos", "sin"), "*bf16")
            | {"positions": "*i64", "heads": "i32", "x_t": "i32", "x_h": "i32"},
            {"D": D, "HEADS": elementwise.SPAN // D, "HARDWARE": True}, {"num_warps": elementwise.WARPS, **PINNED},
            ("x_t", "x_h"),
        )
        for D in (64, BLOCK)
    ),
)  # fmt: skip


def _elementwise_spec(D: int, R: int, backward: bool) -> Spec:
    return Spec(
        f"rotary_pair_{D}{f'_of_{R}' * (R < D)}{'_backward' * backward}", elementwise.rotary_pair_kernel,
        dict.fromkeys(("q", "k", "cos", "sin", "q_out", "k_out"), "*bf16")
        | dict.fromkeys(("T", "q_heads", "k_heads", "q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "c_b", "c_t"), "i32"),
        {
            "D": D, "R": R, "HALF": R // 2, "REST": D - R, "HEADS": elementwise.ROTARY_SPAN // D, "BACKWARD": backward,
            "HARDWARE": True,
        },
        {"num_warps": elementwise.ROTARY_WARPS, **PINNED}, ("q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "c_b", "c_t"),
    )  # fmt: skip


ROTARY = tuple(
    _elementwise_spec(D, R, backward) for D, R in ((64, 64), (BLOCK, BLOCK), (BLOCK, 64)) for backward in (False, True)
)


ELEMENTWISE_ALL = ELEMENTWISE + ROTARY


# ---- gemm ----------------------------------------------------------------------------------------

def _gemm_spec(tile: Tile, out: str, splits: int, blocks: bool) -> Spec:
    integers = dict.fromkeys(("M", "N", "K", "sx_m", "sx_g", "sw_n", "sw_g", "programs"), "i32")
    return Spec(
        name=f"fprop_{tile.rows}x{tile.columns}_{out}" + "_blocks" * blocks + (f"_splits{splits}" if splits > 1 else ""),
        kernel=gemm.fprop_kernel,
        types={"x_MK": box(tile.rows), "w_NK": box(tile.columns), "sx": "*fp32", "sw": "*fp32", "y": f"*{out}", **integers},
        constexprs={
            "BLOCKS": blocks, "SPLITS": splits, "ROWS": tile.rows, "COLUMNS": tile.columns, "STAGES": tile.stages,
            "HEIGHT": gemm.HEIGHT,
        },
        options={"num_warps": tile.warps, "num_stages": tile.stages, **PINNED},
        aligned=("N", "K"),
    )  # fmt: skip


GEMM = tuple(
    _gemm_spec(tile, out, splits, blocks)
    for blocks in (False, True)
    for tile in (NARROW, WIDE)
    for out in ("bf16", "fp32")
    for splits in (1, 2, 4, 8)
) + tuple(_gemm_spec(tile, out, 1, blocks) for blocks in (False, True) for tile in FEW for out in ("bf16", "fp32"))


def _gemm_few_spec(tile: Tile, out: str, scale: str, blocks: bool) -> Spec:
    stages, _ = gemm.PIPELINE[tile.columns]
    integers = dict.fromkeys(("M", "N", "K", "x_m", "sw_n", "sw_g", "programs"), "i32")
    return Spec(
        name=f"decode_{gemm.ROWS}x{tile.columns}_{out}{'_blocks' * blocks}_{scale}",
        kernel=gemm.decode_kernel,
        types={"x": "*bf16", "w_NK": box(tile.columns), "sw": "*fp32", "y": f"*{out}", **integers},
        constexprs={
            "BLOCKS": blocks, "ROWS": gemm.ROWS, "COLUMNS": tile.columns, "STAGES": stages, "POW2": scale == "pow2",
            "HARDWARE": True,
        },
        options={"num_warps": tile.warps, "num_stages": stages, **COMPILER},
        aligned=("N", "K", "x_m"),
    )  # fmt: skip


GEMM_DECODE = tuple(
    _gemm_few_spec(tile, out, scale, blocks)
    for blocks in (False, True)
    for scale in ("pow2", "fp32")
    for tile in gemm.TILES[blocks]
    for out in ("bf16", "fp32")
)


GEMM_ALL = GEMM + GEMM_DECODE


#: for Blackwell, and therefore not in ``ALL``
GEMM_MX = tuple(
    Spec(
        f"mx_{out}", gemm_mx.fprop_mx_kernel,
        {"x": "*fp8e4nv", "w": "*fp8e4nv", "sx": "*u8", "sw": "*u8", "y": f"*{out}"}
        | dict.fromkeys(("M", "N", "K", "G", "x_m", "w_n"), "i32"),
        {"ROWS": gemm_mx.ROWS, "COLUMNS": gemm_mx.COLUMNS, "DEPTH": gemm_mx.DEPTH},
        {"num_warps": gemm_mx.WARPS, "num_stages": gemm_mx.STAGES, **PINNED}, ("N", "K", "x_m", "w_n"),
    )
    for out in ("bf16", "fp32")
)  # fmt: skip


# ---- gemm_backward -------------------------------------------------------------------------------

GEMM_DGRAD = (
    Spec(
        "transpose", gemm_backward.transpose_kernel,
        {"w": "*u8", "transposed": "*u8"} | dict.fromkeys(("N", "K", "w_n", "pitch"), "i32"), {},
        {"num_warps": gemm_backward.WARPS, **PINNED}, ("N", "K", "w_n", "pitch"),
    ),
)  # fmt: skip


GEMM_WGRAD = tuple(
    Spec(
        name=f"wgrad_{SIDE}x{SIDE}_{out}" + ("_add" if add else ""),
        kernel=gemm_backward.wgrad_kernel,
        types={
            "g_NM": box(SIDE), "x_KM": box(SIDE), "sg": "*fp32", "sx": "*fp32", "dw": f"*{out}",
            **dict.fromkeys(("M", "N", "K", "sg_g", "sx_g", "programs"), "i32"),
        },
        constexprs={"sg_n": 1, "sx_k": 1, "ADD": add, "SIDE": SIDE, "STAGES": STAGES, "HEIGHT": HEIGHT},
        options={"num_warps": WGRAD_WARPS, "num_stages": STAGES, **PINNED},
        aligned=("N", "K", "sg_g", "sx_g"),
    )
    for out, add in (("bf16", False), ("fp32", False), ("fp32", True))
)  # fmt: skip


GEMM_BACKWARD = GEMM_DGRAD + GEMM_WGRAD


# ---- gemm_common ---------------------------------------------------------------------------------

GEMM_COMMON = (
    Spec(
        "block_scales",
        gemm_common.block_scales_kernel,
        {"s": "*fp32", "out": "*fp32", **dict.fromkeys(("N", "G", "s_n", "s_g"), "i32")},
        {"WIDTH": gemm_common.WIDTH},
        {"num_warps": 4, **PINNED},
        ("N",),
    ),
)


# ---- gemm_grouped --------------------------------------------------------------------------------

def _gemm_grouped_spec(name: str, out: str, tokens: bool, beside: int, summed: int) -> Spec:
    sizes = ("E", "N", "K", "k", "x_r", "sx_r", "sx_g", "sw_s", "sw_n", "sw_g", "programs")
    return Spec(
        name=f"grouped_{name}_{out}",
        kernel=gemm_grouped.grouped_kernel,
        types={
            "x": "*fp8e4nv", "w_SNK": box(gemm_grouped.TILE.columns), "sx": "*fp32", "sw": "*fp32", "y": f"*{out}",
            **dict.fromkeys(("order", "tiles", "tile_first"), "*i32"), **dict.fromkeys(sizes, "i32"),
        },
        constexprs={
            "TOKENS": tokens, "BESIDE": beside, "SUMMED": summed, "ROWS": gemm_grouped.TILE.rows,
            "COLUMNS": gemm_grouped.TILE.columns,
            "STAGES": gemm_grouped.TILE.stages, "HEIGHT": gemm_grouped.HEIGHT,
        },
        options={"num_warps": gemm_grouped.TILE.warps, "num_stages": gemm_grouped.TILE.stages, **PINNED},
        aligned=("N", "K", "x_r"),
    )  # fmt: skip


GEMM_GROUPED = (
    _gemm_grouped_spec("gate_up", "bf16", True, 2, 1),
    _gemm_grouped_spec("down", "fp32", False, 1, 1),
    _gemm_grouped_spec("down_dgrad", "fp32", True, 1, 1),
    _gemm_grouped_spec("gate_up_dgrad", "fp32", False, 1, 2),
)


# ---- gemm_grouped_wgrad --------------------------------------------------------------------------

def _gemm_grouped_wgrad_specs() -> tuple[Spec, ...]:
    found = [
        Spec(
            f"grouped_wgrad_{out}", gemm_grouped.grouped_wgrad_kernel,
            {"g_NM": box(SIDE), "x_KM": box(SIDE), "sg": "*fp32", "sx": "*fp32", "dw": f"*{out}", "group_first": "*i32"}
            | dict.fromkeys(("E", "N", "K", "programs"), "i32"),
            {"SIDE": SIDE, "STAGES": STAGES, "HEIGHT": HEIGHT},
            {"num_warps": WGRAD_WARPS, "num_stages": STAGES, **PINNED}, ("N", "K"),
        )
        for out in ("bf16", "fp32")
    ]  # fmt: skip
    tables = dict.fromkeys(("order", "groups", "group_first"), "*i32")
    written = {"q": "*u8", "s": "*fp32"} | dict.fromkeys(("E", "W", "k", "x_r"), "i32")
    for scale in ("pow2", "fp32"):
        for tokens in (False, True):
            fixed = {"TOKENS": tokens, "COLUMNS": gemm_grouped.SAVED_COLUMNS, "POW2": scale == "pow2", "HARDWARE": True}
            found += [
                Spec(
                    f"group_tokens{'_weighted' * tokens}_{scale}", gemm_grouped.group_tokens_kernel,
                    {"x": "*bf16", "weights": "*fp32", **tables, **written, "pitch": "i32"}, fixed,
                    {"num_warps": 4, **COMPILER}, ("W", "x_r", "pitch"),
                ),
                Spec(
                    f"regroup{'_tokens' * tokens}_{scale}", gemm_grouped.regroup_kernel,
                    {"x": "*u8", "sx": "*fp32", **tables, **written, **dict.fromkeys(("s_r", "s_g", "pitch"), "i32")}, fixed,
                    {"num_warps": 4, **COMPILER}, ("W", "x_r", "pitch"),
                ),
            ]  # fmt: skip
    return tuple(found)


GEMM_GROUPED_WGRAD = _gemm_grouped_wgrad_specs()


# ---- head ----------------------------------------------------------------------------------------

HEAD = tuple(
    Spec(
        f"bf16_gemm_{out}", head.bf16_gemm_kernel,
        {"x": "*bf16", "w": "*bf16", "y": f"*{out}"} | dict.fromkeys(("M", "N", "K", "x_m", "w_n"), "i32"),
        {"ROWS": head.ROWS, "COLUMNS": head.COLUMNS, "STEP": head.STEP, "STAGES": head.STAGES, "HEIGHT": head.HEIGHT},
        {"num_warps": head.WARPS, "num_stages": head.STAGES, **PINNED}, ("N", "K", "x_m", "w_n"),
    )
    for out in ("bf16", "fp32")
)  # fmt: skip


LOGPROB_BACKWARD = tuple(
    Spec(
        f"log_prob_backward_{name}", head.log_prob_backward_kernel,
        {"x": f"*{name}", "labels": "*i64", **dict.fromkeys(("dy", "top", "top_log_prob", "temperature"), "*fp32"),
         "dx": f"*{name}", **dict.fromkeys(("V", "x_m", "dx_m", "t_m"), "i32")},
        {"COLUMNS": head.LOGPROB_COLUMNS, "HARDWARE": True}, {"num_warps": head.LOGPROB_WARPS, **PINNED}, ("V", "x_m", "dx_m"),
    )
    for name in ("bf16", "fp32")
)  # fmt: skip


HEAD_ALL = HEAD + LOGPROB_BACKWARD


# ---- latent attention ----------------------------------------------------------------------------

def latent_spec(name: str, size: int = 0, split: bool = False, heads: int = 16) -> Spec:
    """A forward kernel at the widths of DeepSeek-V3 and Moonlight."""
    held, walked, stages, warps = latent.TILE
    types = {"q": "*bf16", "keys": "*bf16", "out": "*fp32" if split else "*bf16", "lse": "*fp32"}
    types |= dict.fromkeys(("starts", "lengths", "table"), "*i32") | {"REQUESTS": "i32", "T": "i32", "scale": "fp32"}
    fixed = {"PER": heads, "L": 512, "R": 64, "PART": latent.PART, "ROWS": held, "KEYS": walked, "CHUNK": attention.CHUNK}
    return Spec(
        name, latent.latent_kernel, types | dict.fromkeys(("k_b", "k_t", "table_r"), "i32"),
        {**fixed, "STAGES": stages, "SIZE": size, "SPLIT": split, "HARDWARE": True},
        {"num_warps": warps, "num_stages": stages, **PINNED}, ("k_b", "k_t"),
    )  # fmt: skip


def _latent_specs() -> tuple[Spec, ...]:
    found = [latent_spec("latent_varlen"), latent_spec("latent_paged", 64), latent_spec("latent_split", 64, True)]
    types = dict.fromkeys(("q", "keys", "grad"), "*bf16") | dict.fromkeys(("level", "delta"), "*fp32")
    numbers = {"starts": "*i32", "REQUESTS": "i32", "T": "i32", "scale": "fp32", "natural": "fp32"}
    for name, kernel, (held, walked, stages, warps), sizes in (
        ("dq", latent.dq_kernel, latent.DQ, ("ROWS", "KEYS")),
        ("dkeys", latent.dkeys_kernel, latent.DKEYS, ("HELD", "ROWS")),
    ):
        fixed = {"PER": 16, "L": 512, "R": 64, "PART": latent.BACK_PART, sizes[0]: held, sizes[1]: walked, "STAGES": stages}
        options = {"num_warps": warps, "num_stages": stages, **PINNED}
        found.append(Spec(f"latent_{name}", kernel, types | {name: "*bf16"} | numbers, {**fixed, "HARDWARE": True}, options))
    types = dict.fromkeys(("grad", "out"), "*bf16") | dict.fromkeys(("lse", "delta", "level"), "*fp32") | {"T": "i32"}
    fixed = {"KH": 1, "PER": 16, "D": 512, "SUMMED": attention_backward.SUMMED, "HARDWARE": True}
    options = {"num_warps": attention_backward.WARPS, **PINNED}
    found.append(Spec("latent_row_sums", attention_backward.row_sums_kernel, types, fixed, options))
    rows, columns, inner = latent.PRODUCT
    for N, K in ((512, 128), (128, 512)):
        fixed = {"H": 16, "N": N, "K": K, "ROWS": rows, "COLUMNS": columns, "INNER": inner, "STAGES": latent.PRODUCT_STAGES}
        strides = dict.fromkeys(("x_t", "x_h", "w_h", "w_n", "w_k"), "i32")
        options = {"num_warps": latent.PRODUCT_WARPS, "num_stages": latent.PRODUCT_STAGES, **PINNED}
        types = {"x": "*bf16", "w": "*bf16", "y": "*bf16", "T": "i32"} | strides
        fixed |= {"HARDWARE": True}
        found.append(Spec(f"latent_product_{N}", latent.product_kernel, types, fixed, options, ("x_t", "x_h", "w_h")))
    return tuple(found)


LATENT = _latent_specs()


# ---- mixture -------------------------------------------------------------------------------------

_PLANNED = ("order", "place", "offsets", "tiles", "tile_first", "groups", "group_first")


PLAN = (
    Spec(
        "expert_counts", mixture.count_kernel, {"ids": "*i64", "counts": "*i32", "P": "i32"}, {"STEP": mixture.STEP},
        {"num_warps": mixture.WARPS, **PINNED},
    ),
    Spec(
        "expert_plan", mixture.plan_kernel,
        {"ids": "*i64", "counts": "*i32", **dict.fromkeys(_PLANNED, "*i32"), "P": "i32", "E": "i32"},
        {"ROWS": mixture.ROWS, "STEP": mixture.STEP, "EXPERTS": 128}, {"num_warps": mixture.WARPS, **PINNED},
    ),
)  # fmt: skip


COMBINE = (
    *(
        Spec(
            f"combine_{out}{'_weighted' * weighted}{'_part' * part}", mixture.combine_kernel,
            {"out": "*fp32", "weights": "*fp32", "ids": "*i64", "place": "*i32", "y": f"*{out}"}
            | dict.fromkeys(("E", "k", "H"), "i32"),
            {"COLUMNS": mixture.COLUMNS, "CHOSEN": 8, "WEIGHTED": weighted, "PART": part},
            {"num_warps": mixture.COMBINE_WARPS, **PINNED}, ("H",),
        )
        for out, weighted, part in (
            ("bf16", True, False), ("fp32", True, False), ("bf16", True, True), ("fp32", True, True), ("bf16", False, False),
            ("fp32", False, False),
        )
    ),
    Spec(
        "pair_backward", mixture.pair_backward_kernel,
        {"u": "*fp32", "a": "*bf16", "qh": "*u8", "sh": "*fp32", "weights": "*fp32", "order": "*i32", "offsets": "*i32",
         "dab": "*bf16", "dweights": "*fp32"} | dict.fromkeys(("P", "E", "I", "sh_m", "sh_g"), "i32"),
        {"ROWS": mixture.COMBINE_ROWS, "HARDWARE": True}, {"num_warps": mixture.COMBINE_WARPS, **PINNED}, ("I",),
    ),
)  # fmt: skip


MIXTURE = PLAN + COMBINE


# ---- norm ----------------------------------------------------------------------------------------

NORM = tuple(
    Spec(
        f"rms_norm{covering * 128}{'_one_plus' * one_plus}", norm.rms_norm_kernel,
        {"x": "*bf16", "w": "*bf16", "y": "*bf16", "rstd": "*fp32", "K": "i32", "x_m": "i32"},
        {"EPS": 1e-6, "GROUPS": covering, "ONE_PLUS": one_plus, "HARDWARE": True},
        {"num_warps": norm.warps_for(covering), **PINNED}, ("K", "x_m"),
    )
    for covering, one_plus in ((1, False), (8, False), (32, False), (64, False), (128, False), (16, True))
)  # fmt: skip


NORM_ROWS = tuple(
    Spec(
        f"norm_rows{covering * 128}{'_added' * add}{'_kept' * keep}_{scale}", norm.norm_rows_kernel,
        dict.fromkeys(("x", "residual", "w"), "*bf16") | {"q": "*u8", "s": "*fp32", "total": "*bf16", "y": "*bf16"}
        | {"rstd": "*fp32"} | dict.fromkeys(("K", "x_m", "r_m", "s_m", "s_g"), "i32"),
        {"EPS": 1e-6, "GROUPS": covering, "ADD": add, "KEEP": keep, "POW2": scale == "pow2", "HARDWARE": True},
        {"num_warps": norm.warps_for(covering), **COMPILER}, ("K", "x_m", "r_m"),
    )
    for scale in ("pow2", "fp32")
    for add, keep in ((False, False), (True, False), (False, True))
    for covering in (8, 32, 64, 128)
)  # fmt: skip


def _norm_spec(width: int, add: bool) -> Spec:
    shape = norm.shape_for(width)
    return Spec(
        f"rms_norm_backward{width}{'_added' * add}", norm.rms_norm_backward_kernel,
        dict.fromkeys(("x", "w", "dy", "other", "dx"), "*bf16") | dict.fromkeys(("rstd", "dw"), "*fp32")
        | dict.fromkeys(("M", "K", "x_m", "dy_m", "other_m", "programs"), "i32"),
        {"ROWS": shape.rows, "WIDTH": shape.width, "WEIGHT": True, "ADD": add, "HARDWARE": True},
        {"num_warps": shape.warps, **PINNED}, ("K", "x_m", "dy_m", "other_m"),
    )  # fmt: skip


NORM_BACKWARD = tuple(_norm_spec(width, add) for add in (False, True) for width in (128, 1024, 2048, 4096, 8192, 16384))


NORM_ALL = NORM + NORM_ROWS + NORM_BACKWARD


# ---- quantize ------------------------------------------------------------------------------------

_QUANTIZE_X = {"x": "*bf16", "q": "*u8", "s": "*fp32"}


_QUANTIZE_T = {"qt": "*u8", "st": "*fp32"}


_QUANTIZE_SIZES = {"M": "i32", "K": "i32", "x_m": "i32"}


_QUANTIZE_STRIDES = {"s_m": "i32", "s_g": "i32"}


def _quantize_specs() -> tuple[Spec, ...]:
    found = []
    for scale in ("pow2", "fp32"):
        fixed = {"POW2": scale == "pow2", "HARDWARE": True}
        for rows, warps in ((quantize.ROWS, 4), (quantize.FEW_ROWS, 1)):
            found.append(
                Spec(
                    f"quantize_rows{rows}_{scale}", quantize.rows_kernel, _QUANTIZE_X | _QUANTIZE_SIZES | _QUANTIZE_STRIDES,
                    {"ROWS": rows, **fixed},
                    {"num_warps": warps, **COMPILER}, ("K", "x_m", "s_m"),
                )
            )  # fmt: skip
        found.append(
            Spec(
                f"quantize_transposed_{scale}", quantize.tokens_kernel, _QUANTIZE_X | _QUANTIZE_SIZES | {"pitch": "i32"},
                {"COLUMNS": quantize.COLUMNS, **fixed}, {"num_warps": 4, **COMPILER}, ("K", "x_m", "pitch"),
            )
        )  # fmt: skip
        found.append(
            Spec(
                f"quantize_both_{scale}", quantize.both_kernel,
                _QUANTIZE_X | _QUANTIZE_T | _QUANTIZE_SIZES | _QUANTIZE_STRIDES | {"pitch": "i32"}, fixed,
                {"num_warps": quantize.BOTH_WARPS, **COMPILER}, ("K", "x_m", "pitch"),
            )
        )  # fmt: skip
        for dtype, transposed in (("bf16", False), ("bf16", True), ("fp32", False), ("fp32", True)):
            found.append(
                Spec(
                    f"quantize_weight_{dtype}{'_transposed' * transposed}_{scale}", quantize.weight_kernel,
                    {"w": f"*{dtype}", "q": "*u8", "s": "*fp32", "qt": "*u8"}
                    | dict.fromkeys(("N", "K", "w_n", "pitch"), "i32"),
                    {"TRANSPOSED": transposed, **fixed}, {"num_warps": quantize.WEIGHT_WARPS[transposed], **COMPILER},
                    ("N", "K", "w_n", "pitch"),
                )
            )  # fmt: skip
    return tuple(found)


QUANTIZE = _quantize_specs()


REQUANTIZE = tuple(
    Spec(
        f"requantize_tokens_{scale}", quantize.requantize_kernel,
        {"q": "*u8", "s": "*fp32", "qt": "*u8", "st": "*fp32"} | dict.fromkeys(("M", "K", "q_m", "s_m", "s_g", "pitch"), "i32"),
        {"COLUMNS": quantize.COLUMNS, "POW2": scale == "pow2", "HARDWARE": True}, {"num_warps": 4, **COMPILER},
        ("K", "q_m", "pitch"),
    )
    for scale in ("pow2", "fp32")
)  # fmt: skip


QUANTIZE_ALL = QUANTIZE + REQUANTIZE


# ---- route ---------------------------------------------------------------------------------------

def _route_spec(name: str, dtype: str, sigmoid: bool, groups: int) -> Spec:
    return Spec(
        f"route_{name}_{dtype}", mixture.route_kernel,
        {"logits": f"*{dtype}", "bias": "*fp32", "weights": "*fp32", "ids": "*i64", "scale": "fp32"}
        | dict.fromkeys(("E", "k", "x_t", "size", "kept"), "i32"),
        {"RENORMALIZE": True, "SIGMOID": sigmoid, "GROUPS": groups, "WIDTH": 128, "HARDWARE": True},
        {"num_warps": mixture.ROUTE_WARPS, **PINNED}, ("E", "x_t"),
    )  # fmt: skip


ROUTE = (
    *(_route_spec("softmax", dtype, False, 1) for dtype in ("bf16", "fp32")),
    *(_route_spec(f"sigmoid_groups{groups}", "fp32", True, groups) for groups in (1, 8)),
)


# ---- silu ----------------------------------------------------------------------------------------

def _silu_specs() -> tuple[Spec, ...]:
    found = []
    inputs = {"gate": "*bf16", "up": "*bf16", "q": "*u8", "s": "*fp32"}
    sizes = dict.fromkeys(("M", "K", "gate_m", "up_m", "s_m", "s_g"), "i32")
    aligned = ("K", "gate_m", "up_m")
    for scale in ("pow2", "fp32"):
        fixed = {"POW2": scale == "pow2", "HARDWARE": True}
        for rows, warps in (silu.TILE, silu.TILE_OF_FEW):
            for keep in (False, True):
                found.append(
                    Spec(
                        f"silu_mul_rows{rows}{'_kept' * keep}_{scale}", silu.silu_mul_rows_kernel,
                        inputs | {"y": "*bf16"} | sizes, {"ROWS": rows, "KEEP": keep, **fixed},
                        {"num_warps": warps, **COMPILER}, aligned,
                    )
                )  # fmt: skip
    return tuple(found)


SILU = _silu_specs()


_SILU_TENSORS = dict.fromkeys(("gate", "up", "dy", "dgate", "dup"), "*bf16")


_SILU_BYTES, _SILU_SCALES = dict.fromkeys(("qg", "qgt", "qu", "qut"), "*u8"), dict.fromkeys(("sg", "sgt", "su", "sut"), "*fp32")


_SILU_SIZES = dict.fromkeys(("M", "K", "gate_m", "up_m", "dy_m"), "i32")


_SILU_ALIGNED = ("K", "gate_m", "up_m", "dy_m")


SILU_BACKWARD = (
    Spec(
        "silu_mul_backward", silu.silu_mul_backward_kernel, _SILU_TENSORS | _SILU_SIZES,
        {"ROWS": silu.BACKWARD_ROWS, "HARDWARE": True},
        {"num_warps": silu.WARPS, **PINNED}, _SILU_ALIGNED,
    ),
    *(
        Spec(
            f"silu_mul_backward_both_{scale}", silu.silu_mul_backward_both_kernel,
            _SILU_TENSORS | _SILU_BYTES | _SILU_SCALES | _SILU_SIZES | dict.fromkeys(("s_m", "s_g", "pitch"), "i32"),
            {"POW2": scale == "pow2", "HARDWARE": True}, {"num_warps": quantize.BOTH_WARPS, **COMPILER},
            (*_SILU_ALIGNED, "pitch"),
        )
        for scale in ("pow2", "fp32")
    ),
)  # fmt: skip


SILU_ALL = SILU + SILU_BACKWARD


#: every kernel of ``jetrl_patch.kernels`` for Hopper
ALL = (
    *ATTENTION_ALL,
    *CHUNKS,
    *ATTENTION_BACKWARD,
    *DELTA_NET,
    *DIGEST_ALL,
    *ELEMENTWISE_ALL,
    *GEMM_ALL,
    *GEMM_BACKWARD,
    *GEMM_COMMON,
    *GEMM_GROUPED,
    *GEMM_GROUPED_WGRAD,
    *HEAD_ALL,
    *LATENT,
    *MIXTURE,
    *NORM_ALL,
    *QUANTIZE_ALL,
    *ROUTE,
    *SILU_ALL,
)


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
