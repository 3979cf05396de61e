"""The FP8 KV cache of exact mode: its formula, its memory, and the attention that reads it, against FP64."""

from __future__ import annotations

import itertools

import pytest
import torch

from jetrl_patch.errors import ModelError
from jetrl_patch.exact import kv_cache, ops
from jetrl_patch.exact.trial import compare_attention

from ..fp8.thresholds import sqnr
from .test_ops import lengths_to_cu, oracle_attention, rand

BF16 = torch.bfloat16


def test_the_formula_against_fp64() -> None:
    wide = torch.randn(300, 3, 80) * torch.logspace(-12, 12, 300)[:, None, None]
    x = wide.to(BF16)
    x[5], x[6] = 0.0, -0.0
    q, scale = kv_cache.quantize(x)
    amax = x.double().abs().amax(-1).clamp(min=1e-10)
    ratio = scale.double() / (amax / 448)
    assert (torch.frexp(scale).mantissa == 0.5).all() and (ratio >= 1 - 1e-6).all() and (ratio < 2).all()
    nearest = (x.double() / scale.double().unsqueeze(-1)).to(torch.float8_e4m3fn)
    assert torch.equal(q.double(), nearest.double())
    values = kv_cache.dequantize(q, scale)
    assert torch.equal(values.double(), q.double() * scale.double().unsqueeze(-1))  # exact in BF16
    assert torch.equal(kv_cache.dequantize(q.view(torch.uint8), scale), values)
    assert torch.equal(kv_cache.dequantize(*kv_cache.quantize(values)), values)  # rounding again changes nothing
    assert sqnr(values.double(), x.double()) > 30


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    x = rand(4, 2, 64)
    x[1, 1, 7] = bad
    k, v = kv_cache.rounded(x, rand(4, 2, 64))
    assert not k[1, 1].isfinite().all() and k[1, 0].isfinite().all() and v.isfinite().all()


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 64), (5, 1, 80), (8, 2, 128)])
def test_the_rollout_reads_what_the_trainer_rounds(heads: int, kv_heads: int, width: int) -> None:
    verdict = compare_attention((heads, kv_heads), width, "cpu", lengths=(1, 33, 7, 64, 130), fp8_cache=True)
    assert verdict.ok, verdict.found


def test_value_and_gradients_with_the_quantizer() -> None:
    """The rounding passes gradients unchanged."""
    cu = lengths_to_cu([5, 40, 17])
    q, k, v = (rand(62, h, 64, seed=h + i).requires_grad_() for i, h in enumerate((6, 2, 2)))
    g = rand(62, 6, 64, seed=9)
    out = ops.attention_varlen(q, k, v, cu, 0.125, fp8=True)
    out.backward(g)

    def through(t: torch.Tensor) -> torch.Tensor:
        scale = torch.exp2(torch.ceil(torch.log2(t.detach().abs().amax(-1, keepdim=True) / 448)))
        return t + ((t.detach() / scale).to(torch.float8_e4m3fn).double() * scale - t.detach())

    q64, k64, v64 = (t.detach().double().requires_grad_() for t in (q, k, v))
    expected = oracle_attention(q64, through(k64), through(v64), cu, 0.125)
    expected.backward(g.double())
    assert sqnr(out.detach(), expected.detach()) > 48
    for ours, theirs in ((q, q64), (k, k64), (v, v64)):
        assert sqnr(ours.grad, theirs.grad) > 40


@pytest.mark.parametrize("size", [16, 48])
def test_the_memory_of_a_block(size: int) -> None:
    """Rows of bytes are aligned to 16, nothing overlaps, and every byte has a use."""
    kv_heads, width = 2, 64
    cache = torch.zeros(3, size, kv_heads * (2 * width + 8), dtype=torch.uint8)
    pages = kv_cache.Pages.of(cache, kv_heads, width)
    for number, (view, fill) in enumerate(zip(pages, (1, 2, 3.0, 4.0), strict=True)):
        assert not view.bool().any(), number
        view.fill_(fill)
        assert view.data_ptr() % 16 == cache.data_ptr() % 16
    assert all((view == fill).all() for view, fill in zip(pages, (1, 2, 3.0, 4.0), strict=True))
    written = {(view.data_ptr() - cache.data_ptr()) for view in pages}
    sizes = itertools.accumulate((0, size * kv_heads * width, size * kv_heads * width, 4 * size * kv_heads))
    assert written == set(sizes)


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(3, 16 * 2 * 136, dtype=torch.int8),
        torch.zeros(3, 16 * 2 * 128, dtype=torch.uint8),
        torch.zeros(3, 2 * 16 * 2 * 136, dtype=torch.uint8)[:, ::2],
    ],
    ids=["dtype", "size", "gaps"],
)
def test_another_memory_is_refused(cache: torch.Tensor) -> None:
    with pytest.raises(ModelError, match=r"required uint8 in dense blocks of whole tokens, 272 bytes each, found .* strides"):
        kv_cache.Pages.of(cache, 2, 64)
