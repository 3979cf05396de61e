"""ACR, policy gradients and GSPO against their definitions in Python; gradients against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.stability.objective import gspo_loss, policy_gradient_loss
from jetrl_patch.measure.corrections import acr_loss, correct, ppo_loss, ratio
from tests.correction.batches import LOG_RATIOS

SMALL = st.floats(-1.0, 1.0, width=32)


def cells(rows: int, width: int, values: st.SearchStrategy[float] = SMALL) -> st.SearchStrategy[torch.Tensor]:
    row = st.lists(values, min_size=width, max_size=width)
    return st.lists(row, min_size=rows, max_size=rows).map(lambda found: torch.tensor(found, dtype=torch.float64))


def acr_by_hand(change: float, advantage: float, rho: float, cap: float, eps: tuple[float, float], c: float | None):
    r = min(1.0, cap / rho)
    big_r = math.exp(change)
    clipped = min(max(big_r, 1 - eps[0]), (1 + eps[1]) / r)
    value = min(big_r * advantage, clipped * advantage)
    if c is not None and advantage < 0:
        value = max(value, c * advantage)
    return -min(rho, cap) * value


@given(
    change=cells(2, 4), advantages=cells(2, 4), log_ratio=cells(2, 4, LOG_RATIOS), cap=st.floats(0.5, 5.0),
    dual=st.none() | st.floats(1.1, 4.0),
)  # fmt: skip
def test_acr(change, advantages, log_ratio, cap, dual) -> None:
    old = torch.full_like(change, -2.0)
    rho = ratio(log_ratio, torch.ones_like(change))
    found, _ = acr_loss(old + change, old, advantages, rho, cap, 0.2, 0.28, dual)
    for i in range(2):
        for j in range(4):
            expected = acr_by_hand(
                change[i, j].item(), advantages[i, j].item(), math.exp(log_ratio[i, j]), cap, (0.2, 0.28), dual
            )
            assert found[i, j].item() == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(change=cells(2, 4), advantages=cells(2, 4), log_ratio=cells(2, 4, st.floats(-3, math.log(2))))
def test_acr_is_tis_where_nothing_is_truncated(change, advantages, log_ratio) -> None:
    old, mask = torch.full_like(change, -2.0), torch.ones_like(change)
    found, clipped = acr_loss(old + change, old, advantages, ratio(log_ratio, mask), 2.0001, 0.2, 0.28, 3.0)
    plain, plain_clipped = ppo_loss(old + change, old, advantages, 0.2, 0.28, 3.0)
    assert torch.equal(found, plain * correct("tis", log_ratio, mask, (2.0001,)).weights)
    assert torch.equal(clipped, plain_clipped)


def test_the_ratio_of_acr_has_no_gradient() -> None:
    """Neither through the weight nor through the clip."""
    log_prob, rho = torch.zeros(1, 4, requires_grad=True), torch.tensor([[0.5, 1.0, 2.5, 4.0]], requires_grad=True)
    loss, _ = acr_loss(log_prob, torch.zeros(1, 4), torch.tensor([[1.0, -1.0, 2.0, -2.0]]), rho, 2.0, 0.2, 0.28, 3.0)
    loss.sum().backward()
    assert rho.grad is None and log_prob.grad is not None and log_prob.grad.all()


def test_acr_widens_the_clip_by_what_is_truncated() -> None:
    """ρ = 4, C = 2: r = ½, so the clip ends at 2.56 instead of 1.28, and R = 2 still has the gradient C·A·R."""
    log_prob = torch.tensor([[math.log(2.0)]], requires_grad=True)
    old, advantages, rho = torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[4.0]])
    acr_loss(log_prob, old, advantages, rho, 2.0, 0.2, 0.28)[0].sum().backward()
    assert log_prob.grad is not None and log_prob.grad.item() == pytest.approx(-4.0)
    log_prob.grad = None
    (ppo_loss(log_prob, old, advantages, 0.2, 0.28)[0] * 2.0).sum().backward()
    assert log_prob.grad.item() == 0.0


@pytest.mark.parametrize(("change", "expected"), [(100.0, 20.0), (19.0, 19.0), (-100.0, -20.0)])
def test_a_log_ratio_is_clamped(change, expected) -> None:
    """As in verl and OpenRLHF: one token cannot make the loss infinite."""
    found, _ = ppo_loss(torch.full((1, 1), change), torch.zeros(1, 1), -torch.ones(1, 1), 1.0, 0.2)
    assert found.item() == pytest.approx(math.exp(expected))


def test_padding_without_a_ratio_gives_zero() -> None:
    found, _ = acr_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, 2), 2.0, 0.2, 0.2)
    assert found.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("kind", ["seq-is", "seq-tis", "seq-mis"])
@given(log_ratio=cells(3, 4, LOG_RATIOS), advantages=cells(3, 4))
def test_policy_gradients(kind, log_ratio, advantages) -> None:
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    rollout = torch.full_like(log_ratio, -3.0)
    log_prob = (rollout + log_ratio).requires_grad_()
    loss = policy_gradient_loss(log_prob, rollout, advantages, mask, kind, cap=3.0)
    loss.sum().backward()
    assert log_prob.grad is not None
    for i in range(3):
        whole = math.exp(sum(log_ratio[i, j].item() for j in range(4) if mask[i, j]))
        weight = {"seq-is": whole, "seq-tis": min(whole, 3.0), "seq-mis": whole if whole <= 3.0 else 0.0}[kind]
        for j in range(4):
            w = weight if mask[i, j] else 0.0
            assert loss[i, j].item() == pytest.approx(-w * advantages[i, j].item() * log_prob[i, j].item(), rel=1e-9)
            assert log_prob.grad[i, j].item() == pytest.approx(-w * advantages[i, j].item(), rel=1e-9)


@given(change=cells(3, 4), advantages=cells(3, 1))
def test_gspo(change, advantages) -> None:
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    old = torch.full_like(change, -2.0)
    found = gspo_loss(old + change, old, advantages.expand(3, 4), mask, 0.2, 0.28)
    for i in range(3):
        chosen = [change[i, j].item() for j in range(4) if mask[i, j]]
        s = math.exp(sum(chosen) / len(chosen)) if chosen else 1.0
        a = advantages[i, 0].item()
        for j in range(4):
            expected = -min(s * a, min(max(s, 0.8), 1.28) * a) if mask[i, j] else 0.0
            assert found[i, j].item() == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", ["acr", "gspo"])
def test_gradients_are_those_of_the_function(name) -> None:
    torch.manual_seed(0)
    old, advantages = -torch.rand(3, 4).double(), torch.randn(3, 4).double()
    log_prob = (old + 0.5 * torch.randn(3, 4).double()).requires_grad_()
    rho, mask = torch.rand(3, 4).double() * 4, torch.ones(3, 4)
    if name == "acr":
        assert torch.autograd.gradcheck(lambda x: acr_loss(x, old, advantages, rho, 2.0, 0.2, 0.28, 3.0)[0], log_prob)
    else:
        assert torch.autograd.gradcheck(lambda x: gspo_loss(x, old, advantages, mask, 0.2, 0.28), log_prob)
