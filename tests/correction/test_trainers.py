"""One meaning of each correction: the gradient of a batch is the same in verl's two trainers and in OpenRLHF."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jetrl_patch import session
from jetrl_patch.config import Config
from jetrl_patch.config.corrections import KINDS
from jetrl_patch.measure.corrections import correct

pytest.importorskip("verl")
pytest.importorskip("openrlhf")

#: drop or cut some tokens of the batch below, and some sequences
BOUNDS = {"tis": (1.1,), "seq-tis": (1.1,), "mis": (1.1,), "seq-mis": (1.1,), "geo-mis": (0.99, 1.02), "icepop": (0.9, 1.1)}
#: module from which each of verl's trainers takes the function
TRAINERS = {"V0": "verl.trainer.ppo.rollout_corr_helper", "V1": "verl.trainer.ppo.v1.trainer_base"}


def batch() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    old = -3 * torch.rand(8, 12, generator=random)
    mask = torch.arange(12).expand(8, 12) < torch.randint(1, 13, (8, 1), generator=random)
    advantages = torch.randn(8, 1, generator=random).expand(8, 12) * mask
    rollout = old + 0.1 * torch.randn(8, 12, generator=random)
    return {"old": old, "rollout": rollout, "mask": mask.long(), "advantages": advantages}


def of_verl(name: str, kind: str, given: dict[str, torch.Tensor]) -> torch.Tensor:
    from omegaconf import OmegaConf
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.workers.config import FSDPActorConfig

    from jetrl_patch.adapters.verl import correction

    function = importlib.import_module(TRAINERS[name]).compute_rollout_correction_and_add_to_batch
    there = OmegaConf.create(correction._fields(session.active_config()))
    data = DataProto.from_dict({f"{key}_log_probs": given[key] for key in ("old", "rollout")} | {"response_mask": given["mask"]})
    data, _ = function(data, there)
    mask = data.batch["response_mask"]
    loss_mask = {"V0": mask, "V1": given["mask"]}[name]  # V1 stores it at the rollout
    actor = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2)
    actor.global_batch_info.update({"dp_size": 1, "batch_num_tokens": int(loss_mask.sum()), "global_batch_size": 8})
    log_prob = given["old"].clone().requires_grad_()
    weights = data.batch.get("rollout_is_weights", None)
    loss, _ = compute_policy_loss_vanilla(given["old"], log_prob, given["advantages"], mask, "token-mean", actor, weights)
    (found,) = torch.autograd.grad(loss, log_prob)
    return found


def of_openrlhf(kind: str, given: dict[str, torch.Tensor]) -> torch.Tensor:
    from openrlhf.models.loss import PolicyLoss

    from jetrl_patch.adapters.openrlhf import correction

    loss = PolicyLoss(**correction.wanted(session.active_config()))
    log_prob, tokens = given["old"].clone().requires_grad_(), int(given["mask"].sum())
    found = loss(
        log_prob, given["old"], given["advantages"], action_mask=given["mask"], rollout_log_probs=given["rollout"],
        batch_num_tokens=tokens, global_batch_size=8,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(found[0], log_prob)
    return gradient


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
@pytest.mark.parametrize("trainer", [*TRAINERS, "OpenRLHF"])
def test_a_gradient_is_the_weighted_sum_over_all_tokens_of_the_batch(trainer: str, kind: str) -> None:
    """Dropped tokens have weight 0 and are counted: the scale of what is left does not depend on how much is dropped."""
    session.enable(Config(precision="fp8-rollout", correction=kind, correction_bounds=BOUNDS[kind]))
    given = batch()
    expected = correct(kind, given["old"] - given["rollout"], given["mask"], BOUNDS[kind])
    assert 0 < expected.outside.sum() < given["mask"].sum()
    wanted = -expected.weights * given["advantages"] / given["mask"].sum()
    found = of_openrlhf(kind, given) if trainer == "OpenRLHF" else of_verl(trainer, kind, given)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("trainer", [*TRAINERS, "OpenRLHF"])
def test_of_a_batch_that_is_dropped_the_gradient_is_0(trainer: str) -> None:
    session.enable(Config(precision="fp8-rollout", correction="geo-mis"))
    given = batch()
    given["rollout"] = given["old"] - 0.5
    found = of_openrlhf("geo-mis", given) if trainer == "OpenRLHF" else of_verl(trainer, "geo-mis", given)
    assert torch.equal(found, torch.zeros_like(found))


def test_the_function_is_wrapped_once() -> None:
    """V1's module may hold the wrapped function of the helper's, which is then wrapped again."""
    from jetrl_patch.adapters.verl import correction

    def original(batch: Any, _: Any) -> Any:
        batch.batch["response_mask"] = torch.tensor([[1, 0]])
        return batch, {}

    for function in (correction.add_to_batch(original), correction.add_to_batch(correction.add_to_batch(original))):
        found, _ = function(SimpleNamespace(batch={"response_mask": torch.tensor([[1, 1]])}), None)
        assert found.batch["response_mask"].tolist() == [[1, 1]] and found.batch["rollout_is_weights"].tolist() == [[1.0, 0.0]]
