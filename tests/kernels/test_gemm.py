"""The Triton GEMMs, compiled for Hopper."""

from __future__ import annotations

import re
import types

import pytest
import torch

pytest.importorskip("triton")

from jetrl_patch.errors import ConfigError
from jetrl_patch.kernels import common, gemm, gemm_backward, gemm_common, gemm_grouped
from jetrl_patch.kernels.gemm_common import NARROW, WIDE

from . import specs_gemm
from .aot import Spec, compile_one, inner_loop
from .specs import specs

FP8 = torch.float8_e4m3fn
#: registers of an SM, and maximum shared memory per block, on compute capability 9.0
REGISTERS, SHARED = 65536, 227 * 1024
#: maximum bytes of spilled registers per thread, 0 by default. A wide tile's sum, its block's product and the BF16 rows to
#: quantize fill a thread's 255 registers
SPILLS = {"decode_64x128_fp32_blocks_pow2": 8, "decode_64x128_fp32_blocks_fp32": 48}
if "sched4reg" not in common.COMPILER:  # an older triton, seen with 3.6.0: two sums, and scales per row
    SPILLS |= {f"fprop_128x128_{out}_splits{splits}": 200 for out in ("bf16", "fp32") for splits in (2, 4, 8)}
SPECS = [*specs_gemm.GEMM_ALL, *specs_gemm.GEMM_WGRAD, *specs_gemm.GEMM_GROUPED]
SPECS += [spec for spec in specs_gemm.GEMM_GROUPED_WGRAD if "wgrad" in spec.name]
#: maximum instructions that a warp runs per block of 128, and asynchronous copies of scales and rows among them (weights and
#: quantized rows come by TMA). A training step's products are bound by them; two thirds of decoding's quantize the rows
LOOPS = {
    **{f"fprop_128x{name}_blocks": (210, 4) for name in ("128_bf16", "128_fp32", "64_bf16")},
    **{f"fprop_64x{columns}_bf16_blocks": (most, 3) for columns, most in ((32, 150), (64, 160), (128, 205))},
    **{f"decode_64x{columns}_{out}_pow2": (690, 9) for columns in (32, 64) for out in ("bf16", "fp32")},
    **{f"decode_64x{columns}_{out}_fp32": (1620, 9) for columns in (32, 64) for out in ("bf16", "fp32")},  # most of them divide
    **{f"decode_64x{columns}_{out}_blocks_pow2": (690, 9) for columns in (32, 64, 128) for out in ("bf16", "fp32")},
    **{f"decode_64x{columns}_{out}_blocks_fp32": (1670, 9) for columns in (32, 64, 128) for out in ("bf16", "fp32")},
    **{f"wgrad_128x128_{kind}": (270, 2) for kind in ("bf16", "fp32", "fp32_add")},
    **{f"grouped_wgrad_{out}": (275, 2) for out in ("bf16", "fp32")},
    **{f"grouped_{name}": (226, 7) for name in ("gate_up_bf16", "down_fp32", "down_dgrad_fp32")},
    "grouped_gate_up_dgrad_fp32": (252, 7),
}
if "sched4reg" not in common.COMPILER:  # scales per row are copied one by one
    LOOPS |= {f"decode_64x64_{out}_pow2": (780, 24) for out in ("bf16", "fp32")}
    LOOPS |= {f"decode_64x64_{out}_fp32": (1740, 24) for out in ("bf16", "fp32")}
    LOOPS |= {f"decode_64x32_{out}_pow2": (690, 16) for out in ("bf16", "fp32")}
    LOOPS |= {f"decode_64x32_{out}_fp32": (1620, 16) for out in ("bf16", "fp32")}
    LOOPS |= {name: (320, 18) for name in LOOPS if "wgrad" in name}


