"""ACR and bypass mode in verl: the loss equals the formula, and verl compares and logs what it applied."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from jetrl_patch import session
from jetrl_patch.adapters.verl import correction, metrics, old_log_probs, state
from jetrl_patch.config import Config
from jetrl_patch.measure.corrections import correct


def actor(**changes: Any) -> Any:
    values = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0, **changes}
    found = SimpleNamespace(**values, global_batch_info={"dp_size": 1}, get=lambda name, default: values[name])
    return found


def random_batch(seed: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    old = -torch.rand(6, 9) * 3
    mask = torch.rand(6, 9) < 0.7
    mask[2] = False
    return old, old + torch.randn(6, 9) * 0.4, old - torch.randn(6, 9), torch.randn(6, 9), mask


def test_acrs_loss_in_verl_is_the_formula_and_its_gradient() -> None:
    from verl.trainer.ppo.core_algos import agg_loss

    from jetrl_patch.measure.corrections import acr_loss

    old, log_prob, rollout, advantages, mask = random_batch()
    rho = (old - rollout).exp() * mask
    session.enable(Config(precision="bf16", correction="tis", correction_bounds=1.5, acr=True))
    ours, theirs = log_prob.clone().requires_grad_(), log_prob.clone().requires_grad_()
    found, logged = correction.policy_loss(old, ours, advantages, mask, config=actor(), rollout_is_weights=rho)
    per_token, _ = acr_loss(theirs, old, advantages, rho, 1.5, 0.2, 0.28, 3.0)
    expected = agg_loss(per_token, mask, "token-mean")
    found.backward()
    expected.backward()
    assert torch.equal(found, expected) and torch.equal(ours.grad, theirs.grad)
    assert set(logged) == {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"}


def test_acr_without_a_mismatch_is_verls_own_loss_bit_for_bit() -> None:
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    old, log_prob, _, advantages, mask = random_batch(1)
    session.enable(Config(precision="bf16", correction="tis", acr=True))
    arguments = (old, log_prob, advantages, mask, "token-mean", actor())
    ours, logged = correction.policy_loss(*arguments, mask.float())
    theirs, expected = compute_policy_loss_vanilla(*arguments, mask.float())
    assert torch.equal(ours, theirs) and logged == pytest.approx(expected)


@pytest.mark.parametrize("module", ["rollout_corr_helper", "v1.trainer_base"])
def test_acr_gets_the_plain_ratio_and_verl_logs_the_truncated_one(module) -> None:
    """Through each trainer's function: V0 looks it up where it is defined, V1 where it is imported."""
    import importlib

    from verl.protocol import DataProto
    from verl.trainer.ppo import core_algos

    before = dict(core_algos.POLICY_LOSS_REGISTRY)
    session.enable(Config(precision="bf16", correction="tis", acr=True))
    assert core_algos.get_policy_loss_fn(correction.ACR_LOSS) is correction.policy_loss
    trainer = importlib.import_module(f"verl.trainer.ppo.{module}")
    old, _, rollout, _, mask = random_batch(2)
    there = OmegaConf.create({"rollout_is": "token", "rollout_is_threshold": 2.0})

    def weights_and_figures() -> Any:
        batch = DataProto.from_dict({"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask.long()})
        found, logged = trainer.compute_rollout_correction_and_add_to_batch(batch, there)
        return found.batch["rollout_is_weights"], logged

    found, logged = weights_and_figures()
    torch.testing.assert_close(found, (old - rollout).exp() * mask)
    session.disable()
    truncated, expected = weights_and_figures()
    torch.testing.assert_close(truncated, correct("tis", old - rollout, mask, (2.0,)).weights)
    assert not torch.equal(found, truncated) and logged == expected
    assert before == core_algos.POLICY_LOSS_REGISTRY and correction.ACR_LOSS not in before


# bypass mode


def test_in_bypass_mode_the_first_mini_batch_after_a_sync_is_measured() -> None:
    from verl.trainer.ppo import core_algos

    from jetrl_patch.measure.mismatch import applied, mismatch

    session.enable(Config(precision="bf16"))
    there = OmegaConf.create({"rollout_is": "sequence", "rollout_is_threshold": 3.0, "loss_type": "reinforce"})
    config = actor(policy_loss={"rollout_correction": there})
    loss = core_algos.get_policy_loss_fn("bypass_mode")
    _, log_prob, rollout, advantages, mask = random_batch(3)

    def mini_batch(parts: list[slice]) -> None:
        for part in parts:
            loss(
                old_log_prob=rollout[part], log_prob=log_prob[part], advantages=advantages[part],
                response_mask=mask[part], loss_agg_mode="token-mean", config=config, rollout_is_weights=None,
            )  # fmt: skip

    train_batch = old_log_probs.train_batch(lambda self, parts: mini_batch(parts))
    assert old_log_probs.take_measured() == []
    train_batch(None, [])  # a critic's
    train_batch(None, [slice(0, 2), slice(3, 6)])
    train_batch(None, [slice(0, 6)])  # the weights have changed
    rank = {old_log_probs.LOSS: old_log_probs.take_measured()}
    assert old_log_probs.take_measured() == []
    found, logged = old_log_probs.bypass_figures([rank, {old_log_probs.LOSS: []}])
    seen = torch.tensor([0, 1, 3, 4, 5])
    expected = mismatch(log_prob[seen], rollout[seen], mask[seen])
    assert found.as_metrics() == pytest.approx(expected.as_metrics(), rel=1e-9)
    weights = applied("seq-tis", (log_prob - rollout)[seen], mask[seen], (3.0,))
    assert logged == pytest.approx(weights.as_metrics(), rel=1e-9)
    assert old_log_probs.bypass_figures([{old_log_probs.LOSS: []}]) is None


def test_in_bypass_mode_v1_compares_no_tensor_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    session.enable(Config(precision="bf16"))
    queue = SimpleNamespace(kv_batch_get=lambda **_: {"rollout_log_probs": torch.zeros(0, 1)})
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    wrapped = metrics.v1_old_log_prob(lambda self, batch, found: "done")
    trainer = SimpleNamespace(config=OmegaConf.create({"algorithm": {"rollout_correction": {"bypass_mode": True}}}))
    assert wrapped(trainer, SimpleNamespace(tags=[], keys=[], partition_id="train"), {}) == "done" and state.DRIVER.metrics == {}
