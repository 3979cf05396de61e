"""The exact ops' kernels, compiled for Hopper."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

pytest.importorskip("triton")

from jetrl_patch.errors import ConfigError
from jetrl_patch.kernels import attention, attention_backward, digest, elementwise, head, norm
from jetrl_patch.kernels.common import COMPILER

from . import specs_attention, specs_rows
from .aot import Spec, compile_one, inner_loop, loops
from .specs import specs

SPECS = [
    *specs_attention.ATTENTION_ALL, *specs_attention.CHUNKS, *specs_attention.ATTENTION_BACKWARD, *specs_attention.DELTA_NET,
    *specs_rows.ELEMENTWISE_ALL, *specs_rows.HEAD_ALL, *specs_attention.LATENT, *specs_rows.NORM, *specs_rows.NORM_BACKWARD,
    *specs_rows.RANK_SUM, *specs_rows.SILU_BACKWARD,
]  # fmt: skip
#: maximum registers per thread, so that the stated number of programs fits on an SM; nothing else may spill
REGISTERS = {
    **dict.fromkeys(("attention_paged_64", "attention_split_64", "attention_varlen_64", "attention_fp8_64"), 192),  # 2
    **dict.fromkeys(
        ("attention_paged_128", "attention_split_128", "attention_varlen_128", "attention_fp8_128"), 255
    ),  # 1, of 256 threads
    **dict.fromkeys((f"attention_{kind}_256" for kind in ("paged", "split", "varlen", "fp8", "dq", "dkdv")), 255),  # 1
    **dict.fromkeys((spec.name for spec in specs_attention.KV_CACHE), 32),
    **dict.fromkeys((spec.name for spec in specs_attention.CHUNKS), 56),  # 9
    **dict.fromkeys(("attention_row_sums_64", "attention_row_sums_128"), 64),  # 8
    "attention_row_sums_256": 72,  # 7
    **dict.fromkeys(("attention_dq_64", "attention_dkdv_64"), 168),  # 3
    "attention_dq_128": 224,  # 1, of 256 threads
    "attention_dkdv_128": 255,  # 1, of 256 threads
    **dict.fromkeys(("bf16_gemm_bf16", "bf16_gemm_fp32"), 128),  # 2, of 256 threads
    "silu_mul": 96,
    "merge": 96,
    **dict.fromkeys(("rank_sum2", "rank_sum8"), 64),
    **dict.fromkeys(("rotary_64", "rotary_128"), 32),
    **dict.fromkeys((s.name for s in (*specs_rows.ROTARY, *specs_rows.LOGPROB_BACKWARD)), 40),  # 12, of 128 threads
    **dict.fromkeys((f"latent_{kind}" for kind in ("varlen", "paged", "split", "dq", "dkeys")), 255),  # 1, of 256 threads
    **dict.fromkeys(("latent_product_512", "latent_product_128"), 128),  # 4
    "latent_row_sums": 128,  # 4
    "rms_norm2048_one_plus": 64,
    "delta_conv": 168,  # 3, of 128 threads
    **dict.fromkeys(("delta_inputs_128", "delta_inputs_40"), 40),
    "delta_rule_128": 192,  # 10, of 32 threads
    "delta_rule_40": 128,
    **{f"delta_{name}_{width}": 255 for name in ("backwards", "forwards") for width in (128, 40)},  # 2, of 128 threads
    **{f"rms_norm{width}": 64 for width in (128, 1024, 4096, 8192, 16384)},
    **dict.fromkeys((spec.name for spec in specs_rows.NORM_BACKWARD), 64),  # 32 warps
    "silu_mul_backward": 64,
    **dict.fromkeys(("silu_mul_backward_both_pow2", "silu_mul_backward_both_fp32"), 128),  # 1, of 512 threads
}
#: bytes of spilled registers per thread
SPILLS = {
    "silu_mul_backward_both_fp32": 48,
    # the sums of the chunks before, touched once in a chunk of 1,024 keys
    **dict.fromkeys(("attention_paged_128", "attention_split_128", "attention_varlen_128"), 64),
    "attention_fp8_128": 128,
    # of the same kind
    **dict.fromkeys((f"attention_{kind}_256" for kind in ("paged", "split", "varlen")), 168),
    "attention_fp8_256": 256,
    "attention_dkdv_256": 144,
    **dict.fromkeys((f"latent_{kind}" for kind in ("varlen", "paged", "split")), 400),
    "latent_dq": 512,  # in the loop too
}
if "sched4reg" not in COMPILER:  # an older triton, seen with 3.6.0: one program of this width on an SM instead of two
    REGISTERS |= {"rms_norm16384": 72, "attention_combine_512": 64}
    SPILLS |= {"silu_mul_backward_both_fp32": 104, **dict.fromkeys(("attention_paged_128", "attention_varlen_128"), 80)}
#: maximum instructions that a warp runs per block of keys that every row sees (of rows: dkdv; of the contraction: bf16_gemm; per
#: chunk: combine), and asynchronous copies among them
LOOPS = {
    "attention_varlen_64": (365, 8),
    **dict.fromkeys(("attention_paged_64", "attention_split_64"), (410, 8)),
    "attention_varlen_128": (440, 8),
    **dict.fromkeys(("attention_paged_128", "attention_split_128"), (480, 8)),
    "attention_fp8_64": (565, 8),  # copies half the bytes, and converts them
    "attention_fp8_128": (640, 8),
    **dict.fromkeys((f"attention_{kind}_256" for kind in ("paged", "split", "varlen")), (500, 8)),
    "attention_fp8_256": (690, 8),
    **dict.fromkeys((spec.name for spec in specs_attention.CHUNKS), (120, 5)),
    "attention_dq_64": (335, 8),
    "attention_dq_128": (400, 8),
    "attention_dkdv_64": (265, 6),
    "attention_dkdv_128": (330, 6),
    "attention_dq_256": (680, 8),
    "attention_dkdv_256": (650, 6),
    **dict.fromkeys(("bf16_gemm_bf16", "bf16_gemm_fp32"), (95, 8)),
}
if "sched4reg" not in COMPILER:  # log-sum-exps and deltas of rows are copied one by one
    LOOPS |= {"attention_dkdv_64": (300, 20), "attention_dkdv_128": (350, 20), "attention_dkdv_256": (430, 12)}
#: maximum bytes of shared memory, for the same number of programs
SHARED = {
    **dict.fromkeys(("bf16_gemm_bf16", "bf16_gemm_fp32", "attention_dkdv_128"), 113 << 10),
    **dict.fromkeys(("attention_paged_128", "attention_split_128", "attention_varlen_128", "attention_fp8_128"), 113 << 10),
    **dict.fromkeys(("attention_dq_128", "attention_dq_256"), 128 << 10),
    **dict.fromkeys((f"latent_{kind}" for kind in ("varlen", "paged", "split", "dq", "dkeys")), 184 << 10),
    **dict.fromkeys((f"attention_{kind}_256" for kind in ("paged", "split", "varlen", "fp8", "dkdv")), 97 << 10),
}


def products(ptx: str) -> Counter[str]:
    return Counter(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S+", ptx))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_compiles_within_an_sm(spec: Spec):
    assert specs()[spec.name] is spec
    made = compile_one(spec)
    assert made.spills <= SPILLS.get(spec.name, 0) and made.registers <= REGISTERS[spec.name], made[:3]
    assert made.shared <= SHARED.get(spec.name, 75 << 10), made[:3]
    assert "mad.f32" not in made.ptx  # nothing fused but what is written as fma
    if spec.kernel is attention_backward.row_sums_kernel:
        assert not products(made.ptx) and "ld.global.v4.b32" in made.ptx
    elif spec in specs_attention.CHUNKS:
        assert not products(made.ptx) and made.ptx.count("fma.rn.f32") and "ex2.approx" in made.ptx
    elif "attention" in spec.name or "gemm" in spec.name or spec in specs_attention.LATENT:
        assert products(made.ptx) and all(
            ".m64n" in found and found.endswith("k16.f32.bf16.bf16") for found in products(made.ptx)
        )


@pytest.mark.parametrize("width", attention.TILES)
def test_the_programs_that_share_contexts_are_those_that_fit(width: int):
    made = [(compile_one(spec), spec.options["num_warps"]) for spec in specs_attention.ATTENTION if spec.constexprs["D"] == width]
    fit = min(65536 // (kernel.registers * 32 * warps) for kernel, warps in made)
    assert len(made) >= 3 and attention.splits(1, 1, 1, width, 1 << 22) == min(attention.PROGRAMS * fit, 4096)


def test_every_kernel_with_a_long_loop_has_a_budget():
    long = {spec.name for spec in SPECS if "attention" in spec.name or "gemm" in spec.name}
    assert set(LOOPS) == {name for name in long if "row_sums" not in name}


@pytest.mark.parametrize("name", LOOPS)
def test_a_block_costs_few_instructions(name: str):
    most, copies = LOOPS[name]
    loop = inner_loop(compile_one(specs()[name]), "MUFU.EX2" if "combine" in name else "GMMA")
    assert len(loop) <= most and sum(opcode.startswith("LDGSTS") for opcode in loop) <= copies, len(loop)
    converts = ("LDL", "STL") if "fp8" in name else ("STS", "LDL", "STL")  # converted keys and values pass through shared memory
    assert not any(opcode.startswith(converts) for opcode in loop)  # weights stay in registers


@pytest.mark.parametrize("name", [name for name in LOOPS if "attention" in name and "combine" not in name])
def test_a_block_that_every_row_sees_is_computed_like_a_masked_one(name: str):
    """One context gives a row its mask in another block: the block's arithmetic must be the same with and without."""
    plain, masked = (Counter(loop) for loop in loops(compile_one(specs()[name]))[:2])
    ops = {op for op in plain | masked if op.startswith(("FADD", "FMUL", "FFMA", "FMNMX", "MUFU", "HGMMA", "F2F"))}
    assert {op: plain[op] for op in ops} == {op: masked[op] for op in ops} and plain["MUFU.EX2"] >= 8
    assert sum(masked.values()) > sum(plain.values())


