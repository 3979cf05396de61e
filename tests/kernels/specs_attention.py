"""Representative arguments of the kernels that walk over a sequence: attention, latent attention, delta nets."""

from __future__ import annotations

from jetrl_patch.kernels import (
    attention,
    attention_backward,
    delta_net,
    elementwise,
    kv_cache,
    latent,
)

from .aot import Spec, compiled, pinned, typed

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
