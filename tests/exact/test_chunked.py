"""Log-probs by chunks: the same bits as with whole logits for any chunk size, and their gradients."""

from __future__ import annotations

import functools

import pytest
import torch

from jetrl_patch.exact import logprob, ops
from jetrl_patch.exact.logprob import chunked_log_probs
from tests.fp8.thresholds import SQNR_GEMM, SQNR_KERNEL_FP32, sqnr

T, K, V = 37, 64, 384


@pytest.fixture
def given():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, K, generator=generator).to(torch.bfloat16)
    weight = torch.randn(V, K, generator=generator).mul(0.3)
    return hidden, weight, torch.randint(V, (T,), generator=generator)


def whole(hidden, weight, labels, temperature):
    """The unfused path: all logits at once, differentiated by autograd."""
    every = torch.log_softmax(ops.linear(hidden, weight).float() / temperature, -1)
    return every.gather(-1, labels[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("head", [ops.linear, ops.head_linear_fp32])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_bits_do_not_depend_on_the_chunk(given, head, temperature):
    hidden, weight, labels = given
    expected = ops.token_log_probs(head(hidden, weight), labels, temperature)
    chunks = [chunked_log_probs(hidden, weight, labels, head, temperature, rows) for rows in (1, 5, 512)]
    for log_probs, entropy in chunks:
        assert log_probs.dtype is torch.float32 and torch.equal(log_probs, expected)
        assert torch.equal(entropy, chunks[0][1])


def test_a_batch_keeps_its_shape(given):
    hidden, weight, labels = (given[0][:36].view(4, 9, K), given[1], given[2][:36].view(4, 9))
    log_probs, entropy = chunked_log_probs(hidden, weight, labels, ops.linear, rows=7)
    assert log_probs.shape == entropy.shape == (4, 9)
    flat, _ = chunked_log_probs(hidden.view(36, K), weight, labels.view(36), ops.linear)
    assert torch.equal(log_probs.view(36), flat)


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("uses", ["log_probs", "entropy", "both"])
def test_gradients_are_those_of_whole_logits(given, uses, block, monkeypatch):
    monkeypatch.setattr(logprob, "LOGIT_BYTES", 2 * V * block)
    found = []
    for chunked in (True, False):
        hidden, weight, labels = given[0].clone().requires_grad_(), given[1].clone().requires_grad_(), given[2]
        if chunked:
            outputs = chunked_log_probs(hidden, weight, labels, ops.linear, 0.7, rows=8)
        else:
            outputs = whole(hidden, weight, labels, 0.7)
        chosen = {"log_probs": outputs[:1], "entropy": outputs[1:], "both": outputs}[uses]
        sum((out * torch.linspace(-1, 1, T)).sum() for out in chosen).backward()
        found.append((hidden.grad, weight.grad))
    (dh, dw), (dh_whole, dw_whole) = found
    if block > T:
        assert torch.equal(dh, dh_whole) and torch.equal(dw, dw_whole)
    assert sqnr(dh, dh_whole) > SQNR_GEMM and sqnr(dw, dw_whole) > SQNR_GEMM  # ordinary products of other heights


def test_blocks_add_to_a_bf16_weights_gradient_in_fp32(given, monkeypatch):
    hidden, weight, labels = given[0], given[1].to(torch.bfloat16).requires_grad_(), given[2]
    parts = []
    for start in range(0, T, 16):
        at = slice(start, min(start + 16, T))
        (part,) = torch.autograd.grad(chunked_log_probs(hidden[at], weight, labels[at], ops.linear, rows=8)[0].sum(), weight)
        parts.append(part.float())
    monkeypatch.setattr(logprob, "LOGIT_BYTES", 2 * V * 16)
    (found,) = torch.autograd.grad(chunked_log_probs(hidden, weight, labels, ops.linear, rows=8)[0].sum(), weight)
    assert len(parts) > 2 and torch.equal(found, functools.reduce(torch.add, parts).to(torch.bfloat16))


def test_a_frozen_head_gets_no_gradient(given):
    hidden, weight, labels = given[0].requires_grad_(), given[1], given[2]
    chunked_log_probs(hidden, weight, labels, ops.linear, rows=8)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_a_block_adds_to_the_weights_gradient_once(monkeypatch):
    """On a GPU: 16 chunks in 2 blocks, each with a product for the hidden states and one for the weight, and one addition."""
    counter = pytest.importorskip("benchmarks.counted.counter")
    monkeypatch.setattr(logprob, "LOGIT_BYTES", 2 * V * 64)
    with counter.hopper(), counter.Counter() as counted:
        x, w = (torch.empty(rows, K, dtype=torch.bfloat16, device="meta", requires_grad=True) for rows in (128, V))
        log_probs, _ = chunked_log_probs(x, w, torch.empty(128, dtype=torch.int64, device="meta"), ops.linear, rows=8)
        forward = len(counted.launches)
        log_probs.sum().backward()
    backward = [launch.name for launch in counted.launches[forward:]]
    assert {name: backward.count(name) for name in ("bf16_gemm_kernel", "mm", "add_", "log_prob_backward_kernel", "exp")} == {
        "bf16_gemm_kernel": 2, "mm": 4, "add_": 1, "log_prob_backward_kernel": 16, "exp": 0,
    }  # fmt: skip


# ---- lm_head in FP32 -----------------------------------------------------------------------------

def operands(M, N):
    gen = torch.Generator().manual_seed(M)
    g = torch.randn(M, N, generator=gen) * torch.exp(3 * torch.randn(M, 1, generator=gen))
    return g, *(torch.randn(rows, K, generator=gen).to(torch.bfloat16) for rows in (M, N))


@pytest.mark.parametrize("M", [1, T])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_three_bf16_terms_are_as_good_as_fp32(M, wanted, monkeypatch):
    monkeypatch.setattr(logprob, "TERM_BYTES", 4 * 128 * M)  # ranges of 128 logits, the last of 64
    g, x, w = operands(M, V + 64)
    assert torch.equal(sum(term.float() for term in logprob.in_terms(g, logprob.TERMS)), g)
    found = logprob.fp32_gradients(g, x, w, torch.float32, wanted, logprob.TERMS)
    for value, expected, want in zip(found, (g.double() @ w.double(), g.double().t() @ x.double()), wanted, strict=True):
        assert (value is not None) == want and (not want or sqnr(value, expected) > SQNR_KERNEL_FP32)


def test_a_gpu_multiplies_no_fp32_numbers():
    """38 bytes a logit for the terms, and no FP32 copy of the weight."""
    counter = pytest.importorskip("benchmarks.counted.counter")
    M, N = 256, 1024
    with counter.hopper(), counter.Counter() as counted:
        x, w = (torch.empty(rows, K, dtype=torch.bfloat16, device="meta", requires_grad=True) for rows in (M, N))
        y = ops.head_linear_fp32(x, w)
        forward = len(counted.launches)
        y.backward(torch.empty_like(y))
    backward = counted.launches[forward:]
    products = [launch for launch in backward if launch.name in ("mm", "addmm")]
    assert sum(launch.flops for launch in products) == 2 * 3 * 2.0 * M * N * K
    split = [launch.bytes for launch in backward if launch.name in ("sub", "_to_copy")]
    assert sum(split) == M * N * 38 + M * K * 6  # and dX is rounded once
