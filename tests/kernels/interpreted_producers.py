"""The fused producers in the interpreter: byte-equal to the exact operation followed by the quantizer."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from jetrl_patch.backends import quantize as reference
from jetrl_patch.exact import dispatch, elementwise
from jetrl_patch.kernels import common, silu
from jetrl_patch.kernels import norm as norm_rows
from jetrl_patch.kernels import norm as producers

from .interpreted_quantize import FORMATS, check

assert triton.knobs.runtime.interpret
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def formulas(monkeypatch):
    """Use the FP64 formulas, as on a GPU, not the C kernels."""
    monkeypatch.setitem(dispatch._chosen, "cpu", "torch")


def normal(M: int, K: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(M, K, generator=torch.Generator().manual_seed(seed + M + K)) * 3).to(torch.bfloat16)


EVERY = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@triton.jit
def silu_kernel(g, y, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, common.bf16_value(silu.silu(common.widened(tl.load(g + at), False)), False))


def test_silu_of_every_gate_is_that_of_fp64():
    y = torch.empty(1 << 16)
    silu_kernel[(16,)](EVERY, y, SIZE=4096)
    expected = elementwise.silu_mul(EVERY, torch.ones_like(EVERY)).float()
    nan = expected.isnan()
    assert torch.equal(y.isnan(), nan) and torch.equal(y[~nan].view(torch.int32), expected[~nan].view(torch.int32))


def test_only_two_gates_lie_near_a_boundary():
    """Almost no value is near the midpoint of two BF16 values, so FP32 suffices and the last bits of FP64 cannot matter."""
    g = EVERY[EVERY.isfinite()].double()
    exact = g * torch.sigmoid(g)
    near = {
        bits: g[(exact * (1 + 2.0**-bits)).to(torch.bfloat16) != (exact * (1 - 2.0**-bits)).to(torch.bfloat16)].tolist()
        for bits in (24, 26)
    }
    assert near == {24: [5.9375, -0.00390625], 26: []}


@pytest.mark.pairs
@pytest.mark.parametrize("shape", [(1, 1), (5, 130), (130, 140)])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_silu_mul_equals_two_steps(shape, scale_format, bad):
    M, K = shape
    both = normal(M, 2 * K)
    if bad is not None:
        both[0, 0] = bad
    gate, up = both[:, :K], both[:, K:]
    y = elementwise.silu_mul(gate, up)
    rows = reference.quantize_activation(y, scale_format)
    alone = producers.silu_mul_quantize_rows(gate, up, scale_format, columns=True)
    kept = producers.silu_mul_quantize_rows(gate, up, scale_format, keep=True)
    for made in (alone, kept):
        check(made.q_MK, made.s_MG, *rows)
    assert alone.y_MK is None and kept.y_MK is not None
    nan = y.isnan()
    assert torch.equal(kept.y_MK.isnan(), nan) and torch.equal(kept.y_MK[~nan].view(torch.int16), y[~nan].view(torch.int16))


def test_large_tiles_of_silu_give_the_same_bits(monkeypatch):
    gate, up = normal(130, 260), normal(130, 260, 1)
    few = producers.silu_mul_quantize_rows(gate, up, "fp32")[:2]
    monkeypatch.setattr(silu, "FEW", 0)
    check(*producers.silu_mul_quantize_rows(gate, up, "fp32")[:2], *few)


@pytest.mark.pairs
@pytest.mark.parametrize("shape", [(1, 1), (5, 130), (40, 300), (3, 1000)])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_rmsnorm_equals_two_steps(shape, scale_format, bad):
    x, weight = normal(*shape), normal(1, shape[1], 7)[0]
    x[shape[0] // 2] = 0
    if bad is not None:
        x[0, -1] = bad
    eps = 1e-5
    y = elementwise.rms_norm(x, weight, eps)
    made = producers.norm_quantize_rows(x, None, weight, eps, scale_format, keep=True)
    assert made.y_MK is not None and made.total_MK is None
    nan = y.isnan()
    assert torch.equal(made.y_MK.isnan(), nan)
    assert torch.equal(made.y_MK[~nan].view(torch.int16), y[~nan].view(torch.int16))
    check(made.q_MK, made.s_MG, *reference.quantize_activation(y, scale_format))
    rstd = (x.double().pow(2).mean(-1) + eps).rsqrt().float()
    assert torch.equal(made.rstd_M.nan_to_num(), rstd.nan_to_num())
    alone = producers.norm_quantize_rows(x, None, weight, eps, scale_format)
    assert alone.y_MK is None and alone.rstd_M is None
    check(alone.q_MK, alone.s_MG, made.q_MK, made.s_MG)


@pytest.mark.pairs
@pytest.mark.parametrize("shape", [(1, 1), (5, 130), (3, 1000), (2, 2048)])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_the_norm_of_a_sum_equals_three_steps(shape, scale_format, bad):
    x, residual, weight = normal(*shape), normal(*shape, 1), normal(1, shape[1], 7)[0]
    x[shape[0] // 2] = 0
    if bad is not None:
        residual[0, -1] = bad
    for r in (residual, None, residual.repeat(1, 2)[:, : shape[1]]):
        total = x if r is None else x + r
        made = norm_rows.norm_quantize_rows(x, r, weight, 1e-5, scale_format, columns=r is residual)
        check(made.q_MK, made.s_MG, *reference.quantize_activation(elementwise.rms_norm(total, weight, 1e-5), scale_format))
        assert made.s_MG.stride(0) == 1 or r is not residual
        if r is None:
            assert made.total_MK is None
        else:
            nan = total.isnan()
            assert torch.equal(made.total_MK.isnan(), nan)
            assert torch.equal(made.total_MK[~nan].view(torch.int16), total[~nan].view(torch.int16))


def test_eps_is_not_rounded():
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    eps = 1.0 + 2.0**-25  # an FP32 1.0
    made = producers.norm_quantize_rows(x, None, x[0] + 1, 4 * eps * (1 + 2**-24), "pow2", keep=True)
    assert made.rstd_M.item() == torch.tensor(1 / math.sqrt(4 * eps * (1 + 2**-24)), dtype=torch.float64).float().item() != 0.5


def test_empty_batches():
    x = torch.zeros(0, 260, dtype=torch.bfloat16)
    assert producers.silu_mul_quantize_rows(x, x, "pow2").q_MK.shape == (0, 260)
    made = norm_rows.norm_quantize_rows(x, x, torch.ones(260, dtype=torch.bfloat16), 1e-6, "pow2")
    assert made.s_MG.shape == (0, 3) and made.total_MK.shape == (0, 260)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: producers.silu_mul_quantize_rows(x, x[:2], "pow2"), ValueError, r"\[4, 256\] on cpu and \[2, 256\] on cpu"),
        (lambda x: producers.silu_mul_quantize_rows(x, x.float(), "pow2"), TypeError, "up: required torch.bfloat16"),
        (lambda x: norm_rows.norm_quantize_rows(x, None, x[0, :9], 1e-6, "pow2"), ValueError, r"\[256\] on cpu, found .*\[9\]"),
        (lambda x: norm_rows.norm_quantize_rows(x.repeat(1, 65), None, x[0], 1e-6, "pow2"), ValueError, ", found 16640"),
        (lambda x: norm_rows.norm_quantize_rows(x, x[:3], x[0], 1e-6, "pow2"), ValueError, r"shape \[4, 256\], found \[3, 256\]"),
        (lambda x: norm_rows.norm_quantize_rows(x, None, x[0].float(), 1e-6, "pow2"), ValueError, "found torch.float32"),
        (lambda x: norm_rows.norm_quantize_rows(x, x.float(), x[0], 1e-6, "pow2"), TypeError, "residual: required"),
    ],
)
def test_wrong_inputs(call, error, match):
    with pytest.raises(error, match=match):
        call(torch.zeros(4, 256, dtype=torch.bfloat16))
