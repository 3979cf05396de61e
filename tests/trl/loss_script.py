"""TRL's own loss with ACR beside the formula: prints each loss type and how far the rollout is from the trainer."""

from __future__ import annotations

import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer

from jetrl_patch.adapters.trl import correction
from jetrl_patch.config import Config
from jetrl_patch.measure.corrections import acr_loss

SHAPE, CAP, LOW, HIGH = (5, 37), 1.5, 0.2, 0.28


class Trainer(GRPOTrainer):
    """TRL's loss, without models and processes around it."""

    def __init__(self, log_probs: torch.Tensor, loss_type: str) -> None:
        self.log_probs, self.loss_type = log_probs, loss_type
        self.model = torch.nn.Identity()
        self.accelerator = SimpleNamespace(
            gather=lambda value: value, reduce=lambda value, reduction: value, num_processes=1, sync_gradients=True
        )  # fmt: skip
        self.args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
        self.use_vllm = self.vllm_importance_sampling_correction = True
        self.epsilon_low, self.epsilon_high, self.beta, self.importance_sampling_level = LOW, HIGH, 0.0, "token"
        self.top_entropy_quantile, self.off_policy_mask_threshold = 1.0, None
        self.aux_loss_enabled = self._entropy_bonus_enabled = False
        self.max_completion_length, self.current_gradient_accumulation_steps = SHAPE[1], 1
        self._metrics: Any = {"train": defaultdict(list)}

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> Any:
        return self.log_probs, torch.zeros(SHAPE), None


def loss_of(config: Config, batch: dict[str, Any], log_probs: torch.Tensor, loss_type: str) -> tuple[torch.Tensor, ...]:
    own = log_probs.clone().requires_grad_()
    trainer = Trainer(own, loss_type)
    with correction.clip_of(trainer, batch, config):
        loss = trainer._compute_loss(None, dict(batch))
    assert (trainer.epsilon_low, trainer.epsilon_high) == (LOW, HIGH)
    loss.backward()
    return loss.detach(), own.grad


def by_hand(batch: dict[str, Any], log_probs: torch.Tensor, loss_type: str, rho: torch.Tensor) -> tuple[torch.Tensor, ...]:
    own, mask = log_probs.clone().requires_grad_(), batch["completion_mask"]
    advantages = batch["advantages"].unsqueeze(1).expand(SHAPE)
    losses, _ = acr_loss(own, batch["old_per_token_logps"], advantages, rho, CAP, LOW, HIGH)
    kept, tokens = losses * mask, mask.sum(-1)
    loss = {
        "grpo": lambda: (kept.sum(-1) / tokens).mean(),
        "bnpo": lambda: kept.sum() / mask.sum(),
        "dr_grpo": lambda: kept.sum() / mask.numel(),
        "dapo": lambda: kept.sum() / batch["num_items_in_batch"],
        "luspo": lambda: kept.sum(-1).mean(),
    }[loss_type]()
    loss.backward()
    return loss.detach(), own.grad


def main() -> None:
    torch.manual_seed(0)
    old = -torch.rand(SHAPE) * 3
    mask = (torch.arange(SHAPE[1]) < torch.tensor([[37], [20], [31], [1], [9]])).int()
    config = Config(precision="fp8-rollout", correction="tis", correction_bounds=CAP, acr=True)
    for loss_type, spread in itertools.product(("grpo", "bnpo", "dr_grpo", "dapo", "luspo"), (0.0, 0.8)):
        rollout = old - spread * torch.randn(SHAPE)
        rho = (old - rollout).exp()
        log_probs = old + 0.6 * torch.randn(SHAPE)
        batch = {
            "prompt_ids": torch.ones(SHAPE[0], 2), "prompt_mask": torch.ones(SHAPE[0], 2, dtype=torch.int),
            "completion_ids": mask, "completion_mask": mask, "num_items_in_batch": mask.sum(),
            "advantages": torch.randn(SHAPE[0]), "old_per_token_logps": old, "sampling_per_token_logps": rollout,
            "importance_sampling_ratio": rho.clamp(max=CAP),
        }  # fmt: skip
        found = loss_of(config, batch, log_probs, loss_type)
        plain = loss_of(Config(precision="fp8-rollout", correction="tis"), batch, log_probs, loss_type)
        if spread:
            assert not torch.equal(found[1], plain[1]), "ACR changed nothing"
            torch.testing.assert_close(found, by_hand(batch, log_probs, loss_type, rho))
        else:
            assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1]), "ACR changed what TIS leaves"
        print(f"{loss_type}/{spread}")


main()
