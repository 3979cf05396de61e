"""Attention whose contexts are shared among programs, in the interpreter: bit-equal to one program, and so to training."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from jetrl_patch.kernels import attention

from ..fp8.thresholds import SQNR_ATTENTION, sqnr
from .interpreted_exact import ends, gradients_against_fp64, oracle, packed, paged

assert triton.knobs.runtime.interpret

#: around the borders of chunks of 64 and 128, and several chunks
LENGTHS = [1, 65, 129, 64]


@pytest.fixture
def launched(monkeypatch):
    """How many programs shared a context, launch by launch."""
    counts, original = [], attention.splits
    monkeypatch.setattr(attention, "splits", lambda *sizes: counts.append(original(*sizes)) or counts[-1])
    return counts


def shared_by(programs, monkeypatch):
    monkeypatch.setattr(attention, "splits", lambda *sizes: programs)


def served(q, cache, cu, seen, fresh, width):
    """Rows of a step whose request r has ``seen[r]`` keys, the last ``fresh[r]`` of them queried, and their results."""
    rows = torch.cat([torch.arange(int(cu[r]) + n - f, int(cu[r]) + n) for r, (n, f) in enumerate(zip(seen, fresh))])
    k_cache, v_cache, table = cache
    lengths = torch.tensor(seen, dtype=torch.int32)
    return rows, attention.attention_paged(q[rows], k_cache, v_cache, table, lengths, ends(fresh), width**-0.5)


@pytest.mark.parametrize(("chunk", "heads", "kv_heads", "width"), [(128, 2, 1, 64), (64, 1, 1, 128)])
def test_rows_are_equal_however_many_programs_share_a_context(chunk, heads, kv_heads, width, monkeypatch):
    monkeypatch.setattr(attention, "CHUNK", chunk)
    q, k, v, cu = packed(heads, kv_heads, width, LENGTHS)
    trained = attention.attention_varlen(q, k, v, cu, width**-0.5)
    assert sqnr(trained[0], oracle(q, k, v, cu, width**-0.5)) > SQNR_ATTENTION
    cache = paged(k, v, cu, 16, seed=1)
    most = attention.chunks_of(cache[2].shape[1] * 16)
    assert most == {128: 2, 64: 3}[chunk]
    steps = {
        "decode": (LENGTHS, [1] * 4, range(1, most + 1)),  # one for a context, some, and one for a chunk
        "chunks that begin in a context": (LENGTHS, [1, 20, 90, 0], (1, most)),
        "some wait": ([1, 64, 128, 1], [0, 1, 3, 1], (most,)),
    }
    for seen, fresh, counts in steps.values():
        for programs in counts:
            shared_by(programs, monkeypatch)
            rows, found = served(q, cache, cu, seen, fresh, width)
            assert all(torch.equal(f, t[rows]) for f, t in zip(found, trained))


def test_a_graphs_padding_changes_nothing_where_programs_share_contexts(monkeypatch, launched):
    monkeypatch.setattr(attention, "CHUNK", 64)
    q, k, v, cu = packed(2, 1, 64, [70, 130])
    k_cache, v_cache, table = paged(k, v, cu, 16, seed=3)
    rows = cu[1:].long() - 1
    expected = [t[rows] for t in attention.attention_varlen(q, k, v, cu, 0.125)]
    tokens = torch.cat((q[rows], torch.full((3, 2, 64), float("nan"), dtype=q.dtype)))
    starts = torch.tensor([0, 1, 2, 2, 2, 2], dtype=torch.int32)
    lengths = torch.tensor([70, 130, 0, 0, 0], dtype=torch.int32)
    table = torch.cat((table, table[:1].repeat(3, 1)))
    found = attention.attention_paged(tokens, k_cache, v_cache, table, lengths, starts, 0.125)
    assert launched[-1] > 1 and all(torch.equal(f[:2], e) for f, e in zip(found, expected))


@triton.jit
def each_normalized(top, total, acc, chunk_top, chunk_total, chunk_acc):
    """The same sum by another formula, that of split kernels elsewhere: chunks are normalized before they are weighted."""
    new = tl.maximum(top, chunk_top)
    kept = total * tl.exp2(top - new)
    added = chunk_total * tl.exp2(chunk_top - new)
    before = acc * tl.math.div_rn(1.0, tl.where(total == 0.0, 1.0, total))[:, None]
    now = chunk_acc * tl.math.div_rn(1.0, tl.where(chunk_total == 0.0, 1.0, chunk_total))[:, None]
    return new, kept + added, before * kept[:, None] + now * added[:, None]


@pytest.mark.parametrize("other", ["formula", "order"])
def test_another_formula_or_order_gives_other_bits(other, monkeypatch):
    """What the tests above would see."""
    monkeypatch.setattr(attention, "CHUNK", 64)
    lengths = [256]
    q, k, v, cu = packed(2, 1, 64, lengths)
    out, lse = attention.attention_varlen(q, k, v, cu, 0.125)
    if other == "formula":
        monkeypatch.setattr(attention, "combine", each_normalized)
    else:
        original = attention.combine_chunks
        monkeypatch.setattr(
            attention, "combine_chunks", lambda sums, ends, *a: original(*flipped(sums, ends), *a)
        )
    k_cache, v_cache, table = paged(k, v, cu, 16, seed=1)
    rows, found = served(q, (k_cache, v_cache, table[:, :16].contiguous()), cu, lengths, [64], 64)
    assert not torch.equal(found[1], lse[rows]) and torch.allclose(found[1], lse[rows], atol=1e-5)
    assert sqnr(found[0], out[rows].double()) > SQNR_ATTENTION


def flipped(*states):
    assert all(len(t) == 4 for t in states)  # every row sees all
    return [t.flip(0) for t in states]


def test_gradients_over_several_chunks_against_fp64(monkeypatch):
    monkeypatch.setattr(attention, "CHUNK", 64)
    gradients_against_fp64(64, *packed(2, 1, 64, [1, 130]))


def test_what_is_stored_is_bounded(monkeypatch):
    """Qwen3-8B with room for 32,768 tokens: 32 chunks."""
    sizes = 32, 128, 32768
    sums, ends = attention.workspace(torch.zeros(64, 32, 128), 32768)
    assert sums.nbytes + ends.nbytes == 4 * 32 * 64 * 32 * 130
    assert attention.splits(8, 1, *sizes) == 32
    assert attention.splits(272, 32, *sizes) == 1056 // 272 and attention.splits(272, 32, 32, 64, 32768) == 2112 // 272
    assert attention.splits(8, 127, *sizes) == 1  # more than 64 MiB
    assert attention.splits(4096, 1, *sizes) == 1  # they fill the GPU
    assert attention.splits(8, 1, 32, 128, 1024) == attention.splits(8, 1, 32, 128, 0) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("width", [64, 128])
def test_contexts_of_8192_keys_in_chunks_of_1024(width, launched):
    assert attention.CHUNK == 1024
    lengths = [8192, 1025]
    q, k, v, cu = packed(1, 1, width, lengths)
    trained = attention.attention_varlen(q, k, v, cu, width**-0.5)
    cache = paged(k, v, cu, 16, seed=1)
    for seen, fresh in ((lengths, [1, 1]), ([5121, 1024], [1, 1]), ([4100, 1025], [70, 3])):
        rows, found = served(q, cache, cu, seen, fresh, width)
        assert launched[-1] > 1 and all(torch.equal(f, t[rows]) for f, t in zip(found, trained))