@pytest.mark.parametrize("spec", specs_rows.RANK_SUM, ids=lambda spec: spec.name)
def test_ranks_are_read_16_bytes_at_a_time(spec: Spec):
    made = compile_one(spec).ptx
    ranks = spec.constexprs["RANKS"]
    assert len(re.findall(r"ld\.global\.v4", made)) == 2 * ranks  # 8 elements a thread
    assert made.count("add.f32") + made.count("add.rn.f32") == 8 * (ranks - 1)


@pytest.mark.parametrize("spec", [*specs_rows.ROTARY, *specs_rows.LOGPROB_BACKWARD], ids=lambda spec: spec.name)
def test_rows_are_read_and_written_16_bytes_at_a_time(spec: Spec):
    ptx = compile_one(spec).ptx
    least = "v4" if spec.constexprs.get("R", 0) == spec.constexprs.get("D", 0) else r"v[24]"  # 8 bytes, of parts of heads
    assert re.search(rf"st\.global\.{least}", ptx) and not re.search(r"st\.global\.b(?:16|32)\b", ptx)
    assert re.search(rf"ld\.global\.{least}", ptx) and not re.search(r"ld\.global\.b16\b", ptx)


def arithmetic(spec: Spec) -> Counter[str]:
    ptx = compile_one(spec).ptx
    return products(ptx) + Counter(re.findall(r"\b(?:add|sub|mul|fma|max|ex2|lg2|div|rcp|cvt)\.\S*(?:f32|bf16x2)\S*", ptx))


