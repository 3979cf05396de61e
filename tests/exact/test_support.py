"""Log-probs over the tokens that each token was drawn from: against FP64, in blocks, and in a framework's batches."""

from __future__ import annotations

import pytest
import torch

from jetrl_patch.errors import AuditError
from jetrl_patch.exact import logprob, ops
from jetrl_patch.exact.logprob import chunked_log_probs, token_log_probs
from jetrl_patch.exact.support import Support, of_batch, to_batch
from tests.fp8.thresholds import SQNR_GEMM, SQNR_KERNEL_FP32, sqnr

ROWS, V = 53, 300


@pytest.fixture
def given():
    """Logits, supports of 1 to V tokens (and whole vocabularies among them), and a label inside each.

    A third of them, of nearly the whole vocabulary, are given by what they leave out.
    """
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, V, generator=generator) * 3
    sizes = [0, 1, V, *torch.randint(1, 40, (ROWS - 3,), generator=generator).tolist()]
    sizes[5::3] = [V - size for size in sizes[5::3]]
    rows = [torch.randperm(V, generator=generator)[:size].tolist() for size in sizes]
    labels = torch.tensor([row[0] if row else 7 for row in rows])
    ids = list(rows)
    ids[5::3] = [[~token for token in range(V) if token not in row] for row in rows[5::3]]
    return logits, Support.of(ids), labels, rows


def oracle(logits, rows, labels, temperature):
    """The definition, in FP64 and one row at a time."""
    found = []
    for row, kept, label in zip(logits, rows, labels.tolist(), strict=True):
        z = row.double() / temperature
        over = z[kept] if kept else z
        found.append(z[label] - torch.logsumexp(over, 0))
    return torch.stack(found)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("block", [16, 64])
def test_against_fp64(given, temperature, block, monkeypatch):
    logits, support, labels, rows = given
    monkeypatch.setattr(logprob, "BLOCK_BYTES", 4 * V * block)
    mine, theirs = (logits.clone().requires_grad_() for _ in range(2))
    found, expected = token_log_probs(mine, labels, temperature, edit=support.edit), oracle(theirs, rows, labels, temperature)
    assert sqnr(found.detach(), expected.detach()) > SQNR_KERNEL_FP32
    weight = torch.linspace(-1, 1, ROWS)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    assert sqnr(mine.grad, theirs.grad) > SQNR_KERNEL_FP32
    for row, kept in enumerate(rows):
        outside = [token for token in range(V) if token not in kept] if kept else []
        assert not mine.grad[row, outside].any()  # gradients only through the support


def test_the_bits_are_those_of_minus_infinity(given):
    """As vLLM computes them, which writes −inf over the tokens left out."""
    logits, support, labels, rows = given
    masked = torch.full_like(logits, -float("inf"))
    for row, kept in enumerate(rows):
        masked[row, kept or slice(None)] = logits[row, kept or slice(None)]
    expected = torch.log_softmax(masked / 0.7, -1).gather(1, labels[:, None])[:, 0]
    assert torch.equal(token_log_probs(logits, labels, 0.7, edit=support.edit), expected)


def test_one_token_is_certain(given):
    logits = given[0].requires_grad_()
    found = token_log_probs(logits, torch.full((ROWS,), 5), edit=Support.of([[5]] * ROWS).edit)
    assert (found == 0).all()
    found.sum().backward()
    assert not logits.grad.any()


@pytest.mark.parametrize("rows", [1, 5, 512])
def test_by_chunks_of_hidden_states(given, rows, monkeypatch):
    _, support, labels, _ = given
    monkeypatch.setattr(logprob, "LOGIT_BYTES", 2 * V * 16)
    hidden, weight = torch.randn(ROWS, 64).bfloat16(), torch.randn(V, 64) * 0.3
    grads = []
    for chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunked:
            found, entropy = chunked_log_probs(h, w, labels, ops.linear, 0.7, rows=rows, edit=support.edit)
        else:
            z = support.edit(ops.linear(h, w).float(), slice(0, ROWS)) / 0.7
            every = torch.log_softmax(z, -1)
            found, entropy = every.gather(1, labels[:, None])[:, 0], -(every.exp() * every).sum(-1)
        (found.sum() + 0.3 * entropy.sum()).backward()
        grads.append((found.detach(), entropy.detach(), h.grad, w.grad))
    (mine, mine_entropy, *mine_grads), (whole, whole_entropy, *whole_grads) = grads
    assert torch.equal(mine, whole) and torch.equal(mine_entropy, whole_entropy) and mine_entropy.isfinite().all()
    assert mine_entropy[1] == 0  # of one token
    for a, b in zip(mine_grads, whole_grads, strict=True):
        assert a.isfinite().all() and sqnr(a, b) > SQNR_GEMM


def test_a_record_of_other_tokens_is_an_error(given):
    _, support, labels, rows = given
    assert support.require(labels, "a test") is support
    with pytest.raises(AuditError, match=r"sampling supports of a test: required one for each token, found 52 for 53 tokens"):
        Support.of(rows[:-1]).require(labels, "a test")
    for number, row in enumerate((9, 8), 1):  # a list of what it is drawn from, and one of what is left out
        labels[row] = next(token for token in range(V) if token not in rows[row])
        with pytest.raises(AuditError, match=rf"found {number} of 53 tokens that are not in theirs"):
            support.require(labels, "a test")


@pytest.mark.parametrize("skipped", [0, 3])
def test_a_framework_may_shuffle_and_split_the_batch(given, skipped):
    rows = given[3]
    samples = [rows[:20], rows[20:21], rows[21:]]
    sizes, ids = to_batch([Support.of(sample) for sample in samples], width=40)
    assert sizes.shape == (3, 40) and sizes.dtype == ids.dtype == torch.int32
    assert ids.shape[1] == max(sum(map(len, sample)) for sample in samples)
    found = of_batch(sizes[[2, 0]], ids[[2, 0]], skipped)
    padded = [[[]] * skipped + sample + [[]] * (40 - len(sample)) for sample in (samples[2], samples[0])]
    expected = Support.of([row for sample in padded for row in sample])
    assert torch.equal(found.counts, expected.counts) and torch.equal(found.ids, expected.ids)


def test_a_batch_without_supports(given):
    found = of_batch(*to_batch([Support.of([[], []]), Support.of([[]])], width=2))
    assert torch.equal(found.edit(given[0][:4], slice(0, 4)), given[0][:4])


def test_rows_in_another_order(given):
    _, support, _, _ = given
    order = torch.randint(-1, ROWS, (2 * ROWS,), generator=torch.Generator().manual_seed(5))
    found = support.take(order)
    every = support.ids.split(support.counts.tolist())
    assert [row.tolist() for row in found.ids.split(found.counts.tolist())] == [
        every[row].tolist() if row >= 0 else [] for row in order.tolist()
    ]
    assert not len(support.take(torch.tensor([-1, -1])).ids) and (order < 0).any()
