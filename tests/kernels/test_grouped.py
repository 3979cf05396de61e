"""The kernels of a mixture's experts, compiled for Hopper."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from jetrl_patch.kernels import gemm_common, gemm_grouped, mixture

from . import specs_gemm, specs_rows
from .aot import Spec, compile_one, inner_loop
from .specs import specs

#: kernels without a product
SPECS = [
    *specs_rows.PLAN,
    *specs_rows.COMBINE,
    *specs_rows.ROUTE,
    *(spec for spec in specs_gemm.GEMM_GROUPED_WGRAD if "wgrad" not in spec.name),
]
#: maximum instructions that a warp runs per block of 128, and asynchronous copies of rows and scales among them
LOOPS = {"grouped_gate_up_bf16": (260, 12), "grouped_down_fp32": (260, 12), "grouped_gate_up_dgrad_fp32": (280, 12)}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_compiles_without_spills(spec: Spec):
    made = compile_one(spec)
    assert made.spills == 0 and "mma" not in made.ptx, made[:3]
    assert made.registers * spec.options["num_warps"] * 32 * 2 <= 65536, made[:3]
    if spec in specs_rows.COMBINE and spec.name.startswith("combine"):
        assert "fma.rn.f32" not in made.ptx  # a product and a sum, each rounded


@pytest.mark.parametrize("name", LOOPS)
def test_a_block_costs_few_instructions(name: str):
    most, copies = LOOPS[name]
    loop = inner_loop(compile_one(specs()[name]))
    assert len(loop) <= most and not any(opcode.startswith("STS") for opcode in loop)
    assert sum(opcode.startswith("LDGSTS") for opcode in loop) <= copies
    assert sum(opcode.startswith("QGMMA") for opcode in loop) >= 4 and loop.count("FFMA") == 64


def test_the_instruction_is_that_of_the_wide_dense_tile():
    ours, dense = (
        set(re.findall(r"wgmma\.mma_async\S+", compile_one(specs()[name]).ptx))
        for name in ("grouped_gate_up_bf16", "fprop_128x128_bf16_blocks")
    )
    assert ours == dense and len(ours) == 1


def test_no_tile_is_chosen_by_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, int]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]):
            return lambda *args, **options: seen.append((options["ROWS"], options["COLUMNS"]))

    monkeypatch.setattr(gemm_grouped, "grouped_kernel", Kernel())
    monkeypatch.setattr(gemm_common, "check_device", lambda *tensors: None)
    for T in (1, 7, 64, 5000):
        ids = torch.zeros(T, 1, dtype=torch.int64)
        table = mixture.Table(torch.zeros(T, 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
        made = mixture.Plan(ids, ids.flatten(), ids.flatten(), torch.zeros(3), table, table)
        q, s = torch.zeros(T, 128, dtype=torch.float8_e4m3fn), torch.ones(T, 1)
        gemm_grouped.grouped(q, s, q.new_zeros(2, 64, 128), torch.ones(2, 1, 1), made)
    assert len(seen) == 4 and len(set(seen)) == 1 and seen[0][0] >= 64  # at least 64 rows: FP8 wgmma
