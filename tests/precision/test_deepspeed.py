"""OpenRLHF in FP16: steps under DeepSpeed's loss scaler, the error at the smallest scale, and weights that do not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import jetrl_patch
from jetrl_patch.adapters.openrlhf import settings
from jetrl_patch.adapters.openrlhf.state import WORKER, reset
from jetrl_patch.errors import ModelError, PrecisionError, SyncError


@pytest.fixture
def on(monkeypatch):
    """Act as in a run with precision='fp16', without patching this process."""
    monkeypatch.setattr(settings, "scales_loss", lambda: True)
    reset()
    yield
    reset()


class Engine:
    """The stepping part of a DeepSpeed engine: its own scaler, two micro-batches per step."""

    def __init__(self, scale: float = 2.0**16) -> None:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

        self.optimizer = DynamicLossScaler(
            init_scale=scale, scale_window=1000, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False
        )
        self.global_steps = self.skipped_steps = self.micro_steps = 0

    def step(self, overflow: bool) -> None:
        self.micro_steps += 1
        if self.micro_steps % 2:
            return
        self.optimizer.update_scale(overflow)
        self.skipped_steps += overflow
        self.global_steps += 1


def step(engine: Engine, overflow: bool, actor: bool = True) -> None:
    """Call the patched method once, through an Actor or directly."""
    model = SimpleNamespace(model=engine) if actor else engine
    original = lambda self, optimizer, model, scheduler, name="model": engine.step(overflow)  # noqa: E731
    settings.optimizer_step(original)(None, None, model, None, name="actor")


@pytest.mark.parametrize("actor", [True, False])
def test_steps_are_counted_and_micro_batches_are_not(on, monkeypatch, actor):
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 1)
    engine = Engine()
    for overflow in (False, True, True, False):
        for _ in range(2):
            step(engine, overflow, actor)
    assert WORKER.loss_scale.figures() == {"loss_scale": 2.0**14, "skipped_steps": 2.0}
    assert WORKER.loss_scale.in_a_row == 0


def test_deepspeeds_last_word_becomes_ours(on, monkeypatch):
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 1)
    engine = Engine(scale=2.0)
    for _ in range(3):
        step(engine, True)
    with pytest.raises(PrecisionError, match=r"smallest loss scale \(1\), after 2 skipped steps in a row") as caught:
        step(engine, True)
    assert "already at minimum" in str(caught.value.__cause__)


def test_any_other_error_stays_what_it_is(on):
    def original(*_: object, **__: object) -> None:
        raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        settings.optimizer_step(original)(None, None, Engine(), None)


def test_an_unpatched_process_is_left_alone():
    assert not jetrl_patch.status().enabled
    engine = Engine()
    step(engine, False)
    assert (engine.micro_steps, WORKER.loss_scale.figures()) == (1, {})


def test_no_rank_syncs_weights_that_do_not_fit(on, monkeypatch):
    elsewhere = 0
    monkeypatch.setattr("torch.distributed.all_reduce", lambda found: found.add_(elsewhere))
    module = torch.nn.Linear(2, 2)
    settings.check_weights(module)
    elsewhere = 1
    with pytest.raises(SyncError, match="nothing was synced: another rank names them"):
        settings.check_weights(module)
    elsewhere, module.bias.data[0] = 0, 7e4
    with pytest.raises(SyncError, match=r"nothing was synced: bias has \|w\| = 70000\. Check the last optimizer steps"):
        settings.check_weights(module)
    with pytest.raises(ModelError, match="the checkpoint X does not fit FP16"):
        settings.check_model(module, "X")
    module.bias.ds_tensor = torch.zeros(1)  # this rank's part under ZeRO-3
    settings.check_weights(module)
    module.bias.ds_tensor[0] = 7e4
    monkeypatch.setattr(settings, "scales_loss", lambda: False)
    settings.check_weights(module)
    settings.check_model(module, "X")
