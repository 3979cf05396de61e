"""The Triton quantizers, compiled for Hopper."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from jetrl_patch.errors import ConfigError
from jetrl_patch.kernels import norm, quantize, silu
from jetrl_patch.kernels.common import COMPILER

from . import specs_gemm, specs_rows
from .aot import Spec, compile_one
from .specs import specs

ROOT = Path(__file__).resolve().parents[2]
SPECS = [*specs_rows.QUANTIZE_ALL, *specs_rows.NORM_ROWS, *specs_rows.SILU]

#: maximum registers per thread and bytes of shared memory per program. An SM has 65,536 registers:
#: the third column is how many of its 64 warps can then be active
LIMITS = {
    "quantize_rows32": (64, 256, 32),
    "quantize_rows4": (64, 0, 32),
    "quantize_transposed": (128, 8192, 16),
    "quantize_both": (128, 16384, 16),
    "quantize_weight_bf16": (128, 256, 16),
    "quantize_weight_fp32": (128, 256, 16),
    "quantize_weight_bf16_transposed": (64, 16384, 32),
    "quantize_weight_fp32_transposed": (64, 16384, 32),
    "requantize_tokens": (128, 8192, 16),
    "silu_mul_rows32": (64, 256, 32),
    "silu_mul_rows4": (64, 0, 32),
    "silu_mul_rows32_kept": (64, 8192, 32),
    "silu_mul_rows4_kept": (64, 0, 32),
    **{f"norm_rows{width}{kind}": (96, 512, 16) for width in (1024, 4096, 8192, 16384) for kind in ("", "_added")},
    **{f"norm_rows{width}_kept": (128, width, 16) for width in (1024, 4096, 8192, 16384)},
}
#: bytes of spilled registers per thread
SPILLS: dict[str, int] = {}
if "sched4reg" not in COMPILER:  # what older versions of triton need more, seen with 3.6.0
    LIMITS |= {"silu_mul_rows4": (64, 16, 32), "silu_mul_rows4_kept": (72, 16, 28)}
    LIMITS |= {f"quantize_weight_{dtype}_transposed": (112, 32768, 16) for dtype in ("bf16", "fp32")}
#: instructions that would change bits: quotients and roots without correct rounding, subnormals flushed to zero
INEXACT = re.compile(r"\b(?:div\.full|div\.approx|rcp\.approx|sqrt\.approx|rsqrt|ex2|lg2|tanh)\S*|\S+\.ftz\S*")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_compiles_for_hopper_without_spills_and_with_exact_arithmetic(spec: Spec):
    kind = re.sub(r"_(?:pow2|fp32)$", "", spec.name)
    registers, shared, warps = LIMITS[kind]
    made = compile_one(spec)
    assert made.spills <= SPILLS.get(kind, 0) and made.registers <= registers and made.shared <= shared, made[:3]
    programs = 65536 // (made.registers * 32 * spec.options["num_warps"])
    assert programs * spec.options["num_warps"] >= warps, made[:3]
    assert not INEXACT.findall(made.ptx)
    assert "cvt.rn.satfinite.e4m3x2.f32" in made.ptx  # the GPU's own rounding
    divides = "fp32" in spec.name.rsplit("_", 1)[-1] or "silu" in spec.name
    assert ("div.rn.f32" in made.ptx) == divides  # a power of two needs none
    assert "ld.global.v4.b32" in made.ptx  # 16 bytes at a time
    assert "st.global.v4.b32" in made.ptx or (silu.SPREAD > 1 and spec.kernel is silu.silu_mul_rows_kernel)


def sum_of_squares(spec: Spec) -> list[str]:
    """The tiles of FP64 that a kernel reduces, with the way in which its threads hold them: that is the order of the sum."""
    lines = compile_one(spec).ttgir
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", lines, re.M))
    tiles = re.findall(r"\}\) : \((tensor<[^)]*f64[^)]*>)\) ->", lines)
    return [re.sub(r"#(?!ttg)\w+", lambda found: layouts[found[0]], tile) for tile in tiles]


@pytest.mark.parametrize("spec", specs_rows.NORM_ROWS, ids=lambda spec: spec.name)
def test_the_fused_norm_adds_in_the_order_of_the_norm(spec: Spec):
    """Otherwise one row in 10^8 would differ in the last bit, which no comparison of values would find."""
    alone = next(s for s in specs_rows.NORM if s.constexprs["GROUPS"] == spec.constexprs["GROUPS"])
    assert alone.options["num_warps"] == spec.options["num_warps"]
    found = sum_of_squares(spec)
    assert len(found) == 2 and "sizePerThread = [1, 8]" in found[0] and found == sum_of_squares(alone)


def test_another_order_would_be_found():
    spec = next(s for s in specs_rows.NORM if s.constexprs["GROUPS"] == 32)
    wider = spec._replace(options={**spec.options, "num_warps": 2 * spec.options["num_warps"]})
    assert sum_of_squares(wider) != sum_of_squares(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.name.endswith("_fp32")], ids=lambda spec: spec.name)
def test_integer_arithmetic_compiles_too(spec: Spec):
    made = compile_one(spec._replace(constexprs={**spec.constexprs, "HARDWARE": False}))
    assert ".e4m3x2" not in made.ptx and not INEXACT.findall(made.ptx)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.name.endswith("_pow2")], ids=lambda spec: spec.name)
def test_sizes_of_one_are_constants_to_the_compiler(spec: Spec):
    ones = {name for name in spec.types if spec.types[name] == "i32"}
    types = {name: kind for name, kind in spec.types.items() if name not in ones}
    assert compile_one(spec._replace(types=types, constexprs={**spec.constexprs, **dict.fromkeys(ones, 1)})).spills == 0


def test_all_kernels_are_registered_once():
    found = specs()
    assert {spec.name for spec in SPECS} <= set(found)
    kernels = (spec.kernel.fn for spec in (*found.values(), *specs_gemm.GEMM_MX))
    here = {(kernel.__module__, kernel.__name__) for kernel in kernels}
    for path in (ROOT / "jetrl_patch" / "kernels").glob("*.py"):
        module = f"jetrl_patch.kernels.{path.stem}"
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M):
            assert (module, name) in here, f"{module}.{name}"


def test_a_cpu_without_the_interpreter_is_told():
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    q, s = torch.zeros(4, 128, dtype=torch.float8_e4m3fn), torch.ones(4, 1)
    for call in (
        lambda: quantize.quantize_rows(x, "pow2"),
        lambda: quantize.quantize_transposed(x, "pow2"),
        lambda: quantize.quantize_both(x, "pow2"),
        lambda: quantize.quantize_weight(x, "pow2"),
        lambda: quantize.quantize_weight_transposed(x, "pow2"),
        lambda: quantize.requantize_tokens(q, s, "pow2"),
        lambda: norm.silu_mul_quantize_rows(x, x, "pow2"),
        lambda: norm.norm_quantize_rows(x, x, x[0], 1e-6, "pow2"),
    ):
        with pytest.raises(ConfigError, match=r'required a CUDA device, found cpu\. Use backend="native"'):
            call()


def test_the_package_loads_no_triton():
    code = "import sys, jetrl_patch, jetrl_patch.kernels, jetrl_patch.backends\nassert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
