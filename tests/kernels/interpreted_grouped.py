"""The grouped products of a mixture's experts in the interpreter: against the dense products and FP64."""

from __future__ import annotations

import pytest
import torch
import triton

from jetrl_patch.backends import quantize
from jetrl_patch.kernels import gemm_backward, gemm_grouped
from jetrl_patch.kernels.gemm import fprop
from jetrl_patch.kernels.quantize import (
    quantize_rows,
    quantize_transposed,
    quantize_weight,
    quantize_weight_transposed,
    requantize_tokens,
)

from ..fp8 import oracle
from ..fp8.thresholds import SQNR_GEMM, SQNR_KERNEL_FP32, sqnr

assert triton.knobs.runtime.interpret

BF16, FP32 = torch.bfloat16, torch.float32
LEAST = {BF16: SQNR_GEMM, FP32: SQNR_KERNEL_FP32}
#: tokens of each expert
COUNTS = (1, 0, 127, 129)
#: N and K, scales, dtype of the result
CASES = [((128, 256), "pow2", BF16), ((200, 129), "fp32", FP32), ((70, 320), "pow2", FP32)]


def rand(*shape, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def routes(counts=COUNTS):
    """One expert a token, in random order."""
    ids = torch.repeat_interleave(torch.tensor(counts))
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))][:, None]


def chosen(T, k, E, seed=0):
    """k different experts of E for each of T tokens, in random order."""
    return torch.rand(T, E, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :k].contiguous()


def stack(S, N, K, scale_format="pow2"):
    return quantize_weight(rand(S, N, K, seed=S, scale=K**-0.5), scale_format)


def dense(operand, matrix, out_dtype):
    (q, s), (w, blocks) = operand, matrix
    return fprop(q, s, w, quantize.expand_weight_scale(blocks, w.shape[0]), out_dtype)


@pytest.mark.parametrize(("shape", "scale_format", "out_dtype"), CASES)
def test_rows_are_those_of_the_dense_product(shape, scale_format, out_dtype):
    (N, K), ids = shape, routes()
    x, (w, s) = quantize_rows(rand(len(ids), K), scale_format), stack(2 * len(COUNTS), N, K, scale_format)
    plan = gemm_grouped.plan(ids, len(COUNTS))
    y = gemm_grouped.grouped(*x, w, s, plan, out_dtype, tokens=True)[plan.place.long()]
    assert y.shape == (len(ids), 2 * N) and y.dtype == out_dtype
    for expert, count in enumerate(COUNTS):
        rows = ids[:, 0] == expert
        assert rows.sum() == count
        for half in (0, 1):
            found, m = y[rows, half * N : (half + 1) * N], 2 * expert + half
            assert torch.equal(found, dense([t[rows] for t in x], (w[m], s[m]), out_dtype))


