"""Every exact op: a row's bits do not depend on the batch, and value and gradient are correct."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from jetrl_patch.exact import ops

from ..dispatched import dispatched
from ..fp8.thresholds import sqnr

BF16 = torch.bfloat16


@pytest.fixture(params=["native", "torch"], autouse=True)
def backend(request):
    with dispatched(request.param):
        yield request.param


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


ROWWISE = {
    "rms_norm": lambda x, w: ops.rms_norm(x, w[0, : x.shape[1]], 1e-6),
    "silu_mul": lambda x, w: ops.silu_mul(x, x.flip(1)),
    "linear": lambda x, w: ops.linear(x, w),
    "linear_splits": lambda x, w: ops.linear(x, w, w[:, 0], splits=2),
    "token_log_probs": lambda x, w: ops.token_log_probs(x, torch.arange(x.shape[0]) % 5, 0.7),
}


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize("width", [64, 320, 1000])
def test_a_row_depends_on_itself_alone(name, width):
    x, w = rand(257, width), rand(130, width, seed=1)
    whole = ROWWISE[name](x, w)
    for size, start in [(1, 0), (1, 256), (7, 5), (32, 100), (193, 64)]:
        if name == "token_log_probs":
            labels = torch.arange(257)[start : start + size] % 5
            part = ops.token_log_probs(x[start : start + size], labels, 0.7)
        else:
            part = ROWWISE[name](x[start : start + size], w)
        assert torch.equal(part, whole[start : start + size])


@pytest.mark.parametrize("width", [64, 320, 1000])
def test_norm_is_hugging_faces(width):
    x, w = rand(50, width), rand(width, seed=2)
    xf = x.float()
    hf = w * (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + 1e-6)).to(BF16)
    equal = (ops.rms_norm(x, w, 1e-6) == hf).float().mean()
    assert equal > 0.995  # only the sum of squares may round differently


def test_silu_mul_is_hugging_faces():
    gate = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    gate = gate[torch.isfinite(gate)]
    for up in (torch.ones_like(gate), rand(len(gate))):  # the product with the second shows where the sigmoid is rounded
        ours, hf = ops.silu_mul(gate, up), F.silu(gate.double()).to(BF16) * up
        assert (ours == hf).float().mean() > 0.999
    assert torch.isnan(ops.silu_mul(torch.tensor([float("nan")], dtype=BF16), torch.ones(1, dtype=BF16))).all()


def test_rotary_is_hugging_faces():
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    q, k = rand(30, 6, 64), rand(30, 2, 64, seed=1)
    cos, sin = ops.rotary_table(1.0 / 10000 ** (torch.arange(0, 64, 2) / 64), 100)
    positions = torch.randint(0, 100, (30,), generator=torch.Generator().manual_seed(0))
    c, s = (torch.cat((t, t), -1)[positions][None] for t in (cos, sin))
    hf_q, hf_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], c, s)
    assert torch.equal(ops.apply_rotary(q, cos, sin, positions), hf_q[0].transpose(0, 1))
    assert torch.equal(ops.apply_rotary(k, cos, sin, positions), hf_k[0].transpose(0, 1))


ROPES = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096, "beta_slow": 2},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False},
    {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096,
        "mscale": 1.0, "mscale_all_dim": 0.707,
    },
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: r["rope_type"])
def test_frequencies_are_hugging_faces(rope):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=dict(rope), max_position_embeddings=16384)
    module = LlamaRotaryEmbedding(config)
    assert torch.equal(ops.rope_frequencies(config), module.inv_freq)
    positions = torch.arange(0, 16384, 37)[None]
    cos, sin = module(torch.zeros(1, dtype=BF16), positions)
    tables = ops.rotary_table(module.inv_freq, 16384, ops.rope_magnitude(config))
    ours = [torch.cat((t, t), -1)[positions] for t in tables]
    assert (ours[0] == cos).float().mean() > 0.9999 and (ours[1] == sin).float().mean() > 0.9999


def lengths_to_cu(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 64), (5, 1, 80), (3, 3, 16), (8, 2, 128)])
def test_prefill_chunks_and_decode_equal_training(heads, kv_heads, width):
    lengths = [1, 33, 7, 64, 130]
    cu = lengths_to_cu(lengths)
    T = int(cu[-1])
    q, k, v = rand(T, heads, width), rand(T, kv_heads, width, seed=1), rand(T, kv_heads, width, seed=2)
    trained = ops.attention_varlen(q, k, v, cu, width**-0.5)
    size, blocks = 16, 40
    cache = torch.full((blocks, kv_heads, size, 2 * width), float("nan"), dtype=BF16)  # another layout, holes poisoned
    k_cache, v_cache = cache[..., :width].transpose(1, 2), cache[..., width:].transpose(1, 2)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).int()
    tables, at = [], 0
    for r, n in enumerate(lengths):
        need = -(-n // size)
        table = order[at : at + need]
        at += need
        for j in range(n):
            k_cache[table[j // size], j % size] = k[cu[r] + j]
            v_cache[table[j // size], j % size] = v[cu[r] + j]
        tables.append(F.pad(table, (0, 12 - need)))
    table = torch.stack(tables)
    generator = torch.Generator().manual_seed(4)
    for _ in range(6):  # requests decode, prefill a chunk or wait
        seen = torch.tensor([int(torch.randint(1, n + 1, (1,), generator=generator)) for n in lengths])
        fresh = torch.tensor([int(torch.randint(0, int(n) + 1, (1,), generator=generator)) for n in seen])
        rows = torch.cat([torch.arange(int(cu[r] + seen[r] - fresh[r]), int(cu[r] + seen[r])) for r in range(len(lengths))])
        start = lengths_to_cu(fresh.tolist())
        step = (q[rows], k_cache, v_cache, table, seen.int(), start, width**-0.5)
        assert torch.equal(ops.attention_paged(*step), trained[rows])
        out = torch.full_like(q[rows], float("nan"))  # as an engine passes it
        assert ops.attention_paged(*step, out=out) is out and torch.equal(out, trained[rows])
    for r in range(len(lengths)):  # alone in the batch
        part = slice(int(cu[r]), int(cu[r + 1]))
        alone = ops.attention_varlen(q[part], k[part], v[part], lengths_to_cu([lengths[r]]), width**-0.5)
        assert torch.equal(alone, trained[part])


def oracle_attention(q, k, v, cu, scale):
    out = []
    per = q.shape[1] // k.shape[1]
    for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        Q, K, V = (t[a:b].transpose(0, 1) for t in (q, k.repeat_interleave(per, 1), v.repeat_interleave(per, 1)))
        out.append(F.scaled_dot_product_attention(Q, K, V, is_causal=True, scale=scale).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("batched", [True, False])
def test_attention_value_and_gradients(batched, monkeypatch):
    if not batched:
        monkeypatch.setattr("jetrl_patch.exact.attention._BATCHED_SCORES", 0)
    cu = lengths_to_cu([5, 40, 17])
    q, k, v = (rand(62, h, 64, seed=h + i).requires_grad_() for i, h in enumerate((6, 2, 2)))
    g = rand(62, 6, 64, seed=9)
    out = ops.attention_varlen(q, k, v, cu, 0.125)
    out.backward(g)
    q64, k64, v64 = (t.detach().double().requires_grad_() for t in (q, k, v))
    expected = oracle_attention(q64, k64, v64, cu, 0.125)
    expected.backward(g.double())
    assert sqnr(out.detach(), expected.detach()) > 48
    for ours, theirs in ((q, q64), (k, k64), (v, v64)):
        assert sqnr(ours.grad, theirs.grad) > 40


def test_ranges_of_k_are_added_in_ascending_order():
    """(2^24 + 1) - 2^24 is 0 in FP32, and 1 in the other order."""
    w = torch.tensor([[2.0**24, 1.0, -(2.0**24)], [-(2.0**24), 1.0, 2.0**24]]).repeat_interleave(32, 1) / 32
    assert ops.linear(torch.ones(3, 96, dtype=torch.bfloat16), w.bfloat16(), None, 3).tolist() == [[0.0, 1.0]] * 3


@pytest.mark.parametrize(
    ("name", "function", "oracle"),
    [
        ("norm", lambda x, w: ops.rms_norm(x, w[0], 1e-6), lambda x, w: F.rms_norm(x, x.shape[1:], w[0], 1e-6)),
        ("silu", lambda x, w: ops.silu_mul(x, x * 2), lambda x, w: F.silu(x) * x * 2),
        ("head", ops.linear, lambda x, w: x @ w.t()),
        ("splits", lambda x, w: ops.linear(x, w, None, 2), lambda x, w: x @ w.t()),
        (
            "log-prob",
            lambda x, w: ops.token_log_probs(x, torch.arange(20), 0.8),
            lambda x, w: torch.log_softmax(x / 0.8, -1)[range(20), range(20)],
        ),
    ],
)  # fmt: skip
def test_gradients(name, function, oracle):
    x, w = rand(20, 320).requires_grad_(), rand(70, 320, seed=1).requires_grad_()
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    y, expected = function(x, w), oracle(x64, w64)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y.dtype)
    y.backward(g)
    expected.backward(g.double())
    assert sqnr(y.detach(), expected.detach()) > 42
    assert sqnr(x.grad, x64.grad) > 40
    if w64.grad is not None:
        assert sqnr(w.grad, w64.grad) > 40


def test_log_probs_are_vllms_formula():
    logits, labels = rand(40, 300), torch.arange(40)
    for temperature in (1.0, 0.7, torch.full((40, 1), 1.3)):
        expected = logits.float().div(temperature).log_softmax(-1, dtype=torch.float32)[torch.arange(40), labels]
        assert torch.equal(ops.token_log_probs(logits, labels, temperature), expected)
