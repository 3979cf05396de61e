"""``old_log_probs="rollout"`` in a worker: verl's own loss over one micro-batch compares before it trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from jetrl_patch import session
from jetrl_patch.adapters.verl import old_log_probs, state
from jetrl_patch.adapters.verl.state import WORKER
from jetrl_patch.config import Config
from jetrl_patch.errors import AuditError
from tests.verl.audited import GO_ON, RECOMPUTE, STOP, nested, one_ulp_off

PROMPTS, RESPONSES = [2, 3, 2, 4], [5, 3, 4, 1]


class MicroBatch:
    """Four samples as verl's engine passes them to the loss. A token in the middle of a response does not count (a tool's)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.mask = torch.zeros(4, max(RESPONSES), dtype=torch.long)
        for row, length in enumerate(RESPONSES):
            self.mask[row, :length] = 1
        self.mask[0, 2] = 0
        total = sum(PROMPTS) + sum(RESPONSES)
        self.model = -torch.rand(total, generator=generator) * 4
        self.advantages = torch.randn(self.mask.shape, generator=generator)
        self.pass_ = torch.zeros(self.mask.shape)  # what the pass gives
        end = 0
        for row, (before, length) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            end += before + length
            self.pass_[row, :length] = self.model[end - length - 1 : end - 1]
        self.rollout = torch.where(self.mask.bool(), self.pass_, 0.0)

    def loss(self, old: torch.Tensor, loss_mode: str = "vanilla", shift: float = 0.0) -> tuple[Any, torch.Tensor, Any]:
        """Loss, log-probs with their gradient, and metrics of verl's ``ppo_loss``; the weights have moved by ``shift``."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.config import ActorConfig, PolicyLossConfig
        from verl.workers.utils.losses import ppo_loss

        config = ActorConfig(
            strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=4, policy_loss=PolicyLossConfig(loss_mode=loss_mode)
        )

        def rows(padded: torch.Tensor) -> torch.Tensor:
            return nested([padded[i, :n] for i, n in enumerate(RESPONSES)])

        data = TensorDict(
            {
                "prompts": nested([torch.ones(n, dtype=torch.long) for n in PROMPTS]),
                "responses": rows(torch.ones_like(self.mask)),
                "response_mask": rows(self.mask),
                "old_log_probs": rows(old),
                "advantages": rows(self.advantages),
            },
            batch_size=4,
        )
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(self.mask.sum()), global_batch_size=4)
        weights = (self.model + shift).requires_grad_()
        loss, logged = ppo_loss(config, {"log_probs": weights}, data)
        return loss, weights, {name: getattr(value, "values", value) for name, value in logged.items()}


LOSSES = ["vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo"]


@pytest.fixture
def patched():
    state.reset()

    def enable(config: Config) -> None:
        session.enable(config)

    yield enable
    session.disable()
    state.reset()


@pytest.mark.parametrize("loss_mode", LOSSES)
@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_each_loss_and_its_gradient_are_those_of_the_pass(patched, loss_mode, shift):
    """In the first and in later updates, with any values at masked tokens."""
    batch = MicroBatch()
    expected, weights, metrics_of_pass = batch.loss(batch.pass_, loss_mode, shift)
    expected.backward()
    patched(STOP)
    for padding in (0.0, float("nan"), -1e30):
        old_log_probs.take_measured()
        WORKER.measuring = not shift
        old = torch.where(batch.mask.bool(), batch.rollout, padding)
        found, ours, logged = batch.loss(old, loss_mode, shift)
        found.backward()
        assert torch.equal(found, expected) and torch.equal(ours.grad, weights.grad) and ours.grad.isfinite().all()
        assert repr(logged) == repr(metrics_of_pass)
        sums = state.WORKER.audit.report()["sums"]
        assert (sums["tokens"], sums["equal"]) == (12, 12) if not shift else sums is None


def test_one_ulp_stops_before_the_backward_pass(patched):
    patched(STOP)
    batch = MicroBatch()
    old_log_probs.take_measured()
    with pytest.raises(AuditError, match=r"response token 1 of sample 2: .*1 of 12 tokens differ"):
        batch.loss(one_ulp_off(batch.rollout, 2, 1))
    assert state.WORKER.audit.report()["differed"]


def test_or_the_micro_batch_takes_its_own(patched):
    batch = MicroBatch()
    expected, weights, _ = batch.loss(batch.pass_)
    expected.backward()
    patched(GO_ON)
    old_log_probs.take_measured()
    wrong = batch.rollout - 0.5  # far outside the clip range
    found, ours, _ = batch.loss(wrong)
    found.backward()
    assert torch.equal(found, expected) and torch.equal(ours.grad, weights.grad)
    assert state.WORKER.audit.report() | {"sums": None} == {"sums": None, "differed": True}


def test_only_the_mini_batch_of_the_weights_that_sampled_is_compared(patched):
    patched(STOP)
    batch = MicroBatch()
    train_batch = old_log_probs.train_batch(lambda self, *calls: [batch.loss(*call) for call in calls])
    same, moved = (batch.rollout,), (batch.rollout, "vanilla", 0.1)
    train_batch(None, moved)  # before the first sync
    assert state.WORKER.audit.report()["sums"] is None
    old_log_probs.take_measured()
    train_batch(None)  # a critic's
    train_batch(None, same, same)
    train_batch(None, moved)
    assert state.WORKER.audit.report()["sums"]["tokens"] == 24
    old_log_probs.take_measured()
    with pytest.raises(AuditError):
        train_batch(None, moved)


def test_bypass_mode_and_other_settings_keep_verls_loss(patched):
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.workers.utils import losses

    patched(STOP)
    assert losses.get_policy_loss_fn("bypass_mode") is POLICY_LOSS_REGISTRY["bypass_mode"]
    assert losses.get_policy_loss_fn("vanilla") is not POLICY_LOSS_REGISTRY["vanilla"]
    held = losses.get_policy_loss_fn
    session.disable()
    session.enable(RECOMPUTE)
    assert losses.get_policy_loss_fn("vanilla") is held("vanilla") is POLICY_LOSS_REGISTRY["vanilla"]
