"""The Triton quantizers in the interpreter, bit for bit against ``backends.quantize``."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_patch.backends import quantize as reference
from jetrl_patch.kernels import common
from jetrl_patch.kernels import quantize as kernels
from jetrl_patch.kernels.formats import FP8, FP8_MAX, groups
from jetrl_patch.kernels.quantize import requantize_tokens
from jetrl_patch.native import ops

from ..fp8.test_quantize import values

assert triton.knobs.runtime.interpret
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about Inf / Inf and the like

SHAPES = [(1, 1), (3, 127), (130, 260)]  # hypothesis generates the others
FORMATS = ["pow2", "fp32"]
DATA = ["normal", "wide", "tiny", "zeros", "powers", "subnormal", "ties", "every", "not finite"]


def data(kind: str, shape: tuple[int, int]) -> torch.Tensor:
    """BF16 values: the kinds of ``tests/fp8``, exact e4m3 ties at scale 1, all of BF16, and NaN and Inf."""
    generator = torch.Generator().manual_seed(sum(shape))
    if kind == "ties":
        codes = torch.arange(0, 126, dtype=torch.uint8)
        low, high = (c.view(FP8).float() for c in (codes, codes + 1))
        ties = torch.cat(((low + high) / 2, -(low + high) / 2))
        x = ties[torch.randint(0, len(ties), shape, generator=generator)]
        x[::128, :] = x[:, ::128] = FP8_MAX  # in every group of either direction: the scale is 1
        return x.to(torch.bfloat16)
    if kind == "every":  # in a random order of runs of 32, so that some groups are finite and some are not
        runs = torch.randperm(2048, generator=generator)[:, None] * 32 + torch.arange(32)
        flat = runs.flatten().repeat(2)[: shape[0] * shape[1]].to(torch.int32)
        return flat.to(torch.int16).view(torch.bfloat16).view(shape)
    if kind == "not finite":
        x = values("wide", shape)
        for bad in (math.nan, math.inf, -math.inf):
            x[torch.rand(shape, generator=generator) < 0.003] = bad
        x[-1, -1] = math.nan
        return x
    return values(kind, shape)


def check(q: torch.Tensor, s: torch.Tensor, expected_q: torch.Tensor, expected_s: torch.Tensor) -> None:
    """Check for equal bytes (including the sign of zero) and equal scales; any NaN matches 0x7f."""
    assert q.dtype == FP8 and q.shape == expected_q.shape and s.shape == expected_s.shape and s.dtype == torch.float32
    nan = expected_q.float().isnan()
    expected = torch.where(nan, 0x7F, expected_q.view(torch.uint8))
    assert torch.equal(q.view(torch.uint8), expected)
    nan = expected_s.isnan()
    assert torch.equal(s.isnan(), nan) and torch.equal(s[~nan], expected_s[~nan])


@pytest.mark.pairs
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("kind", DATA)
def test_every_layout_equals_the_reference(shape, scale_format, kind):
    x = data(kind, shape)
    rows, tokens = reference.quantize_activation(x, scale_format), reference.quantize_tokens(x, scale_format)
    check(*kernels.quantize_rows(x, scale_format), *rows)
    qt, s = kernels.quantize_transposed(x, scale_format)
    check(qt[:, : shape[0]], s, tokens.q.t(), tokens.s)
    q, s, qt, st_ = kernels.quantize_both(x, scale_format)
    check(q, s, *rows)
    check(qt[:, : shape[0]], st_, tokens.q.t(), tokens.s)
    weight = reference.quantize_weight(x, scale_format)
    check(*kernels.quantize_weight(x, scale_format), *weight)
    q, s, qt = kernels.quantize_weight_transposed(x, scale_format)
    check(q, s, *weight)
    check(qt, s, weight.q.t(), weight.s)
    assert qt.stride(0) % 16 == 0 and qt.stride(1) == 1


@pytest.mark.parametrize("scale_format", FORMATS)
def test_large_tiles_give_the_same_bits(scale_format, monkeypatch):
    x = data("wide", (130, 260))
    few = kernels.quantize_rows(x, scale_format)
    monkeypatch.setattr(kernels, "FEW", 0)
    check(*kernels.quantize_rows(x, scale_format), *few)


@settings(max_examples=25)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(FORMATS), st.booleans())
def test_any_shape_and_layout(M, K, scale_format, columns):
    x = values("wide", (M, K))
    wide = torch.zeros(M, K + 3, dtype=torch.bfloat16)
    wide[:, :K] = x  # rows with a stride
    rows, tokens = reference.quantize_activation(x, scale_format), reference.quantize_tokens(x, scale_format)
    q, s, qt, st_ = kernels.quantize_both(wide[:, :K], scale_format, columns)
    check(q, s, *rows)
    assert s.stride() == ((1, -(-M // 4) * 4) if columns else (groups(K), 1)) or 1 in s.shape
    assert q.is_contiguous() and qt.is_contiguous() and st_.is_contiguous()
    for transposed, scales in ((qt, st_), kernels.quantize_transposed(wide[:, :K], scale_format)):
        assert transposed.shape == (K, groups(M) * 128)
        check(transposed[:, :M], scales, tokens.q.t(), tokens.s)
        assert not transposed[:, M:].view(torch.uint8).any()


@pytest.mark.parametrize("scale_format", FORMATS)
def test_weights_are_quantized_from_their_bf16_value(scale_format):
    master = torch.randn(130, 200, generator=torch.Generator().manual_seed(0))
    master[:, 0] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8]).repeat(65)  # BF16 ties: one rounds down, one up
    check(*kernels.quantize_weight(master, scale_format), *reference.quantize_weight(master, scale_format))


@pytest.mark.pairs
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("kind", ["normal", "wide", "subnormal", "every", "not finite"])
def test_requantization_is_that_of_the_cpu_backend(shape, scale_format, kind):
    x = data(kind, shape)
    q, s = reference.quantize_activation(x, scale_format)
    again = ops.dequantize(q, s, 1, 128, torch.bfloat16)
    expected_q, expected_s = reference.quantize_tokens(again, scale_format)
    qt, scales = requantize_tokens(q, s, scale_format)
    check(qt[:, : shape[0]], scales, expected_q.t(), expected_s)
    columns = s.t().contiguous().t()
    qt, scales = requantize_tokens(q, columns, scale_format)
    check(qt[:, : shape[0]], scales, expected_q.t(), expected_s)
    past = qt[:, shape[0] :].view(torch.uint8)[expected_s[-1].isfinite()]  # 0 / NaN is NaN
    assert not past.any()


@triton.jit
def encode_kernel(x, y, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, common.encode(tl.load(x + at, mask=at < n), False), mask=at < n)


def test_every_rounding_to_e4m3_is_torchs():
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    codes = torch.arange(0, 126, dtype=torch.uint8)
    ties = (codes.view(FP8).float() + (codes + 1).view(FP8).float()) / 2
    around = torch.cat([(ties.view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1)])
    special = torch.tensor([0.0, 448.0, 448.1, 464.0, 465.0, math.inf, math.nan, 1e-45, 2**-10, 2**-126, 3.4e38])
    x = torch.cat((bits.view(torch.float32), around, special))
    x = torch.cat((x, -x))
    y = torch.empty(len(x), dtype=torch.uint8)
    encode_kernel[(-(-len(x) // 4096),)](x, y, len(x), SIZE=4096)
    nan = x.isnan()
    assert bool((y[nan] == 0x7F).all())
    assert torch.equal(y[~nan], x[~nan].clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8))


@triton.jit
def decode_kernel(q, y):
    at = tl.arange(0, 256)
    tl.store(y + at, common.decode(tl.load(q + at), False))


def test_every_byte_is_decoded_as_torch_decodes():
    q, y = torch.arange(256, dtype=torch.int32).to(torch.uint8), torch.empty(256)
    decode_kernel[(1,)](q, y)
    expected = q.view(FP8).float()
    nan = expected.isnan()
    assert torch.equal(y.isnan(), nan) and torch.equal(y[~nan].view(torch.int32), expected[~nan].view(torch.int32))


@triton.jit
def scale_kernel(amax, s, n, POW2: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    bits = common.magnitude(tl.load(amax + at, mask=at < n, other=0.0))
    tl.store(s + at, common.scale_of(bits, POW2), mask=at < n)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_scales_next_to_powers_of_two_and_to_the_floor(scale_format):
    powers = 448 * torch.exp2(torch.arange(-60, 118).float())
    edges = torch.cat((powers, torch.tensor([1e-10, 0.0, 3.38e38]))).view(torch.int32)
    amax = torch.cat([(edges + step).clamp(min=0).view(torch.float32) for step in (-2, -1, 0, 1, 2)])
    amax = torch.cat((amax, torch.tensor([math.inf, math.nan])))
    s = torch.empty_like(amax)
    scale_kernel[(-(-len(amax) // 256),)](amax, s, len(amax), POW2=scale_format == "pow2", SIZE=256)
    expected = reference.scale_from_amax(amax, scale_format)
    assert torch.equal(s[:-1], expected[:-1]) and s[-1].isnan()


def test_empty_batches():
    x = torch.zeros(0, 260, dtype=torch.bfloat16)
    q, s, qt, st_ = kernels.quantize_both(x, "pow2")
    assert (q.shape, s.shape, qt.shape, st_.shape) == ((0, 260), (0, 3), (260, 0), (0, 260))
    assert kernels.quantize_rows(x, "fp32", columns=True)[1].shape == (0, 3)
    assert kernels.quantize_transposed(x, "fp32")[0].shape == (260, 0)
    assert requantize_tokens(q, s, "pow2")[0].shape == (260, 0)
    assert kernels.quantize_weight(x, "pow2")[1].shape == (0, 3)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: kernels.quantize_rows(x.float(), "pow2"), TypeError, "x: required torch.bfloat16, found torch.float32"),
        (lambda x: kernels.quantize_weight(x.half(), "pow2"), TypeError, "bfloat16 or torch.float32, found torch.float16"),
        (lambda x: kernels.quantize_rows(x[None], "pow2"), ValueError, r"two dimensions, found \[1, 4, 256\]"),
        (lambda x: kernels.quantize_both(x.t(), "pow2"), ValueError, r"contiguous rows, found strides \[1, 256\]"),
        (lambda x: kernels.quantize_transposed(x, "pow4"), ValueError, "pow2 or fp32, found 'pow4'"),
        (lambda x: kernels.quantize_rows(x, "mxfp8"), ValueError, "blocks of 128: required pow2 or fp32, found 'mxfp8'"),
        (lambda x: requantize_tokens(x, torch.ones(4, 2), "pow2"), TypeError, "required torch.float8_e4m3fn"),
        (lambda x: requantize_tokens(x.to(FP8), torch.ones(4, 3), "pow2"), ValueError, r"\[4, 2\] on cpu, found .*\[4, 3\]"),
    ],
)
def test_wrong_inputs(call, error, match):
    with pytest.raises(error, match=match):
        call(torch.zeros(4, 256, dtype=torch.bfloat16))
