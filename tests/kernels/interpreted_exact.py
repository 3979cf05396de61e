"""The exact ops' kernels in the interpreter: a row against itself in other batches, and values against FP64."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
from torch.nn import functional as F

from jetrl_patch.adapters.vllm.compat import paged_keys_and_values
from jetrl_patch.errors import ModelError
from jetrl_patch.exact import dispatch, kv_cache, ops
from jetrl_patch.exact.trial import compare_attention
from jetrl_patch.fp8.lora import merged_weight
from jetrl_patch.fp8.mixture import added
from jetrl_patch.kernels import attention, attention_backward, digest, elementwise, norm

from ..fp8.thresholds import KERNEL_EQUALS_ORACLE, SQNR_ATTENTION, SQNR_ATTENTION_GRADIENT, SQNR_KERNEL_FP32, sqnr

assert triton.knobs.runtime.interpret

BF16 = torch.bfloat16
LENGTHS = [1, 33, 7, 64, 81]


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def ends(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def packed(heads, kv_heads, width, lengths=LENGTHS):
    T = sum(lengths)
    return rand(T, heads, width), rand(T, kv_heads, width, seed=1), rand(T, kv_heads, width, seed=2), ends(lengths)


#: vLLM's cache: dimensions in memory -> how vLLM reorders them; P is 2 for keys and values, E is 2 * D
LAYOUTS = {
    "NSKE": (0, 2, 1, 3),  # from 0.26 on, tokens first
    "NKSE": (0, 1, 2, 3),  # heads first
    "NPSKD": (0, 1, 2, 3, 4),  # until 0.26, tokens first
    "NPKSD": (0, 1, 3, 2, 4),  # heads first
}


def paged(k, v, cu, size, seed, layout="NSKE"):
    """Caches with NaN in unused slots, as the adapter sees them in a layout of vLLM, and a table in random order."""
    kv_heads, width = k.shape[1:]
    lengths = (cu[1:] - cu[:-1]).tolist()
    needs = [-(-n // size) for n in lengths]
    order = torch.randperm(sum(needs) + 3, generator=torch.Generator().manual_seed(seed)).int()
    sizes = {"N": len(order), "P": 2, "S": size, "K": kv_heads, "D": width, "E": 2 * width}
    cache = torch.full([sizes[letter] for letter in layout], float("nan"), dtype=BF16).permute(LAYOUTS[layout])
    k_cache, v_cache = paged_keys_and_values(cache, width)
    assert k_cache.shape == v_cache.shape == (len(order), size, kv_heads, width)
    table, at = torch.full((len(lengths), max(needs) + 2), -1, dtype=torch.int32), 0
    for r, n in enumerate(lengths):
        table[r, : needs[r]] = order[at : at + needs[r]]
        at += needs[r]
        places = torch.arange(n)
        pages = table[r, places // size].long()
        k_cache[pages, places % size], v_cache[pages, places % size] = k[cu[r] : cu[r + 1]], v[cu[r] : cu[r + 1]]
    return k_cache, v_cache, table


def oracle(q, k, v, cu, scale):
    out = []
    per = q.shape[1] // k.shape[1]
    for a, b in itertools.pairwise(cu.tolist()):
        Q, K, V = (
            t[a:b].double().transpose(0, 1) for t in (q, k.repeat_interleave(per, 1), v.repeat_interleave(per, 1))
        )
        out.append(F.scaled_dot_product_attention(Q, K, V, is_causal=True, scale=scale).transpose(0, 1))
    return torch.cat(out)


HEADS = [(4, 2, 64), (7, 1, 64), (2, 2, 128), (2, 1, 256)]


@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
def test_attention_against_fp64(heads, kv_heads, width):
    q, k, v, cu = packed(heads, kv_heads, width)
    out, lse = attention.attention_varlen(q, k, v, cu, width**-0.5)
    assert sqnr(out, oracle(q, k, v, cu, width**-0.5)) > SQNR_ATTENTION
    a, b, per = 41, 105, heads // kv_heads
    s = torch.einsum("qhd,khd->qhk", q[a:b].double(), k[a:b].repeat_interleave(per, 1).double()) * width**-0.5
    s = s.masked_fill(torch.arange(64)[None, None] > torch.arange(64)[:, None, None], float("-inf"))
    assert torch.allclose(lse[a:b].double(), s.logsumexp(-1), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
@pytest.mark.parametrize(("size", "layout"), [(16, "NSKE"), (16, "NKSE"), (48, "NPSKD"), (16, "NPKSD")])
def test_decode_chunks_and_prefill_equal_training(heads, kv_heads, width, size, layout):
    q, k, v, cu = packed(heads, kv_heads, width)
    trained = attention.attention_varlen(q, k, v, cu, width**-0.5)
    k_cache, v_cache, table = paged(k, v, cu, size, seed=size, layout=layout)
    g = torch.Generator().manual_seed(4)
    for step in range(4):  # first all decode their last token, then some decode, some prefill a chunk, some wait
        seen = [n if step == 0 else int(torch.randint(1, n + 1, (1,), generator=g)) for n in LENGTHS]
        fresh = [1 if step == 0 else int(torch.randint(0, n + 1, (1,), generator=g)) for n in seen]
        rows = torch.cat(
            [torch.arange(int(cu[r]) + n - f, int(cu[r]) + n) for r, (n, f) in enumerate(zip(seen, fresh))]
        )
        seq_lens = torch.tensor(seen, dtype=torch.int32)
        found = attention.attention_paged(q[rows], k_cache, v_cache, table, seq_lens, ends(fresh), width**-0.5)
        assert all(torch.equal(f, t[rows]) for f, t in zip(found, trained))


@pytest.mark.parametrize("width", attention.HEAD_DIMS)
def test_an_fp8_cache_holds_what_the_reference_rounds(width):
    k, v = (rand(50, 3, width, seed=seed) * torch.logspace(-12, 12, 50)[:, None, None].to(BF16) for seed in (1, 2))
    k[5], k[6], v[7, 1, 3], v[8, 0, 2] = 0.0, -0.0, float("nan"), float("inf")
    strided = torch.stack((k, v), 1)  # as parts of a projection
    expected = [kv_cache.dequantize(*kv_cache.quantize(t)) for t in (k, v)]
    raw = torch.zeros(4, 16 * 3 * (2 * width + 8), dtype=torch.uint8)
    cache, slots = kv_cache.Pages.of(raw, 3, width), torch.randperm(64, generator=torch.Generator().manual_seed(0))[:50]
    slots[9] = -1
    cache.store(strided[:, 0], strided[:, 1], slots)
    stored = [kv_cache.dequantize(q, s).flatten(0, 1)[slots] for q, s in zip(cache[:2], cache[2:])]
    for found, read, value in zip(kv_cache.rounded(strided[:, 0], strided[:, 1]), stored, expected):
        assert same_values(found, value) and same_values(read[slots >= 0], value[slots >= 0])


def same_values(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0).view(torch.int16), b.nan_to_num(0).view(torch.int16))


@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
def test_decode_chunks_and_prefill_from_an_fp8_cache_equal_training(heads, kv_heads, width):
    verdict = compare_attention((heads, kv_heads), width, "cpu", 16, tuple(LENGTHS), fp8_cache=True, large=((1,) * 40,))
    assert verdict.ok, verdict.found


def test_an_fp8_cache_that_rounds_otherwise_is_found(monkeypatch):
    original = kv_cache.Pages.store
    monkeypatch.setattr(kv_cache.Pages, "store", lambda self, k, v, slots: original(self, k * 1.01, v, slots))
    verdict = compare_attention((4, 2), 64, "cpu", 16, (1, 33), fp8_cache=True)
    assert not verdict.ok and "differ between a decode step" in verdict.found


def test_a_graphs_padding_changes_nothing():
    """A captured decoding step has padding: requests of length zero, with arbitrary pages."""
    q, k, v, cu = packed(4, 2, 64)
    k_cache, v_cache, table = paged(k, v, cu, 16, seed=3)
    rows, seen = cu[1:].long() - 1, torch.tensor(LENGTHS, dtype=torch.int32)
    real = len(seen)
    expected = attention.attention_paged(q[rows], k_cache, v_cache, table, seen, ends([1] * real), 0.125)
    for more in (1, 5):
        tokens = torch.cat((q[rows], torch.full((more, 4, 64), float("nan"), dtype=BF16)))
        starts = torch.cat((ends([1] * real), torch.full((more,), real, dtype=torch.int32)))
        lengths = torch.cat((seen, torch.zeros(more, dtype=torch.int32)))
        pages = torch.cat((table, table[:1].repeat(more, 1)))
        found = attention.attention_paged(tokens, k_cache, v_cache, pages, lengths, starts, 0.125)
        assert all(torch.equal(f[:real], e) for f, e in zip(found, expected))


def test_rows_are_written_where_vllm_wants_them():
    q, k, v, cu = packed(4, 2, 64)
    k_cache, v_cache, table = paged(k, v, cu, 16, seed=3)
    rows, seen = cu[1:].long() - 1, torch.tensor(LENGTHS, dtype=torch.int32)
    real = len(seen)
    step = q[rows], k_cache, v_cache, table, seen, ends([1] * real), 0.125
    output = torch.full((real + 2, 4, 64), 7.0, dtype=BF16)  # vLLM's buffer holds padding too
    found = attention.attention_paged(*step, output[:real])[0]
    assert found.data_ptr() == output.data_ptr() and torch.equal(output[:real], attention.attention_paged(*step)[0])
    assert (output[real:] == 7.0).all()
    with pytest.raises(ValueError, match="out must be contiguous BF16"):
        attention.attention_paged(*step, torch.empty(real, 4, 64))


def test_other_neighbours_change_nothing():
    q, k, v, cu = packed(7, 1, 64)
    whole = attention.attention_varlen(q, k, v, cu, 0.125)
    for r in (1, 4):  # alone, and after another sequence
        part = slice(int(cu[r]), int(cu[r + 1]))
        n = part.stop - part.start
        for before in (0, 3):
            other = rand(before, 7, 64, seed=9), rand(before, 1, 64, seed=8), rand(before, 1, 64, seed=7)
            args = [torch.cat((o, t[part])) for o, t in zip(other, (q, k, v))]
            found = attention.attention_varlen(*args, ends([before, n] if before else [n]), 0.125)
            assert all(torch.equal(f[before:], w[part]) for f, w in zip(found, whole))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_hold_some_heads_compute_the_same_bits(ranks):
    """Sequence parallelism; of four ranks, two need the same key/value head, so fewer rows share a tile."""
    q, k, v, cu = packed(4, 2, 64, [1, 33, 40])
    whole = attention.attention_varlen(q, k, v, cu, 0.125)
    k, v = (t.repeat_interleave(ranks // 2, 1) for t in (k, v))
    for parts in zip(*(t.chunk(ranks, 1) for t in (q, k, v, *whole)), strict=True):
        *inputs, out, lse = parts
        found = attention.attention_varlen(*(t.contiguous() for t in inputs), cu, 0.125)
        assert torch.equal(found[0], out) and torch.equal(found[1], lse)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
def test_gradients_of_attention_against_fp64(heads, kv_heads, width):
    gradients_against_fp64(width, *packed(heads, kv_heads, width))


def gradients_against_fp64(width, q, k, v, cu):
    out, lse = attention.attention_varlen(q, k, v, cu, width**-0.5)
    g = rand(*q.shape, seed=5)
    found = attention_backward.attention_backward(q, k, v, out, lse, g, cu, width**-0.5)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    oracle(*wide, cu, width**-0.5).backward(g.double())
    for ours, theirs in zip(found, wide):
        assert sqnr(ours, theirs.grad) > SQNR_ATTENTION_GRADIENT


@pytest.fixture
def kernels(monkeypatch):
    """Make the public ops use the Triton kernels on CPU tensors."""
    monkeypatch.setitem(dispatch._chosen, "cpu", "triton")
    return ops


@pytest.mark.parametrize("width", [64, 500])
def test_rows_of_the_other_ops_depend_on_themselves_alone(kernels, width):
    x, w = rand(140, width), rand(130, width, seed=1)
    cos, sin = ops.rotary_table(1.0 / 10000 ** (torch.arange(0, 64, 2) / 64), 100)
    places = torch.arange(20)
    heads = rand(20, 5, 64, seed=2)
    calls = {  # with the rows of the whole batch: the product's tile has 128, SiLU's 8, the others' one
        "norm": (20, lambda rows: ops.rms_norm(x[rows], w[0], 1e-6)),
        "silu": (20, lambda rows: ops.silu_mul(x[rows], x[rows].flip(1))),
        "head": (140, lambda rows: ops.linear(x[rows], w)),
        "rope": (20, lambda rows: ops.apply_rotary(heads[rows], cos, sin, places[rows])),
    }
    for name, (total, call) in calls.items():
        whole = call(slice(0, total))
        for rows in (slice(0, 1), slice(total - 1, total), slice(5, 12), slice(total - 15, total - 2)):
            assert torch.equal(call(rows), whole[rows]), (name, rows)


def test_values_of_the_other_ops(kernels):
    x, w = rand(40, 1000), rand(130, 1000, seed=1)
    exact = x.double()
    rstd = (exact.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt().float()
    assert torch.equal(ops.rms_norm(x, w[0], 1e-6), w[0] * (x.float() * rstd).to(BF16))
    assert torch.equal(ops.silu_mul(x, x.flip(1)), F.silu(exact).to(BF16) * x.flip(1))
    assert (ops.linear(x, w) == (exact @ w.double().t()).to(BF16)).float().mean() > KERNEL_EQUALS_ORACLE
    assert sqnr(ops.partial_sum(x, w), exact @ w.double().t()) > SQNR_KERNEL_FP32
    halves = [
        ops.partial_sum(x[:, part].contiguous(), w[:, part].contiguous()) for part in (slice(0, 500), slice(500, 1000))
    ]
    assert torch.equal(ops.linear(x, w, None, 2), (halves[0] + halves[1]).to(BF16))  # what tensor-parallel ranks add


@pytest.mark.parametrize("width", [64, 128])
def test_rotary_is_hugging_faces(kernels, width):
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    q, k = rand(30, 6, width), rand(30, 17, width, seed=1)
    cos, sin = ops.rotary_table(1.0 / 10000 ** (torch.arange(0, width, 2) / width), 100)
    positions = torch.randint(0, 100, (30,), generator=torch.Generator().manual_seed(0))
    c, s = (torch.cat((t, t), -1)[positions][None] for t in (cos, sin))
    for x in (q, k):
        hf = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], c, s)[0][0].transpose(0, 1)
        assert torch.equal(ops.apply_rotary(x, cos, sin, positions), hf)
        strided = torch.cat((x, x), 1)[:, : x.shape[1]]  # a slice of a fused projection
        assert torch.equal(ops.apply_rotary(strided, cos, sin, positions), hf)


def test_the_differentiable_ops_use_the_kernels(kernels):
    q, k, v, cu = packed(4, 2, 64, [5, 40])
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    g = rand(45, 4, 64, seed=6)
    out = ops.attention_varlen(q, k, v, cu, 0.125)
    out.backward(g)
    plain, lse = attention.attention_varlen(q.detach(), k.detach(), v.detach(), cu, 0.125)
    assert torch.equal(out, plain)
    expected = attention_backward.attention_backward(q.detach(), k.detach(), v.detach(), plain, lse, g, cu, 0.125)
    assert all(torch.equal(t.grad, e) for t, e in zip((q, k, v), expected))


@pytest.mark.parametrize(("N", "K", "R"), [(1, 1, 1), (130, 260, 8), (33, 128, 64)])
def test_the_merged_weight_of_lora_is_the_formula(N, K, R):
    w, a, b = rand(N, K), rand(R, K, seed=1), rand(N, R, seed=2)
    assert torch.equal(elementwise.merged_weight(w, a, b, 0.3), merged_weight(w, a, b, 0.3))


def test_what_has_no_kernel_is_refused():
    q, k = rand(3, 2, 80), rand(3, 1, 80)
    with pytest.raises(ModelError, match=r"head dimension 64, 128, 256, found 80. Use align='linear'"):
        attention.attention_varlen(q, k, k, ends([3]), 1.0)
    with pytest.raises(ModelError, match="RMSNorm up to width 16384"):
        norm.rms_norm(rand(1, 16500), rand(16500), 1e-6)


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 5, 300), (4, 7, 1000), (3, 0, 8), (8, 3, 16)])
def test_ranks_are_added_in_order(shape):
    parts = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(shape[0])[:, None, None]
    found = digest.rank_sum(parts)
    assert torch.equal(found, added(parts)) and torch.equal(found, digest.rank_sum(parts.mT.contiguous().mT))
    order = torch.tensor([2.0**24, 1.0, -(2.0**24)]).view(3, 1, 1)
    assert digest.rank_sum(order).item() == 0 and digest.rank_sum(order.flip(0)).item() == 1
    assert digest.rank_sum(order * torch.nan).isnan()
    with pytest.raises(TypeError, match=r"must be torch\.float32, found torch\.bfloat16"):
        digest.rank_sum(parts.bfloat16())
