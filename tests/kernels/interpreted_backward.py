"""The backward kernels of SiLU * up and RMSNorm in the interpreter: against FP64, and the bytes that they move."""

from __future__ import annotations

import pytest
import torch
import triton
from torch.nn import functional as F

from jetrl_patch.exact import dispatch, ops
from jetrl_patch.exact.elementwise import silu_mul_gradients
from jetrl_patch.kernels import norm as norm_backward
from jetrl_patch.kernels import quantize
from jetrl_patch.kernels import silu as silu_backward

from ..fp8.thresholds import KERNEL_EQUALS_ORACLE, SQNR_KERNEL_FP32, sqnr
from .traffic import Traffic

assert triton.knobs.runtime.interpret
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-6
SHAPES = [(1, 1), (5, 130), (130, 140), (40, 300), (600, 128), (70, 64), (9, 5000)]
EVERY = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)


def rand(*shape, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 2).to(BF16)


def near(found, exact):
    """In BF16 nearly all values are those of FP64, rounded; in FP32 the error is that of a few operations."""
    if found.dtype == BF16:
        return bool((found == exact.to(BF16)).float().mean() > KERNEL_EQUALS_ORACLE)
    return bool(sqnr(found, exact) > SQNR_KERNEL_FP32)


def silu_gradients_in_fp64(gate, up, dy):
    wide = [t.double().requires_grad_() for t in (gate, up)]
    return torch.autograd.grad(F.silu(wide[0]) * wide[1], wide, dy.double())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_gradients_of_silu_against_fp64(shape, dtype):
    M, K = shape
    both, dy = rand(M, 2 * K), rand(K, M, seed=1).t()  # halves of one tensor, and rows that are not contiguous
    gate, up = both[:, :K], both[:, K:]
    found = silu_backward.silu_mul_backward(gate, up, dy, (dtype, dtype))
    for ours, theirs in zip(found, silu_gradients_in_fp64(gate, up, dy)):
        assert ours.dtype == dtype and ours.is_contiguous() and near(ours, theirs)


def test_gradients_of_silu_at_every_gate():
    gate, up, dy = EVERY.view(256, 256), rand(256, 256), rand(256, 256, seed=1)
    found = silu_backward.silu_mul_backward(gate, up, dy, (BF16, BF16))
    eager = silu_mul_gradients(gate, up, dy, (BF16, BF16), kernel=False)
    finite = gate.isfinite()
    for ours, torchs, theirs in zip(found, eager, silu_gradients_in_fp64(gate, up, dy)):
        assert near(ours[finite], theirs[finite])
        assert torch.equal(ours[~finite].isnan(), torchs[~finite].isnan())


