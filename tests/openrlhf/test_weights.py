"""Weights are promised to stay unchanged between DeepSpeed's updates, also over micro-batches that only accumulate."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf import model as weights
from jetrl_patch.adapters.openrlhf.adapter import ADAPTER
from jetrl_patch.adapters.openrlhf.patches import PATCHES
from jetrl_patch.backends.quantize import quantize_weight
from jetrl_patch.config import Config
from jetrl_patch.fp8.convert import swap_linears
from jetrl_patch.fp8.linear import PROMISES
from tests.patches import applied

FP8 = Config(precision="fp8-unified", align="linear")


def actor():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(128, 128)})])
    swap_linears(model, backend="torch")
    return model


class Engine(nn.Module):
    """DeepSpeed's engine: it writes weights through ``.data`` in every second step."""

    def __init__(self, module, **settings):
        super().__init__()
        self.module, self.micro_steps, self.settings = module, 0, settings
        self.zenflow = settings.get("zenflow", False)

    def managed_gradient_accumulation(self):
        return self.settings.get("managed", True)

    def is_gradient_accumulation_boundary(self):
        return self.managed_gradient_accumulation() and (self.micro_steps + 1) % 2 == 0

    def step(self):
        if not self.managed_gradient_accumulation() or self.zenflow or self.is_gradient_accumulation_boundary():
            self.module.layers[0]["q_proj"].weight.data.neg_()
        self.micro_steps += 1


class Actor(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.model = Engine(actor(), **settings)


class Strategy:
    def __init__(self, stage):
        self.stage = stage

    @partial(applied, weights.optimizer_step, PATCHES)
    def optimizer_step(self, _optimizer, model, _scheduler, name="model"):
        (model.model if isinstance(model, Actor) else model).step()


class Trainer:
    def __init__(self, stage, bare=False, **settings):
        self.actor, self.strategy, self.seen = Actor(**settings), Strategy(stage), []
        self.stepped = self.actor.model if bare else self.actor

    @partial(applied, weights.ppo_train, PATCHES)
    def ppo_train(self, kl_ctl):
        layer = self.actor.model.module.layers[0]["q_proj"]
        for _ in range(4):  # micro-batches, of which two make an update
            for _ in range(2):
                self.seen.append((layer.fp8.quantized(layer.weight, own=True), layer.weight.detach().clone()))
            self.strategy.optimizer_step(None, self.stepped, None, name="actor")


@pytest.mark.parametrize(
    ("config", "stage", "settings", "made"),
    [
        (FP8, 2, {}, 2),
        (FP8, 2, {"bare": True}, 2),
        (FP8, 2, {"zenflow": True}, 4),
        (FP8, 2, {"managed": False}, 4),
        (FP8, 3, {}, 8),
        (Config(precision="bf16"), 2, {}, 8),
    ],
)
def test_once_from_one_update_to_the_next(monkeypatch, config, stage, settings, made):
    monkeypatch.setattr(session, "is_active", lambda: True)
    monkeypatch.setattr(session, "active_config", lambda: config)
    trainer = Trainer(stage, **settings)
    trainer.ppo_train(0.0)
    assert len({id(found) for found, _ in trainer.seen}) == made and not PROMISES
    for found, weight in trainer.seen:
        assert torch.equal(found.q.view(torch.uint8), quantize_weight(weight.bfloat16(), "pow2").q.view(torch.uint8))


def test_the_patches_are_there_only_where_the_trainer_is_fp8():
    def makes(config):
        return {patch.make for patch in ADAPTER.patches(config.resolved())}

    ours = {weights.ppo_train, weights.optimizer_step}
    assert ours <= makes(FP8) and not ours & makes(Config(precision="fp8-rollout"))
