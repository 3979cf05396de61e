"""Quantizers and products with one scale per row, against independent computations."""

from __future__ import annotations

from fractions import Fraction

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_patch.backends import choose_backend, get_backend, quantize, rowwise
from jetrl_patch.backends.rowwise import quantize_int8_rows

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
#: BF16 rows with outliers, zeros and tiny values; odd shapes
ROWS = st.tuples(st.integers(1, 5), st.integers(1, 300), st.integers(0, 2**31), st.floats(-30, 30), st.booleans())


def rows(drawn: tuple[int, int, int, float, bool]) -> torch.Tensor:
    m, k, seed, exponent, outlier = drawn
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) * 2.0**exponent
    x[:, torch.randint(0, k, (1,), generator=generator)] *= 1000.0 if outlier else 0.0
    x[seed % m] *= float(seed % 3 > 0)  # sometimes a row of zeros
    return x.to(torch.bfloat16)


@given(ROWS)
def test_int8_bytes_and_scales_by_exact_arithmetic(drawn: tuple[int, int, int, float, bool]) -> None:
    x = rows(drawn)
    q, s = quantize_int8_rows(x)
    assert q.dtype == torch.int8 and s.shape == (x.shape[0], 1) and s.dtype == torch.float32
    for values, codes, scale in zip(x.double().numpy(), q.numpy(), s.numpy().ravel()):
        amax = numpy.float32(max(numpy.float32(numpy.abs(values).max()), numpy.float32(1e-10)))
        assert scale == amax / numpy.float32(127)
        for value, code in zip(values, codes):
            steps = Fraction(float(value)) / Fraction(float(scale))
            assert abs(steps - int(code)) <= Fraction(1, 2) + Fraction(1, 2**16)  # x / s is rounded in FP32
            assert -127 <= code <= 127
    assert int(q.abs().amax(1).min()) == 127 or bool((x.abs().amax(1) < 1e-9).any())


def test_int8_rounds_half_to_even_and_saturates() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5, -127.0]])
    q, s = quantize_int8_rows(x)
    assert s.item() == 1.0 and q.tolist() == [[127, 0, 2, 2, 0, -2, 126, -126, -127]]
    q, _ = quantize_int8_rows(torch.full((1, 3), 3.3895e38))
    assert q.tolist() == [[127] * 3]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible(value: float) -> None:
    x = torch.randn(3, 40)
    x[1, 7] = value
    weights = quantize_int8_rows(torch.randn(5, 40))
    fp8 = rowwise.quantize_fp8_rows(torch.randn(5, 40), "pow2")
    for y in (rowwise.int8_fprop(x, weights), get_backend("torch").fprop(x, fp8)):
        assert bool(y[1].isnan().all()) and bool(y[[0, 2]].isfinite().all())
    broken = torch.randn(5, 40)
    broken[2, 3] = value
    y = rowwise.int8_fprop(torch.randn(3, 40), quantize_int8_rows(broken))
    assert bool(y[:, 2].isnan().all()) and bool(y[:, [0, 1, 3, 4]].isfinite().all())


@settings(max_examples=40)
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 700), st.integers(0, 2**31), st.sampled_from([1, 40, 127])
)
def test_the_fast_product_is_the_reference(m: int, n: int, k: int, seed: int, most: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-most, most + 1, (r, k), dtype=torch.int8, generator=generator) for r in (m, n))
    exact = torch.from_numpy(a.numpy().astype(numpy.int64) @ b.numpy().astype(numpy.int64).T)
    for mm in (rowwise.reference_mm, rowwise.int_mm, rowwise.choose("auto", "cpu")):
        found = mm(a, b)
        assert found.dtype == torch.int32 and torch.equal(found.long(), exact)


def test_the_widest_sum_fits() -> None:
    a = torch.full((1, rowwise.MAX_K), 127, dtype=torch.int8)
    assert rowwise.int_mm(a, a).item() == rowwise.reference_mm(a, a).item() == rowwise.MAX_K * 127**2 <= 2**31 - 1
    assert (rowwise.MAX_K + 1) * 127**2 > 2**31 - 1