@pytest.mark.pairs
@pytest.mark.parametrize("shape", [(1, 1), (130, 140), (300, 260)])
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("bad", [None, float("nan")])
def test_gradients_of_silu_quantized_equal_two_steps(shape, scale_format, bad):
    """In BF16 and in both layouts, bit for bit, whatever the strides."""
    M, K = shape
    halves, dy = rand(M, 2 * K), rand(K, M, seed=1).t()
    if bad is not None:
        halves[M // 2, K // 2] = bad
    gate, up = halves[:, :K], halves[:, K:]
    separate = silu_backward.silu_mul_backward(gate, up, dy, (BF16, BF16))
    for columns in (False, True):
        at_once = silu_backward.silu_mul_backward_both(gate, up, dy, scale_format, columns)
        for expected, (found, layouts) in zip(separate, at_once):
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
            for ours, theirs in zip(layouts, quantize.quantize_both(expected, scale_format, columns)):
                assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.stride() == theirs.stride()
                assert torch.equal(bits(ours), bits(theirs))


def bits(t):
    return t.contiguous().view(torch.int32 if t.dtype == FP32 else torch.uint8)


def test_every_gate_quantized_equals_two_steps():
    gate, up, dy = EVERY.view(256, 256), rand(256, 256), rand(256, 256, seed=1)
    separate = silu_backward.silu_mul_backward(gate, up, dy, (BF16, BF16))
    for expected, (found, _) in zip(separate, silu_backward.silu_mul_backward_both(gate, up, dy, "pow2")):
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def norm_gradients_in_fp64(x, weight, dy):
    wide = [t.double().requires_grad_() for t in (x, weight)]
    return torch.autograd.grad(F.rms_norm(wide[0], weight.shape, wide[1], EPS), wide, dy.double())


def inverse_root(x):
    return (x.double().pow(2).mean(-1) + EPS).rsqrt().float()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_gradients_of_the_norm_against_fp64(shape, dtype):
    M, K = shape
    x, weight, dy = rand(M, 2 * K)[:, K:], rand(K, seed=2), rand(K, M, seed=1).t()
    found = norm_backward.rms_norm_backward(x, weight, inverse_root(x), dy, dtype, True)
    expected = norm_gradients_in_fp64(x, weight, dy)
    if K > 1:  # of one column the gradient is zero but for rounding
        assert found[0].dtype == dtype and near(found[0], expected[0])
    assert found[1].dtype == FP32 and sqnr(found[1], expected[1]) > SQNR_KERNEL_FP32
    alone = norm_backward.rms_norm_backward(x, weight, inverse_root(x), dy, dtype, False)
    assert alone[1] is None and torch.equal(alone[0], found[0])


def test_a_row_that_is_not_finite_stays_visible():
    x, weight, dy = rand(20, 300), rand(300), rand(20, 300, seed=1)
    x[3, 7] = float("nan")
    dx, dw = norm_backward.rms_norm_backward(x, weight, inverse_root(x), dy, BF16, True)
    assert dx[3].isnan().all() and not dx[[0, 1, 2, *range(4, 20)]].isnan().any() and dw.isnan().all()


def test_empty_batches():
    x, weight = rand(0, 300), rand(300)
    assert silu_backward.silu_mul_backward(x, x, x, (BF16, BF16))[1].shape == (0, 300)
    assert silu_backward.silu_mul_backward_both(x, x, x, "pow2")[1][1][2].shape == (300, 0)
    dx, dw = norm_backward.rms_norm_backward(x, weight, x[:, 0].float(), x, BF16, True)
    assert dx.shape == (0, 300) and torch.equal(dw, torch.zeros(300))


@pytest.fixture(params=["triton", "torch"])
def serves(request, monkeypatch):
    monkeypatch.setitem(dispatch._chosen, "cpu", request.param)
    return request.param


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_the_exact_ops_use_the_kernels(serves, dtype):
    shape = (2, 9, 260)
    x, up, dy = (rand(*shape, seed=i).to(dtype).requires_grad_() for i in range(3))
    weight = rand(260).to(dtype).requires_grad_()
    ops.silu_mul(x, up).backward(dy.detach().to(BF16))
    plain, rows = [t.detach().to(BF16).view(18, 260) for t in (x, up, dy)], (18, 260)
    if serves == "triton":
        expected = silu_backward.silu_mul_backward(*plain, (dtype, dtype))
        assert torch.equal(x.grad.view(rows), expected[0]) and torch.equal(up.grad.view(rows), expected[1])
    for ours, theirs in zip((x.grad, up.grad), silu_gradients_in_fp64(*plain)):
        assert ours.dtype == dtype and near(ours.view(rows), theirs)
    x.grad = None
    ops.rms_norm(x, weight, EPS).backward(dy.detach().to(BF16))
    w16 = weight.detach().to(BF16)
    for ours, theirs in zip((x.grad.view(rows), weight.grad), norm_gradients_in_fp64(plain[0], w16, plain[2])):
        assert ours.dtype == dtype and near(ours, theirs)
    ops.rms_norm(x, w16, EPS).sum().backward()  # a weight that is frozen


@pytest.mark.parametrize(("M", "K"), [(24, 896), (24, 4864), (160, 128)])
def test_bytes_of_an_element_and_launches(serves, M, K):
    """Backward of SiLU * up moves at most 12 bytes an element and that of the norm 10; torch's operations many times that."""
    x, up = rand(M, K).requires_grad_(), rand(M, K, seed=1).requires_grad_()
    weight, dy = rand(K).requires_grad_(), rand(M, K, seed=2)
    moved = []
    for y, wanted in ((ops.silu_mul(x, up), (x, up)), (ops.rms_norm(x, weight, EPS), (x, weight))):
        with Traffic() as counted:
            torch.autograd.grad(y, wanted, dy)
        moved.append((counted.bytes / (M * K), counted.launches))
    (silu, silu_launches), (norm, norm_launches) = moved
    if serves == "triton":
        assert silu == 10 and silu_launches == 1
        assert 6 < norm <= 10 and norm_launches <= 3  # the sums of the programs, and their dtype
    else:
        assert silu > 120 and silu_launches >= 14 and norm > 80 and norm_launches >= 14
