"""The router of a mixture: ties, one token alone or among many, gradients."""

from __future__ import annotations

import pytest
import torch

from jetrl_patch.errors import ModelError
from jetrl_patch.exact import dispatch, ops

from ..dispatched import dispatched

BF16 = torch.bfloat16


@pytest.fixture(params=["native", "torch"], autouse=True)
def backend(request):
    with dispatched(request.param):
        yield request.param


def logits_of(tokens, experts, seed=0):
    return (2 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))).to(BF16)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (60, 4), (128, 8), (5, 5), (1, 1)])
def test_the_largest_of_a_softmax(experts, k, renormalize):
    logits = logits_of(300, experts)
    weights, ids = ops.route(logits, k, renormalize)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    p = logits.double().softmax(-1)
    assert torch.equal(ids, ids.sort(-1).values)
    assert torch.equal(p.float().gather(-1, ids).sort(-1).values, p.float().topk(k).values.sort(-1).values)
    chosen = p.gather(-1, ids)
    expected = chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen
    assert torch.allclose(weights.double(), expected, rtol=1e-6, atol=0)


def test_the_lower_index_wins_a_tie():
    logits = torch.zeros(3, 9, dtype=BF16)
    logits[1, 6:] = 1
    logits[2, [8, 2]] = 3
    weights, ids = ops.route(logits, 4, True)
    assert ids.tolist() == [[0, 1, 2, 3], [0, 6, 7, 8], [0, 1, 2, 8]]
    assert torch.equal(weights[0], torch.full((4,), 0.25))
    many, again = ops.route(logits_of(200, 16).round(), 5, False)  # BF16 integers: most rows have ties
    for row, (chosen, of) in enumerate(zip(again, logits_of(200, 16).round(), strict=True)):
        best = sorted(range(16), key=lambda e: (-float(of[e]), e))[:5]
        assert chosen.tolist() == sorted(best), row
    assert torch.isfinite(many).all()


def test_a_token_depends_on_itself_alone():
    logits = logits_of(257, 60)
    weights, ids = ops.route(logits, 4, True)
    for start, size in [(0, 1), (256, 1), (5, 7), (100, 32)]:
        alone, chosen = ops.route(logits[start : start + size].clone(), 4, True)
        assert torch.equal(alone, weights[start : start + size]) and torch.equal(chosen, ids[start : start + size])
    order = torch.randperm(257, generator=torch.Generator().manual_seed(1))
    shuffled, _ = ops.route(logits[order], 4, True)
    assert torch.equal(shuffled, weights[order])


def test_both_implementations_choose_alike():
    found = []
    for kind in ("native", "torch"):
        dispatch.configure(kind)
        found.append(ops.route(logits_of(2000, 128), 8, True))
    assert torch.equal(found[0][1], found[1][1])
    assert (found[0][0] == found[1][0]).float().mean() > 0.9999


@pytest.mark.parametrize("renormalize", [False, True])
def test_gradient(renormalize):
    logits = logits_of(40, 16).float().requires_grad_()
    weights, ids = ops.route(logits, 4, renormalize)
    g = torch.randn(40, 4)
    weights.backward(g)
    exact = logits.detach().double().requires_grad_()
    chosen = exact.softmax(-1).gather(-1, ids)
    chosen = chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen
    chosen.backward(g.double())
    assert torch.allclose(logits.grad.double(), exact.grad, atol=1e-6)


def test_a_nan_shows_and_indices_stay_valid():
    logits = logits_of(4, 8)
    logits[1, 3] = float("nan")
    logits[2] = float("-inf")
    weights, ids = ops.route(logits, 2, True)
    assert weights[1:3].isnan().all() and not weights[[0, 3]].isnan().any()
    assert ((ids >= 0) & (ids < 8)).all() and (ids[:, 0] < ids[:, 1]).all()


@pytest.mark.parametrize("k", [0, 5])
def test_more_experts_than_there_are(k):
    with pytest.raises(ModelError, match=f"required 1 to 4 experts per token, found {k}"):
        ops.route(logits_of(2, 4), k, True)


def rule(experts, groups, kept, scale=2.5, seed=3):
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(seed)) * 0.3
    return ops.Sigmoid(bias, groups, kept, scale)


