"""The quantizers, bit for bit: the reference against plain arithmetic, every backend against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from jetrl_patch.backends import get_backend, quantize, rowwise
from jetrl_patch.kernels.formats import FP8, FP8_MAX, groups

SHAPES = [(1, 1), (3, 127), (7, 128), (128, 129), (130, 320), (257, 1000), (64, 64)]
FORMATS = ["pow2", "fp32"]
KINDS = ["quantize_activation", "quantize_tokens", "quantize_weight"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes, where any NaN equals any NaN."""
    nan = torch.isnan(a.float())
    return a.shape == b.shape and bool(
        (nan == torch.isnan(b.float())).all() and torch.equal(a.float()[~nan], b.float()[~nan])
    )


def values(kind: str, shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 1009 + shape[1])
    x = torch.randn(shape, generator=generator)
    if kind == "wide":
        x = x * torch.exp2(torch.randint(-40, 40, shape, generator=generator).float())
    elif kind == "tiny":
        x = x * 1e-12
    elif kind == "zeros":
        x = x * (torch.rand(shape, generator=generator) < 0.05)
    elif kind == "powers":  # values and amax at and next to powers of two and FP8 midpoints
        x = torch.exp2(torch.randint(-12, 9, shape, generator=generator).float()) * torch.tensor(
            [1.0, 1.0625, 0.9375, 1.125, 1.1875, 1.75]
        )[torch.randint(0, 6, shape, generator=generator)]
    elif kind == "subnormal":
        x = torch.randint(-40, 40, shape, generator=generator).float() * 2.0**-10
        x[..., 0] = 448.0
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("data", ["normal", "wide", "tiny", "zeros", "powers", "subnormal"])
def test_native_equals_reference(shape, kind, scale_format, data):
    x = values(data, shape)
    q, s = getattr(get_backend("native"), kind)(x, scale_format)
    expected_q, expected_s = getattr(quantize, kind)(x, scale_format)
    assert torch.equal(q.view(torch.uint8), expected_q.view(torch.uint8))
    assert torch.equal(s, expected_s)


def test_every_bf16_value_is_rounded_as_torch_rounds():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.float().abs() <= FP8_MAX]
    rows = torch.zeros(every.numel(), 128, dtype=torch.bfloat16)
    rows[:, 0] = FP8_MAX  # scale 1, so the values themselves are rounded
    rows[:, 1] = every
    q, s = get_backend("native").quantize_activation(rows, "fp32")
    assert bool((s == 1).all())
    assert torch.equal(q[:, 1].view(torch.uint8), every.float().to(FP8).view(torch.uint8))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_non_finite_stays_visible(bad, kind, backend):
    x = values("normal", (130, 260))
    x[1, 5] = bad
    q, s = getattr(get_backend(backend), kind)(x, "pow2")
    expected = getattr(quantize, kind)(x, "pow2")
    assert same_bits(q, expected.q) and same_bits(s, expected.s)
    assert bool(torch.isnan(q[1, 5].float())) and not bool(torch.isfinite(s).all())


@settings(max_examples=200, deadline=None)
@given(st.floats(min_value=0, max_value=2.0**126, width=32, allow_subnormal=False))
def test_pow2_scale_is_the_next_power_of_two(amax):
    exact = quantize.scale_from_amax(torch.tensor([amax]), "fp32").item()
    scale = quantize.scale_from_amax(torch.tensor([amax]), "pow2").item()
    mantissa, _ = math.frexp(scale)
    assert mantissa == 0.5 and exact <= scale < 2 * exact


@pytest.mark.parametrize("kind", KINDS)
def test_pow2_dequantization_is_exact_in_bf16(kind):
    x = values("wide", (130, 260))
    q, s = getattr(quantize, kind)(x, "pow2")
    back = {"quantize_weight": "dequantize_weight", "quantize_tokens": "dequantize_tokens"}.get(
        kind, "dequantize_activation"
    )
    wide = getattr(quantize, back)(q, s, torch.float32)
    assert torch.equal(getattr(quantize, back)(q, s, torch.bfloat16).float(), wide)


def test_weights_are_quantized_from_their_bf16_value():
    master = torch.randn(130, 200)
    for name in ("native", "torch"):
        q, s = get_backend(name).quantize_weight(master, "fp32")
        expected_q, expected_s = quantize.quantize_weight(master.to(torch.bfloat16), "fp32")
        assert torch.equal(q.view(torch.uint8), expected_q.view(torch.uint8)) and torch.equal(s, expected_s)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.data())
def test_any_slice_of_rows_keeps_its_scales(n, k, data):
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)).to(torch.bfloat16)
    q, s = quantize.quantize_weight(w, "pow2")
    rows = quantize.expand_weight_scale(s, n)
    assert rows.shape == (n, groups(k))
    start = data.draw(st.integers(0, n - 1))
    part = quantize.dequantize_activation(q[start:], rows[start:])
    assert torch.equal(part, quantize.dequantize_weight(q, s)[start:])


class Divisors(TorchDispatchMode):
    """Records the divisors of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "run",
    [*(getattr(quantize, kind) for kind in KINDS), rowwise.quantize_fp8_rows, lambda x, _: rowwise.quantize_int8_rows(x)],
    ids=[*KINDS, "one scale a row", "int8"],
)
def test_no_quantizer_divides_by_a_number(run):
    """CUDA multiplies by the rounded reciprocal of a number, and of a one-element tensor on the CPU."""
    x = torch.ones(3, 200, dtype=torch.bfloat16, device="meta")
    with Divisors() as divisors:
        run(x, "fp32")
    assert len(divisors.found) == 2  # amax by the largest value, values by their scale
    assert all(isinstance(found, torch.Tensor) and found.device == x.device for found in divisors.found)


def test_a_reciprocal_would_be_another_scale():
    """Why the division matters: about half of all FP32 scales differ by their last bit."""
    amax = torch.arange(1, 2**15, dtype=torch.int16).view(torch.bfloat16)
    amax = amax[(amax.float() > 1e-9) & amax.isfinite()].float()
    turned = amax * torch.tensor(1 / FP8_MAX, dtype=torch.float32)
    assert (turned != quantize.scale_from_amax(amax, "fp32")).any()