@pytest.mark.parametrize("width", attention.HEAD_DIMS)
def test_the_paged_and_the_packed_kernel_compute_alike(width: int):
    paged, packed = (arithmetic(specs()[f"attention_{kind}_{width}"]) for kind in ("paged", "varlen"))
    assert paged == packed and paged["ex2.approx.ftz.f32"] >= 18


def test_latent_attention_computes_alike_for_any_cache_and_number_of_heads():
    two_heads = specs_attention.latent_spec("latent_rank", heads=2)
    packed, *others = (arithmetic(spec) for spec in (*specs_attention.LATENT[:2], two_heads))
    assert all(other == packed for other in others) and packed["ex2.approx.ftz.f32"] >= 18


def test_attention_sums_values_from_a_fresh_zero():
    # In a block that it may not see, a row gets fma(x, 1, 0): the product must not add to the sum by itself.
    for name in (spec.name for spec in specs_attention.ATTENTION):
        ptx = compile_one(specs()[name]).ptx
        # "scale-d", after the last operand: 0 overwrites, a predicate adds
        starts = [found == "0" for found in re.findall(r"wgmma\.mma_async.*%rd\d+, (0|%p\d+), 1, 1, ", ptx)]
        width = int(name.rsplit("_", 1)[1])
        tile = attention.TILES[width]
        scores, values = width // 16, tile.keys // 16
        alone = tile.rows == 16 * tile.warps  # a warpgroup has 64 rows to itself, so there is one product a step
        assert alone or "m64n16k16" in ptx  # else it computes the scores of 16 keys at a time
        block = [True, *[False] * (scores - 1)] * (1 if alone else tile.keys // 16) + [True, *[False] * (values - 1)]
        assert starts == block * 2, starts  # blocks that every row sees, and those with a mask


def test_a_tile_is_high_enough_for_wgmma_and_one_for_all():
    assert all(tile.rows >= 64 for tile in attention.TILES.values()) and head.ROWS >= 64
    for tiles in (attention_backward.DQ, attention_backward.DKDV):
        assert all(tile.held >= 64 for tile in tiles.values())


@pytest.mark.parametrize("per", [1, 6, 7, 64])
@pytest.mark.parametrize("lengths", [[1], [0, 5, 0], [64, 1, 63, 129, 0, 7], [1] * 40])
@pytest.mark.parametrize("rows", [64, 128])
def test_every_row_of_every_sequence_has_a_block(per: int, lengths: list[int], rows: int):
    starts = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
    blocks = attention.row_blocks(starts[-1], per, len(lengths), rows)
    for r, n in enumerate(lengths):
        first = starts[r] * per // rows + r
        after = starts[r + 1] * per // rows + r + 1 if r + 1 < len(lengths) else blocks
        assert after - first >= -(-n * per // rows)


def test_a_cpu_without_the_interpreter_is_told():
    q, cu = torch.zeros(3, 1, 64, dtype=torch.bfloat16), torch.tensor([0, 3], dtype=torch.int32)
    rows = q.flatten(1)
    for call in (
        lambda: attention.attention_varlen(q, q, q, cu, 1.0),
        lambda: norm.rms_norm(rows, rows[0], 1e-6),
        lambda: elementwise.silu_mul(rows, rows),
        lambda: head.bf16_gemm(rows, rows, torch.bfloat16),
        lambda: digest.rank_sum(torch.zeros(2, 3, 4)),
    ):
        with pytest.raises(ConfigError, match="required a CUDA device, found cpu"):
            call()
