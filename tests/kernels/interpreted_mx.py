"""FProp in MXFP8 in the interpreter, against the FP64 reference and against itself in other batches.

The dot is computed in FP64 here, because numpy's FP32 product depends on a row's position in the tile.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

from jetrl_patch.backends import get_backend, quantize
from jetrl_patch.backends.row_equality import Layout, Part, compare_parts, compare_rows
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.kernels.formats import exponents

from ..fp8 import oracle
from ..fp8.test_gemm import operands
from ..fp8.thresholds import KERNEL_EQUALS_ORACLE, SQNR_GEMM, SQNR_KERNEL_FP32, SQNR_UNQUANTIZED, sqnr

assert triton.knobs.runtime.interpret


@pytest.fixture(autouse=True)
def exact_dot(monkeypatch):
    product = np.matmul

    def in_fp64(a, b):
        return product(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)

    monkeypatch.setattr(np, "matmul", in_fp64)


SHAPES = [(1, 128, 128), (5, 64, 320), (33, 140, 1000), (130, 200, 257), (200, 17, 33)]  # M, N, K


@pytest.mark.parametrize("shape", SHAPES)
def test_fprop_against_the_oracle(shape):
    x, w = operands(*shape)
    b = get_backend("mx")
    xq, wq = b.quantize_activation(x, "mxfp8"), b.quantize_weight(w, "mxfp8")
    y, unrounded = (b.gemm(xq, wq, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert (y == quantize.fprop(*xq, *wq, torch.bfloat16, block=32)).float().mean() >= KERNEL_EQUALS_ORACLE
    assert sqnr(unrounded, quantize.fprop(*xq, *wq, torch.float32, block=32)) > SQNR_KERNEL_FP32
    assert torch.equal(unrounded.to(torch.bfloat16), y)  # one rounding, to the nearest


def test_rows_and_splits():
    layout = Layout((Part(64, 0, 64, 0), Part(96, 32, 64, 64)), 2)
    assert compare_rows(get_backend("mx"), (96, 192), "cpu", "mxfp8", trained=140).ok
    found = compare_parts(get_backend("mx"), (96, 96), layout, "cpu", "mxfp8", (1, 7, 130))
    assert found.ok, found
    x, w = operands(9, 40, 288)
    b = get_backend("mx")
    wq = b.quantize_weight(w, "mxfp8")
    first, second, third = (b.fprop(x[:, k : k + 96].contiguous(), wq.columns(k, k + 96), torch.float32) for k in (0, 96, 192))
    assert torch.equal(b.fprop(x, wq, torch.float32, 3), (first + second) + third)
    assert not torch.equal((first + second) + third, (third + second) + first)


def test_a_scale_that_is_not_finite_stays_visible():
    s = torch.tensor([[2.0**-42, 1.0, 2.0**120, float("inf"), float("nan")]])
    assert exponents(s).tolist() == [[85, 127, 247, 255, 255]]
    x, w = operands(3, 8, 64)
    x[1, 40] = float("nan")
    b = get_backend("mx")
    y = b.fprop(x, b.quantize_weight(w, "mxfp8"))
    assert y[1].isnan().all() and y[0].isfinite().all() and y[2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients(dtype):
    x, w = operands(33, 72, 100)
    layer = torch.nn.Linear(100, 72, bias=False, dtype=dtype)
    layer.__class__, layer.fp8 = Fp8Linear, Fp8State("mxfp8", "mx")
    layer.weight.data.copy_(w)
    x = x.to(dtype).requires_grad_()
    g = (torch.randn(33, 72, generator=torch.Generator().manual_seed(5)) * 1e-6).to(torch.bfloat16)
    layer(x).backward(g)
    assert x.grad.dtype == layer.weight.grad.dtype == dtype
    assert sqnr(x.grad, g.double() @ w.double()) > SQNR_UNQUANTIZED["dgrad", "mxfp8"]
    assert sqnr(layer.weight.grad, g.double().t() @ x.double()) > SQNR_UNQUANTIZED["wgrad", "mxfp8"]
    by_n = quantize.quantize_tokens(w, "mxfp8")
    assert sqnr(x.grad, oracle.dgrad_mx(*quantize.quantize_activation(g, "mxfp8"), *by_n)) > SQNR_GEMM
