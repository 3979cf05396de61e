"""FProp against the oracle and against itself in other batches; DGrad and WGrad against FP64."""

from __future__ import annotations

import functools

import pytest
import torch

from jetrl_patch.backends import get_backend, quantize
from jetrl_patch.kernels.formats import FP8
from jetrl_patch.native import build, ops

from . import oracle
from .thresholds import NATIVE_EQUALS_ORACLE, SQNR_GEMM, SQNR_KERNEL_FP32, SQNR_UNQUANTIZED, sqnr

SHAPES = [(1, 128, 128), (5, 64, 320), (33, 320, 1000), (130, 1000, 256), (200, 17, 129)]  # M, N, K
FORMATS = ["pow2", "fp32"]


def operands(M, N, K, seed=0):
    g = torch.Generator().manual_seed(seed + M + N + K)
    x = torch.randn(M, K, generator=g) * torch.exp(torch.randn(M, 1, generator=g))
    w = torch.randn(N, K, generator=g) * K**-0.5
    return x.to(torch.bfloat16), w.to(torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_fprop_sqnr(shape, scale_format, backend):
    x, w = operands(*shape)
    b = get_backend(backend)
    wq = b.quantize_weight(w, scale_format)
    y = b.fprop(x, wq)
    assert y.dtype == torch.bfloat16
    assert sqnr(y, x.double() @ w.double().t()) > SQNR_UNQUANTIZED["fprop", scale_format]
    qx, sx = quantize.quantize_activation(x, scale_format)
    exact = quantize.dequantize_activation(qx, sx, torch.float64) @ quantize.dequantize_weight(*wq, torch.float64).t()
    assert sqnr(y, exact) > SQNR_GEMM


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale_format", FORMATS)
def test_native_fprop_against_the_oracle(shape, scale_format):
    x, w = operands(*shape)
    wq, xq = quantize.quantize_weight(w, scale_format), quantize.quantize_activation(x, scale_format)
    equal = get_backend("native").gemm(xq, wq, torch.bfloat16) == quantize.fprop(*xq, wq.q, wq.s_rows, torch.bfloat16)
    assert equal.float().mean() >= NATIVE_EQUALS_ORACLE


def test_sums_are_rounded_to_fp32_after_every_block():
    """2^24 + 1 is rounded to 2^24 before 2^24 is subtracted, in the definition and in the kernel."""
    q = torch.ones(1, 3 * 128)
    q[0, 129:256] = 0  # of the second block one product is left
    x, s_x = q.to(FP8), torch.tensor([[2.0**17, 1.0, -(2.0**17)]])
    w, s_w = torch.ones(1, 3 * 128).to(FP8), torch.ones(1, 3)
    assert quantize.fprop(x, s_x, w, s_w, torch.float32).item() == 0.0
    assert ops.fp8_gemm(x, s_x, w, s_w, torch.float32).item() == 0.0


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_a_row_depends_on_itself_alone(backend, out_dtype):
    x, w = operands(257, 320, 1000)
    b = get_backend(backend)
    wq = b.quantize_weight(w, "fp32")
    whole = b.fprop(x, wq, out_dtype)
    for size in (1, 2, 7, 32, 193, 256):
        for start in (0, 1, 130, 257 - size):
            part = b.fprop(x[start : start + size], wq, out_dtype)
            assert torch.equal(part, whole[start : start + size])


@pytest.mark.parametrize("shape", [*SHAPES, (9, 33, 131)])
def test_two_products_in_one_instruction_change_no_bit(shape):
    """Over all codes, NaN too."""
    pairs = build.library().jetrl_pairs
    if not pairs(1):
        pytest.skip("this processor has no such instruction")
    (M, N, K), g = shape, torch.Generator().manual_seed(0)
    q, w = (torch.randint(0, 256, (rows, K), generator=g, dtype=torch.uint8).view(FP8) for rows in (M, N))
    s, rows = (torch.rand(size, -(-K // 128), generator=g) + 0.1 for size in (M, N))
    w.view(torch.uint8)[: N // 2] &= 0xFE  # no NaN among them
    q.view(torch.uint8)[: (M + 1) // 2] &= 0xFE
    found = ops.fp8_gemm(q, s, w, rows, torch.float32)
    pairs(0)
    try:
        expected = ops.fp8_gemm(q, s, w, rows, torch.float32)
    finally:
        pairs(1)
    assert torch.equal(found.isnan(), expected.isnan()) and (~found.isnan()).any()
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_threads_change_nothing(backend):
    x, w = operands(300, 512, 512)
    b = get_backend(backend)
    wq = b.quantize_weight(w, "pow2")
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(b.fprop(x, wq))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("scale_format", FORMATS)
def test_splits_equal_what_tensor_parallel_ranks_add(backend, ranks, scale_format):
    width = max(1024, 256 * ranks)
    x, w = operands(9, 130, width)
    b = get_backend(backend)
    wq, K = b.quantize_weight(w, scale_format), width // ranks
    cuts = [slice(r * K, (r + 1) * K) for r in range(ranks)]
    parts = [b.fprop(x[:, k].contiguous(), wq.columns(k.start, k.stop), torch.float32) for k in cuts]
    total = functools.reduce(torch.add, parts)
    assert torch.equal(b.fprop(x, wq, torch.float32, splits=ranks), total)
    assert torch.equal(b.fprop(x, wq, splits=ranks), total.to(torch.bfloat16))
    if ranks > 2:  # the order is seen: in FP32 another one gives other bits
        assert not torch.equal(functools.reduce(torch.add, reversed(parts)), total)
    with pytest.raises(ValueError, match="without cutting a block"):
        b.fprop(x, wq, splits=32)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_activation_that_wgrad_multiplies_is_requantized_over_tokens(backend, scale_format):
    """Jet-RL's flow: the bytes that FProp saved, in groups of 128 tokens. With one 1 in each column, dW has them row by row."""
    b, M = get_backend(backend), 160
    x, _ = operands(M, 1, 300)
    x *= torch.logspace(0, -5, M)[:, None]  # small tokens beside large ones, which share a scale only here
    saved = b.quantize_activation(x, scale_format)
    again = b.quantize_tokens(b.dequantized(saved, torch.bfloat16), scale_format)
    expected = b.dequantized(again, torch.float32)
    dy = torch.eye(M, dtype=torch.bfloat16)
    # 1 is 448 times its own scale, exactly so only with a scale that is a power of two
    rtol = 0.0 if scale_format != "fp32" else 1e-6
    torch.testing.assert_close(b.wgrad(dy, saved, torch.float32), expected, rtol=rtol, atol=0.0)
    assert (b.dequantized(saved, torch.float32) != expected).float().mean() > 0.05  # the bytes as saved would be others


@pytest.mark.parametrize("shape", [(1, 128, 128), (33, 320, 1000), (260, 130, 257)])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_sqnr(shape, scale_format, backend, dtype):
    M, N, K = shape
    least = SQNR_GEMM if dtype == torch.bfloat16 else SQNR_KERNEL_FP32
    x, w = operands(M, N, K)
    g = (torch.randn(M, N, generator=torch.Generator().manual_seed(5)) * 1e-6).to(torch.bfloat16)  # as small as real ones
    b = get_backend(backend)
    wq = b.quantize_weight(w, scale_format)
    dx = b.dgrad(g, wq, dtype)
    assert dx.dtype == dtype and sqnr(dx, g.double() @ w.double()) > SQNR_UNQUANTIZED["dgrad", scale_format]
    qg, sg = quantize.quantize_activation(g, scale_format)
    assert sqnr(dx, oracle.dgrad(qg, sg, *wq)) > least
    xq = b.quantize_activation(x, scale_format)
    dw = b.wgrad(g, xq, dtype)
    assert dw.dtype == dtype and sqnr(dw, g.double().t() @ x.double()) > SQNR_UNQUANTIZED["wgrad", scale_format]
    back = quantize.dequantize_activation(*xq, torch.bfloat16)
    exact = oracle.wgrad(*quantize.quantize_tokens(g, scale_format), *quantize.quantize_tokens(back, scale_format))
    assert sqnr(dw, exact) > least