def by_hand(row, k, renormalize, rule):
    """One token, in plain Python."""
    p = [float(torch.tensor(float(x), dtype=torch.float64).sigmoid().float()) for x in row]
    c = [float(torch.tensor(a) + b) for a, b in zip(p, rule.bias, strict=True)]
    size = len(p) // rule.groups
    worth = [sum(sorted(c[g * size : (g + 1) * size])[-2:]) for g in range(rule.groups)]
    kept = sorted(range(rule.groups), key=lambda g: (-worth[g], g))[: rule.kept]
    ids = sorted(sorted((e for e in range(len(p)) if e // size in kept), key=lambda e: (-c[e], e))[:k])
    total = sum(p[e] for e in ids) if renormalize else 1.0
    return ids, [rule.scale * p[e] / total for e in ids]


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("experts", "k", "groups", "kept"), [(8, 3, 4, 2), (128, 8, 1, 1), (12, 4, 3, 2), (6, 6, 3, 3), (4, 2, 2, 1)]
)
def test_a_sigmoid_with_a_bias_and_groups(experts, k, groups, kept, renormalize):
    logits, by = logits_of(200, experts).float(), rule(experts, groups, kept)
    weights, ids = ops.route(logits, k, renormalize, by)
    for row in range(200):
        chosen, expected = by_hand(logits[row], k, renormalize, by)
        assert ids[row].tolist() == chosen, row
        assert torch.allclose(weights[row], torch.tensor(expected), rtol=1e-6, atol=0)
    for start, size in [(0, 1), (199, 1), (5, 7), (100, 32)]:
        alone, which = ops.route(logits[start : start + size].clone(), k, renormalize, by)
        assert torch.equal(alone, weights[start : start + size]) and torch.equal(which, ids[start : start + size])


def test_ties_of_groups_and_experts_go_to_the_lower_index():
    flat = ops.Sigmoid(torch.zeros(8), 4, 2, 1.0)
    logits = torch.zeros(2, 8)
    logits[1, 6:] = 1
    weights, ids = ops.route(logits, 3, True, flat)
    assert ids.tolist() == [[0, 1, 2], [0, 6, 7]]
    assert torch.allclose(weights[0], torch.full((3,), 1 / 3))


def test_both_implementations_choose_alike_by_a_sigmoid():
    found = []
    for kind in ("native", "torch"):
        dispatch.configure(kind)
        found.append(ops.route(logits_of(2000, 64).float(), 6, True, rule(64, 8, 3)))
    assert torch.equal(found[0][1], found[1][1])
    assert (found[0][0] == found[1][0]).float().mean() > 0.9999


@pytest.mark.parametrize("renormalize", [False, True])
def test_gradient_of_a_sigmoid(renormalize):
    logits, by = logits_of(40, 16).float().requires_grad_(), rule(16, 4, 2)
    weights, ids = ops.route(logits, 4, renormalize, by)
    g = torch.randn(40, 4)
    weights.backward(g)
    exact = logits.detach().double().requires_grad_()
    chosen = exact.sigmoid().gather(-1, ids)
    chosen = chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen
    (chosen * by.scale).backward(g.double())
    assert torch.allclose(logits.grad.double(), exact.grad, atol=1e-6)


def test_a_nan_shows_by_a_sigmoid_too():
    logits = logits_of(4, 8).float()
    logits[1, 3], logits[2] = float("nan"), float("-inf")
    for renormalize in (False, True):
        weights, ids = ops.route(logits, 2, renormalize, rule(8, 2, 1))
        assert weights[1].isnan().all() and not weights[[0, 2, 3]].isnan().any()
        assert (weights[2] == 0).all()
        assert ((ids >= 0) & (ids < 8)).all() and (ids[:, 0] < ids[:, 1]).all()


@pytest.mark.parametrize(("k", "groups", "kept"), [(2, 3, 1), (2, 0, 0), (2, 8, 2), (3, 4, 1), (2, 4, 0), (2, 4, 5)])
def test_groups_that_do_not_fit(k, groups, kept):
    with pytest.raises(ModelError, match=f"found {kept} of {groups} groups"):
        ops.route(logits_of(2, 8).float(), k, True, rule(8, groups, kept))


def test_a_bias_that_was_rounded_is_refused():
    fine = rule(8, 2, 1)
    with pytest.raises(ModelError, match=r"correction bias of a router: required torch.float32.* found torch.bfloat16"):
        ops.route(logits_of(2, 8).float(), 2, True, fine._replace(bias=fine.bias.bfloat16()))