def test_eight_experts_a_token():
    ids, (w, s) = chosen(33, 8, 9), stack(9, 130, 128)
    x = quantize_rows(rand(33, 128), "pow2")
    plan = gemm_grouped.plan(ids, 9)
    y = gemm_grouped.grouped(*x, w, s, plan, tokens=True)[plan.place.long()].view(33, 8, 130)
    by_position = gemm_grouped.grouped(*(t[plan.order.long() // 8] for t in x), w, s, plan)
    assert torch.equal(by_position[plan.place.long()].view(33, 8, 130), y)
    for t, j in ((0, 0), (5, 7), (32, 3)):
        m = int(ids[t, j])
        assert torch.equal(y[t, j : j + 1], dense([q[t : t + 1] for q in x], (w[m], s[m]), BF16))


def test_a_row_among_a_thousand_of_its_expert():
    x, (w, s) = quantize_rows(rand(1000, 200), "pow2"), stack(3, 64, 200)
    alone = [t[700:701] for t in x]
    expected = gemm_grouped.grouped(*alone, w, s, gemm_grouped.plan(torch.tensor([[1]]), 3), FP32)
    for experts in (torch.ones(1000, 1, dtype=torch.int64), torch.arange(1000)[:, None] % 3):
        plan = gemm_grouped.plan(experts.roll(1 - int(experts[700]), 0), 3)
        assert plan.ids[700] == 1
        y = gemm_grouped.grouped(*x, w, s, plan, FP32, tokens=True)[plan.place.long()]
        assert torch.equal(y[700:701], expected)


def test_layouts_change_nothing():
    ids, (w, s) = routes((1, 0, 40, 70)), stack(4, 140, 200)
    q, sx = quantize_rows(rand(len(ids), 200), "fp32")
    plan = gemm_grouped.plan(ids, 4)
    y = gemm_grouped.grouped(q, sx, w, s, plan, tokens=True)
    columns = quantize_rows(rand(len(ids), 200), "fp32", columns=True)
    assert columns[1].stride(0) == 1 and torch.equal(gemm_grouped.grouped(*columns, w, s, plan, tokens=True), y)
    per_row = s.repeat_interleave(128, 1)[:, :140].contiguous()
    assert torch.equal(gemm_grouped.block_view(per_row), s) and not gemm_grouped.block_view(per_row).is_contiguous()
    assert torch.equal(gemm_grouped.grouped(q, sx, w, gemm_grouped.block_view(per_row), plan, tokens=True), y)


@pytest.mark.parametrize("shape", [(128, 256), (200, 129)])
def test_a_stack_is_quantized_and_transposed_matrix_by_matrix(shape):
    w = rand(3, *shape)
    q, s = quantize_weight(w.float(), "pow2")
    transposed = gemm_grouped.transposed(q)
    assert transposed.stride(1) % 16 == 0
    beside = quantize_weight_transposed(w.float(), "pow2")
    assert torch.equal(beside[0].view(torch.uint8), q.view(torch.uint8)) and torch.equal(beside[1], s)
    assert torch.equal(beside[2].view(torch.uint8), transposed.view(torch.uint8)) and beside[2].stride() == transposed.stride()
    for one, ours, scales, other in zip(w, q, s, transposed, strict=True):
        expected = quantize_weight(one, "pow2")
        assert torch.equal(ours.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scales, expected[1])
        assert torch.equal(other.view(torch.uint8), ours.view(torch.uint8).t())


@pytest.mark.parametrize(("shape", "scale_format", "out_dtype"), CASES)
def test_dgrad(shape, scale_format, out_dtype):
    """Of one matrix an expert == the dense kernel; summed over two, FP64."""
    (N, K), ids = shape, routes()
    plan, (w, s) = gemm_grouped.plan(ids, 4), stack(8, N, K, scale_format)
    g = quantize_rows(rand(len(ids), N, scale=1e-5), scale_format)
    transposed, blocks = gemm_grouped.transposed(w), s.transpose(1, 2)
    single = gemm_grouped.grouped(*g, transposed[:4], blocks[:4], plan, out_dtype, tokens=True)[plan.place.long()]
    both = quantize_rows(rand(2 * len(ids), N, seed=2), scale_format)
    pairs = [t.view(len(ids), -1) for t in both]
    total = gemm_grouped.grouped(*pairs, transposed, blocks, plan, FP32, summed=2)
    for expert in range(4):
        rows, at = ids[:, 0] == expert, slice(*plan.offsets[expert : expert + 2].tolist())
        if not rows.any():
            continue
        own = [t[rows] for t in g]
        assert torch.equal(single[rows], gemm_backward.dgrad(*own, w[expert], s[expert], out_dtype))
        assert sqnr(single[rows], oracle.dgrad(*own, w[expert], s[expert])) > LEAST[out_dtype]
        expected = sum(
            oracle.dgrad(*(t[i::2][at] for t in both), w[2 * expert + i], s[2 * expert + i]) for i in (0, 1)
        )
        assert sqnr(total[at], expected) > SQNR_KERNEL_FP32


@pytest.mark.parametrize(("shape", "scale_format", "out_dtype"), CASES)
def test_wgrad_is_the_dense_one_over_an_experts_own_tokens(shape, scale_format, out_dtype):
    (N, K), ids = shape, routes()
    plan, T = gemm_grouped.plan(ids, 4), len(ids)
    g_TN, weights = rand(T, N, scale=1e-5), torch.rand(T, 1, generator=torch.Generator().manual_seed(9))
    x = quantize_rows(rand(T, K), scale_format)
    dw = gemm_grouped.grouped_wgrad(
        gemm_grouped.group_tokens(g_TN, plan, scale_format, weights),
        gemm_grouped.regroup(*x, plan, scale_format, True),
        plan,
        out_dtype,
    )
    order = plan.order.long()
    by_position = gemm_grouped.grouped_wgrad(
        gemm_grouped.group_tokens((weights * g_TN).to(BF16)[order], plan, scale_format),
        gemm_grouped.regroup(*(t[order] for t in x), plan, scale_format, False),
        plan,
        out_dtype,
    )
    assert dw.shape == (4, N, K) and dw.dtype == out_dtype and torch.equal(by_position, dw)
    for expert in range(4):
        rows = (ids[:, 0] == expert).nonzero()[:, 0]
        if not len(rows):
            assert (dw[expert] == 0).all()
            continue
        g = (weights[rows] * g_TN[rows]).to(BF16)
        operand = requantize_tokens(*(t[rows] for t in x), scale_format)
        expected = gemm_backward.wgrad(*quantize_transposed(g, scale_format), *operand, out_dtype)
        assert torch.equal(dw[expert], expected)
        again = quantize.dequantize_activation(*(t[rows] for t in x), BF16)
        exact = oracle.wgrad(*quantize.quantize_tokens(g, scale_format), *quantize.quantize_tokens(again, scale_format))
        assert sqnr(dw[expert], exact) > LEAST[out_dtype]


def test_wrong_operands():
    ids, (w, s) = chosen(5, 2, 4), stack(4, 64, 256)
    plan, x = gemm_grouped.plan(ids, 4), quantize_rows(rand(5, 256), "pow2")
    with pytest.raises(ValueError, match="does not fit 10 rows"):
        gemm_grouped.grouped(*x, w, s, plan)
    with pytest.raises(ValueError, match="of 4 experts"):
        gemm_grouped.grouped(*x, w[:3], s[:3], plan, tokens=True)
    with pytest.raises(ValueError, match=r"W: expected .* with FP32 scales \[4, 1, 2\]"):
        gemm_grouped.grouped(*x, w, s[:, :, :1], plan, tokens=True)
    with pytest.raises(TypeError, match="indices of experts"):
        gemm_grouped.plan(ids.float(), 4)
    with pytest.raises(ValueError, match=r"contiguous torch.float32 \[10, H\]"):
        gemm_grouped.combine(torch.zeros(5, 64), plan, None, FP32)
    operand = gemm_grouped.regroup(*x, plan, "pow2", True)
    with pytest.raises(ValueError, match="groups of this plan"):
        gemm_grouped.grouped_wgrad(operand, operand, gemm_grouped.plan(chosen(200, 2, 4), 4), FP32)
