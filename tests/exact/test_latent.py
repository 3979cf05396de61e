"""Latent attention in the absorbed form: one form for prefills, chunks and decoding, and gradients of the expanded one."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from jetrl_patch.errors import ModelError
from jetrl_patch.exact import ops
from jetrl_patch.exact.latent import check_latent, into_latent, out_of_latent

from ..fp8.thresholds import sqnr

#: ``tests/kernels/interpreted_latent.py`` runs some of these tests with the Triton kernels
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: heads; widths of a head without rotary part, of the rotary part, of the latent, of a value; and lengths of the sequences
H, P, R, L, V = (3, 48, 16, 64, 40) if INTERPRETED else (3, 48, 16, 80, 40)
LENGTHS = (1, 33, 40) if INTERPRETED else (1, 33, 70)
SCALE = (P + R) ** -0.5


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def boundaries(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def trained(q: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """q [T, H, P + R], latents and rotated keys [T, L + R] -> [T, H, V], as in the trainer."""
    query = torch.cat((into_latent(q[..., :P], weight), q[..., P:]), -1)
    keys = cache.unsqueeze(1)
    out = ops.attention_varlen(query, keys, keys[..., :L], boundaries(lengths), SCALE)
    return out_of_latent(out, weight, V)


def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    T = sum(LENGTHS)
    return rand(T, H, P + R), rand(T, L + R, seed=1), rand(H * (P + V), L, seed=2) * L**-0.5


@pytest.mark.parametrize("fresh", [1, 7, 70], ids=["decoding", "chunks", "prefills"])
def test_every_step_of_a_rollout_has_the_bits_of_training(fresh: int) -> None:
    q, cache, weight = given()
    expected, page = trained(q, cache, weight, LENGTHS), 16
    starts = boundaries(LENGTHS).tolist()
    pages = [-(-n // page) for n in LENGTHS]
    paged = torch.full((sum(pages) * page, L + R), float("nan"), dtype=torch.bfloat16)
    table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
    for r, n in enumerate(LENGTHS):
        first = sum(pages[r + 1 :])  # in descending order of requests
        table[r, : pages[r]] = torch.arange(first, first + pages[r])
        paged[first * page : first * page + n] = cache[starts[r] : starts[r] + n]
    keys = paged.view(-1, page, 1, L + R)
    for end in range(1, max(LENGTHS) + 1, fresh):
        seen = [min(n, end + fresh - 1) for n in LENGTHS]
        new = [min(fresh, n) for n in seen]
        rows = torch.cat([torch.arange(a + n - k, a + n) for a, n, k in zip(starts, seen, new)])
        query = torch.cat((into_latent(q[rows, :, :P], weight), q[rows, :, P:]), -1)
        where = (table, torch.tensor(seen, dtype=torch.int32), boundaries(tuple(new)))
        out = out_of_latent(ops.attention_paged(query, keys, keys[..., :L], *where, SCALE), weight, V)
        assert torch.equal(out, expected[rows])


def test_gradients_are_those_of_the_expanded_form() -> None:
    q, cache, weight = (t.requires_grad_() for t in given())
    q64, cache64, weight64 = (t.detach().double().requires_grad_() for t in (q, cache, weight))
    y = trained(q, cache, weight, LENGTHS)
    keys, values = (cache64[:, :L] @ weight64.t()).unflatten(1, (H, P + V)).split([P, V], -1)
    keys = torch.cat((keys, cache64[:, None, L:].expand(-1, H, -1)), -1)
    pieces = []
    for a, b in zip(boundaries(LENGTHS).tolist(), boundaries(LENGTHS).tolist()[1:]):
        scores = torch.einsum("qhd,khd->hqk", q64[a:b], keys[a:b]) * SCALE
        later = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
        pieces.append(torch.einsum("hqk,khv->qhv", scores.masked_fill(later, float("-inf")).softmax(-1), values[a:b]))
    expected = torch.cat(pieces)
    g = rand(*y.shape, seed=3)
    y.backward(g)
    expected.backward(g.double())
    assert sqnr(y.detach(), expected.detach()) > 42
    for ours, theirs in ((q, q64), (cache, cache64), (weight, weight64)):
        assert sqnr(ours.grad, theirs.grad) > 40


def test_a_product_does_not_depend_on_other_tokens_or_heads() -> None:
    T, H, P, L, V = 300, 3, 128, 512, 128  # sizes for which torch's BF16 product has several kernels
    q, weight = rand(T, H, P), rand(H * (P + V), L, seed=2) * L**-0.5
    whole = into_latent(q, weight)
    out = out_of_latent(whole, weight, V)
    assert out.shape == (T, H, V)
    for rows in (slice(5, 6), slice(7, 40)):
        assert torch.equal(into_latent(q[rows], weight), whole[rows])
        assert torch.equal(out_of_latent(whole[rows], weight, V), out[rows])
    part = weight.unflatten(0, (H, P + V))[1:].flatten(0, 1)  # a rank of a rollout holds some of the heads
    assert torch.equal(into_latent(q[:, 1:], part), whole[:, 1:])
    assert torch.equal(out_of_latent(whole[:, 1:], part, V), out[:, 1:])


def test_widths_without_kernels_and_an_fp8_cache_are_refused() -> None:
    config = SimpleNamespace(model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64)
    check_latent(config, "auto", "cpu"), check_latent(config, "auto", "cuda")
    check_latent(SimpleNamespace(model_type="qwen3"), "fp8", "cuda")
    for device, backend in (("cuda", "torch"), ("npu", "auto")):
        with pytest.raises(ModelError, match=rf"'deepseek_v3': required a CPU, or .*found {device} with .*Use align=\"linear\""):
            check_latent(config, "auto", device, backend)
    narrow = SimpleNamespace(model_type="deepseek_v3", kv_lora_rank=96, qk_rope_head_dim=64)
    with pytest.raises(ModelError, match=r"required latents of 64, 128, 256, 512 .*found 96 and 64\. Use align='linear'"):
        check_latent(narrow, "auto", "cuda")
    with pytest.raises(ModelError, match=r"required a BF16 cache \(.*found kv_cache='fp8'\. Drop kv_cache"):
        check_latent(config, "fp8")