def test_no_rows() -> None:
    w = quantize_int8_rows(torch.randn(6, 10))
    assert rowwise.int8_fprop(torch.zeros(0, 10, dtype=torch.bfloat16), w, mm=rowwise.int_mm).shape == (0, 6)


@settings(max_examples=40)
@given(ROWS, st.integers(1, 30))
def test_the_int8_linear_rounds_once(drawn: tuple[int, int, int, float, bool], n: int) -> None:
    """Against numpy: FP32 with the scales multiplied in the stated order, and BF16 rounding on the bits."""
    x = rows(drawn)
    w = torch.randn(n, x.shape[1], generator=torch.Generator().manual_seed(n))
    weight = quantize_int8_rows(w)
    (q, s), (wq, ws) = ([t.numpy() for t in quantized] for quantized in (quantize_int8_rows(x), weight))
    total = (q.astype(numpy.int64) @ wq.astype(numpy.int64).T).astype(numpy.float32)
    y = s * (ws.T * total)
    bits = y.view(numpy.uint32).astype(numpy.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)  # half to even
    found = rowwise.int8_fprop(x, weight, mm=rowwise.int_mm)
    assert torch.equal(found.view(torch.int16), torch.from_numpy(rounded.view(numpy.int16)))
    partial = rowwise.int8_fprop(x, weight, torch.float32)
    assert torch.equal(partial, torch.from_numpy(y))


@given(ROWS, st.sampled_from(["pow2", "fp32"]))
def test_fp8_rows_against_every_e4m3_value(drawn: tuple[int, int, int, float, bool], scale_format: str) -> None:
    """Each code is a nearest one among the format's 256."""
    x = rows(drawn)
    q, s = rowwise.quantize_fp8_rows(x, scale_format)  # type: ignore[arg-type]
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    table = table[table.isfinite()]
    amax = x.double().abs().amax(1, keepdim=True).clamp(min=1e-10)
    if scale_format == "pow2":
        assert torch.equal(s.double(), 2.0 ** s.double().log2().round())
        assert bool(((amax / 448 <= s * 1.0001) & (s < 2.0001 * amax / 448)).all())
    else:
        assert torch.equal(s, amax.float() / 448)
    scaled = (x.float() / s).double()
    nearest = (scaled.unsqueeze(-1) - table).abs().amin(-1)
    assert torch.equal((q.double() - scaled).abs(), nearest)


@settings(max_examples=25)
@given(ROWS, st.integers(1, 20), st.sampled_from(["pow2", "fp32"]))
def test_the_fp8_product_on_every_backend_here(
    drawn: tuple[int, int, int, float, bool], n: int, scale_format: str
) -> None:
    x = rows(drawn)
    w = torch.randn(n, x.shape[1], generator=torch.Generator().manual_seed(n))
    weight = rowwise.quantize_fp8_rows(w, scale_format)  # type: ignore[arg-type]
    q, s = weight
    xq, xs = rowwise.quantize_fp8_rows(x, scale_format)  # type: ignore[arg-type]
    exact = (xq.double() @ q.double().t()) * xs.double() * s.double().t()
    found = [
        get_backend(name).fprop(x, weight, torch.float32)
        for name in dict.fromkeys(("torch", choose_backend("auto", "cpu")))
    ]
    slack = (xq.double().abs() @ q.double().abs().t()) * xs.double() * s.double().t() * 2.0**-21 + 1e-30
    assert all(bool(((y.double() - exact).abs() <= slack).all()) for y in found)
    groups = -(-x.shape[1] // 128)
    same = quantize.fprop(xq, xs.expand(-1, groups), q, s.expand(-1, groups), torch.float32)
    assert torch.equal(found[0], same)


@given(ROWS)
def test_dequantizing_is_within_half_a_step(drawn: tuple[int, int, int, float, bool]) -> None:
    x = rows(drawn)
    q, s = quantize_int8_rows(x)
    assert bool(((q.float() * s - x.float()).abs() <= 0.501 * s).all())
