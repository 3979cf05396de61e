"""Weights are promised to stay from a training step's forward pass to DeepSpeed's update, which ends the promise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from jetrl_patch import runtime
from jetrl_patch.adapters.openrlhf import weights
from jetrl_patch.adapters.openrlhf.adapter import ADAPTER
from jetrl_patch.config import Config
from jetrl_patch.fp8.convert import swap_linears
from jetrl_patch.fp8.linear import PROMISES

FP8 = Config(precision="fp8-unified", align="linear")


def actor():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(128, 128)})])
    swap_linears(model, backend="torch")
    return model


class Strategy:
    """Writes weights as DeepSpeed does, by ``.data``."""

    def __init__(self, stage):
        self.stage = stage

    @weights.optimizer_step
    def optimizer_step(self, _optimizer, model, _scheduler, name="model"):
        model.layers[0]["q_proj"].weight.data.neg_()


class Trainer:
    def __init__(self, stage):
        self.actor, self.strategy, self.seen = actor(), Strategy(stage), []

    @weights.training_step
    def training_step(self, experience, kl_ctl, step, loss_batch_info=None):
        layer = self.actor.layers[0]["q_proj"]
        for _ in range(2):
            self.seen.append(layer.fp8.quantized(layer.weight, own=True))
        held = layer.fp8.promise in PROMISES
        self.strategy.optimizer_step(None, self.actor, None, name="actor")
        self.seen.append(layer.fp8.quantized(layer.weight, own=True))
        return held


@pytest.mark.parametrize(("config", "stage", "kept"), [(FP8, 2, True), (FP8, 3, False), (Config(precision="bf16"), 2, False)])
def test_from_the_forward_pass_to_the_update(monkeypatch, config, stage, kept):
    monkeypatch.setattr(runtime, "is_active", lambda: True)
    monkeypatch.setattr(runtime, "active_config", lambda: config)
    trainer = Trainer(stage)
    assert trainer.training_step(SimpleNamespace(), 0.0, step=0) is kept
    first, second, after = trainer.seen
    assert (first is second) is kept
    assert torch.equal(after.q.float(), -first.q.float()) and not PROMISES


def test_the_patches_are_there_only_where_the_trainer_is_fp8():
    def makes(config):
        return {patch.make for patch in ADAPTER.patches(config.resolved())}

    ours = {weights.training_step, weights.optimizer_step}
    assert ours <= makes(FP8) and not ours & makes(Config(precision="fp8-rollout"))
