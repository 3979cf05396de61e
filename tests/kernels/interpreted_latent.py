"""Latent attention in Triton's interpreter: the tests of the C kernels, at the widths of DeepSeek-V3 too, and shared contexts."""

from __future__ import annotations

import pytest
import torch
import triton

from jetrl_patch.errors import ModelError
from jetrl_patch.exact import dispatch
from jetrl_patch.kernels import attention, latent

from ..exact import test_latent as tests
from ..exact.test_latent import (
    test_every_step_of_a_rollout_has_the_bits_of_training,  # noqa: F401
    test_gradients_are_those_of_the_expanded_form,  # noqa: F401
)
from ..fp8.thresholds import SQNR_ATTENTION, sqnr

assert triton.knobs.runtime.interpret
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setitem(dispatch._chosen, "cpu", "triton")
    monkeypatch.setattr(latent, "BACK_PART", 32)  # two parts


def test_parts_of_a_value_and_shared_contexts_change_no_bit(monkeypatch):
    monkeypatch.setattr(latent, "CHUNK", 32)
    monkeypatch.setattr(attention, "CHUNK", 32)
    q, cache, _ = tests.given()
    query, keys = torch.cat((q[..., : tests.P], q[..., :32]), -1), cache.unsqueeze(1)  # as wide as a key
    starts = tests.boundaries(tests.LENGTHS)
    whole, lse = latent.attention_varlen(query, keys, tests.L, starts, tests.SCALE)
    monkeypatch.setattr(latent, "PART", 32)
    parts, sums = latent.attention_varlen(query, keys, tests.L, starts, tests.SCALE)
    assert torch.equal(parts, whole) and torch.equal(sums, lse)
    page, ends = 8, starts.tolist()
    table = torch.arange(len(tests.LENGTHS) * 5, dtype=torch.int32).view(-1, 5)
    paged = torch.full((table.numel(), page, 1, tests.L + tests.R), float("nan"), dtype=torch.bfloat16)
    for r, n in enumerate(tests.LENGTHS):
        paged.view(-1, tests.L + tests.R)[r * 40 : r * 40 + n] = cache[ends[r] : ends[r] + n]
    seen = torch.tensor(tests.LENGTHS, dtype=torch.int32)
    rows, step = starts[1:].long() - 1, tests.boundaries((1,) * len(tests.LENGTHS))
    for programs in (1, 1 << 20):
        monkeypatch.setattr(attention, "PROGRAMS", programs)
        found, sums = latent.attention_paged(query[rows], paged, tests.L, table, seen, step, tests.SCALE)
        assert torch.equal(found, whole[rows]) and torch.equal(sums, lse[rows])


def test_deepseeks_widths_against_fp64():
    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(20, heads, 576, generator=generator).bfloat16() for heads in (2, 1))
    out, _ = latent.attention_varlen(q, keys, 512, tests.boundaries((20,)), 0.07)
    scores = torch.einsum("qhd,kd->hqk", q.double(), keys[:, 0].double()) * 0.07
    weights = scores.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    assert sqnr(out, torch.einsum("hqk,kd->qhd", weights, keys[:, 0, :512].double())) > SQNR_ATTENTION
    with pytest.raises(ModelError, match=r"required latents of 64, .*found 80 and 16\. Use align='linear'"):
        latent.check_widths(80, 96)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_product_of_a_token_by_head(transposed):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(70, 3, 100, generator=generator).bfloat16(), torch.randn(3, 90, 100, generator=generator).bfloat16()
    w = w.transpose(1, 2).contiguous().transpose(1, 2) if transposed else w
    y = latent.product_by_head(x, w)
    exact = torch.einsum("thk,hnk->thn", x.double(), w.double())
    assert sqnr(y, exact) > SQNR_ATTENTION and y.shape == (70, 3, 90)
    for rows in (slice(5, 6), slice(60, 70)):
        assert torch.equal(latent.product_by_head(x[rows], w), y[rows])
    assert torch.equal(latent.product_by_head(x[:, 1:], w[1:]), y[:, 1:])
