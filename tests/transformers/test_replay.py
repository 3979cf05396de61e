"""Replay of routes in transformers' own mixtures: experts that are used, and gradients, equal a forced choice's."""

from __future__ import annotations

import pytest
import torch

from jetrl_patch.fp8.convert import expert_modules
from jetrl_patch.measure.routes import Recorder, Replay
from jetrl_patch.models.families import FAMILIES
from tests import vision_models
from tests.models import build

pytestmark = pytest.mark.pins

#: a router by softmax and one by a sigmoid; the other families are slow ones
QUICK = ("qwen3_moe", "glm4_moe")
FAMILY = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name, family in sorted(FAMILIES.items()) if family.mixture
]  # fmt: skip
TOKENS = 12


def made(family):
    builder = vision_models.build if family in vision_models.FAMILIES else build
    return builder(family).float().train()


def passed(model, replay=None, given=None, rows=None):
    """Logits, used experts [N, L, k] and gradients of one pass."""
    model.zero_grad()
    recorder = Recorder(model)
    if replay is not None:
        replay.follow(given, rows)
    with recorder.recording() as used:
        logits = model(input_ids=torch.arange(2, 2 + TOKENS)[None], use_cache=False).logits
    logits.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), used, gradients


def stacked(used):
    """As the rollout returns them: zeros in the layers without experts."""
    some = next(iter(used.values()))
    return torch.stack([used.get(n, torch.zeros_like(some)) for n in range(max(used) + 1)], 1)


def others(used, experts, seed=0):
    """Other routes of the same shape."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.rand(len(ids), experts, generator=generator).argsort(-1)[:, : ids.shape[1]] for n, ids in used.items()}


def experts_in(model):
    return len(next(iter(expert_modules(model).values())).gate_up_proj)


@pytest.mark.parametrize("family", FAMILY)
def test_own_routes_change_no_bit(family):
    model = made(family)
    logits, used, gradients = passed(model)
    again = passed(model, Replay(model), stacked(used).flip(-1).to(torch.int16), torch.arange(TOKENS))
    assert torch.equal(logits, again[0])
    assert gradients.keys() == again[2].keys() and all(torch.equal(gradients[n], again[2][n]) for n in gradients)


@pytest.mark.parametrize("family", FAMILY)
def test_the_given_experts_are_used_and_gradients_are_those_of_a_forced_choice(family, monkeypatch):
    model = made(family)
    _, used, _ = passed(model)
    given = others(used, experts_in(model))
    rows = torch.arange(TOKENS - 1)  # the last token has no routes
    replay = Replay(model)
    logits, found, gradients = passed(model, replay, stacked(given)[:-1], rows)
    for n, ids in found.items():
        assert torch.equal(ids[:-1].sort(-1).values, given[n][:-1].sort(-1).values) and torch.equal(ids[-1], replay.own[n][-1])
    replay.stop()
    real, turn = torch.topk, iter([found[n] for n in sorted(found)])

    def forced(values, k, *args, **kwargs):
        if values.dim() == 2 and values.shape[-1] == experts_in(model) and k == next(iter(found.values())).shape[1]:
            ids = next(turn)
            return values.gather(-1, ids), ids
        return real(values, k, *args, **kwargs)

    monkeypatch.setattr(torch, "topk", forced)
    expected = passed(model)
    assert torch.equal(logits, expected[0])
    assert gradients.keys() == expected[2].keys() and all(torch.equal(gradients[n], expected[2][n]) for n in gradients)
