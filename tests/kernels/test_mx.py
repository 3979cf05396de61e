"""FProp in MXFP8, compiled for Blackwell."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from .aot import Spec, compile_one
from .specs_gemm import GEMM_MX

#: registers of an SM, and maximum shared memory per block, on compute capability 10.0
REGISTERS, SHARED = 65536, 227 * 1024


@pytest.mark.parametrize("spec", GEMM_MX, ids=lambda spec: spec.name)
def test_compiles_to_block_scaled_products_of_32_and_nothing_else(spec: Spec):
    made = compile_one(spec, GPUTarget("cuda", 100, 32))
    found = set(re.findall(r"(?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)\S+", made.ptx))
    kind = "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale."
    assert found and found <= {kind + "block32", kind + "scale_vec::1X"}  # one instruction, by PTX versions
    assert made.spills == 0 and made.shared <= SHARED, made[:3]
    assert made.registers * spec.options["num_warps"] * 32 <= REGISTERS
    assert "fma.rn.f32" not in made.ptx and "mad.f32" not in made.ptx and ".ftz" not in made.ptx