def programs_per_sm(spec: Spec) -> int:
    if spec in specs_gemm.GEMM_DECODE:
        return gemm.PIPELINE[spec.constexprs["COLUMNS"]][1]
    if spec in specs_gemm.GEMM_GROUPED:
        return gemm_grouped.TILE.per_sm
    size = spec.constexprs.get("ROWS", 128), spec.constexprs.get("COLUMNS", 128)
    return next(tile.per_sm for tile in (NARROW, WIDE, *gemm_common.FEW) if (tile.rows, tile.columns) == size)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_compiles_to_fp8_wgmma_and_nothing_else(spec: Spec):
    made = compile_one(spec)
    found = set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S+", made.ptx))
    columns = spec.constexprs.get("COLUMNS", 128)
    assert found == {f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3"}
    assert made.spills <= SPILLS.get(spec.name, 0), made[:3]
    per_sm = programs_per_sm(spec)
    assert made.registers * spec.options["num_warps"] * 32 * per_sm <= REGISTERS, made[:3]
    assert made.shared * per_sm <= SHARED, made[:3]


def elements(spec: Spec) -> int:
    """Elements of a tile in a thread."""
    return spec.constexprs.get("ROWS", 128) * spec.constexprs.get("COLUMNS", 128) // (32 * spec.options["num_warps"])


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_block_starts_from_zero_and_is_promoted_by_one_fma(spec: Spec):
    ptx = compile_one(spec).ptx
    # four wgmma of k = 32 per block: "scale-d" is 0 for the first, which overwrites, and a predicate for those that add
    starts = [line.rsplit(", ", 3)[1] == "0" for line in ptx.splitlines() if "wgmma.mma_async" in line]
    assert starts and starts == [True, False, False, False] * (len(starts) // 4)
    assert ptx.count("fma.rn.f32") == elements(spec)  # one loop, also over the ranges of a split K
    assert "mad.f32" not in ptx and ".ftz" not in ptx and ".approx" not in ptx
    if spec in specs_gemm.GEMM_DECODE:
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and ("div.rn.f32" in ptx) == spec.name.endswith("_fp32")


@pytest.mark.parametrize("name", LOOPS)
def test_a_block_costs_few_instructions(name: str):
    spec, (most, copies) = specs()[name], LOOPS[name]
    made = compile_one(spec)
    loop = inner_loop(made)
    assert len(loop) <= most
    assert sum(opcode.startswith("LDGSTS") for opcode in loop) <= copies
    assert not any(opcode.startswith("STS.U8") for opcode in loop)
    assert sum(opcode.startswith("QGMMA") for opcode in loop) >= 4
    assert loop.count("FFMA") == elements(spec) or "div.rn.f32" in made.ptx


def test_scales_per_row_cost_more():
    rows, blocks = (inner_loop(compile_one(specs()[f"fprop_128x128_bf16{kind}"])) for kind in ("", "_blocks"))
    assert rows.count("FMUL") - blocks.count("FMUL") >= 60 and len(rows) - len(blocks) >= 60


def test_the_weight_is_transposed_16_bytes_at_a_time():
    made = compile_one(specs_gemm.GEMM_DGRAD[0])
    assert made.spills == 0 and "ld.global.v4.b32" in made.ptx and "st.global.v4.b32" in made.ptx
    with pytest.raises(ValueError, match="no loop with GMMA"):
        inner_loop(made)


@pytest.mark.parametrize("columns", [tile.columns for tile in gemm_common.FEW])
def test_rows_meet_one_instruction_whoever_quantized_them(columns):
    """Of many rows' it differs at most in its columns; the trial on the machine judges that."""
    names = f"fprop_64x{columns}_bf16_blocks", f"decode_64x{columns}_bf16_blocks_pow2", "fprop_128x128_bf16_blocks"
    found = [set(re.findall(r"wgmma\.mma_async\S+", compile_one(specs()[name]).ptx)) for name in names]
    assert found[0] == found[1] == {kind.replace("n128", f"n{columns}") for kind in found[2]} and len(found[2]) == 1


def test_the_tile_of_few_rows_fills_the_machine():
    """o and down of Qwen2.5-7B, qkv of Llama-3.1-8B, lm_head-like widths: by N alone, and never narrower than needed."""
    chosen = {N: gemm_common.few_tile_for(N).columns for N in (1, 3584, 4096, 6144, 8192, 15360, 28672)}
    assert chosen == {1: 32, 3584: 32, 4096: 32, 6144: 32, 8192: 64, 15360: 128, 28672: 128}
    assert gemm_common.few_tile_for(28672, gemm.TILES[False]).columns == 64


def test_block_scales_compile():
    made = compile_one(specs_gemm.GEMM_COMMON[0])
    assert made.spills == 0 and "mma" not in made.ptx


def test_tiles_are_high_enough_for_fp8():
    assert min(NARROW.rows, WIDE.rows, gemm_backward.SIDE) >= 64


def test_a_cpu_without_the_interpreter_is_told():
    q, s = torch.zeros(3, 128, dtype=FP8), torch.ones(3, 1)
    for call in (
        lambda: gemm.fprop(q, s, q, s),
        lambda: gemm.fprop_few(q.to(torch.bfloat16), q, s, "pow2"),
        lambda: gemm_backward.dgrad(q, s, q.new_zeros(128, 64), torch.ones(1, 1)),
        lambda: gemm_backward.wgrad(q, s.t(), q, s.t()),
    ):
        with pytest.raises(ConfigError, match=r'required a CUDA device, found cpu\. Use backend="native"'):
            call()


@pytest.mark.parametrize("check", [gemm_common.check_device, lambda x: common.check_input("x", x)])
def test_a_device_that_is_not_the_current_one_is_told(check, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    elsewhere = types.SimpleNamespace(device=torch.device("cuda", 1), dtype=torch.bfloat16, shape=(1, 1), dim=lambda: 2)
    with pytest.raises(ValueError, match=r"cuda:1.* current device.* cuda:0|current device, cuda:0, found cuda:1"):
        check(elsewhere)
