"""QuRL's adaptive clipping range (ACR) in verl, as an entry of its registry of policy losses.

The loss needs ρ before truncation, but verl passes its losses one tensor, ``rollout_is_weights``. verl therefore computes
and logs its truncated weights (``rollout_corr/*``) as usual, and the tensor is then replaced by ρ.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.adapters.base import Journal
from jetrl_patch.adapters.verl.correction import ACR_LOSS
from jetrl_patch.correction.kinds import interval

__all__ = ["policy_loss", "register", "weights_and_mask"]

#: above e^20, the largest ratio after verl's clamp
_NO_CAP = 1e9


def register(module: ModuleType, journal: Journal) -> None:
    """Add the loss to ``POLICY_LOSS_REGISTRY`` of ``verl.trainer.ppo.core_algos``."""
    journal.set_item(
        module.POLICY_LOSS_REGISTRY,
        ACR_LOSS,
        policy_loss,
        target=f"{module.__name__}.POLICY_LOSS_REGISTRY[{ACR_LOSS!r}]",
        reason="verl has no policy loss with QuRL's adaptive clipping range",
    )


def weights_and_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``compute_rollout_correction_and_rejection_mask``, which both trainers call.

    Replace its weights by the plain ratio ρ. Mask and metrics stay verl's.
    """

    def compute_rollout_correction_and_rejection_mask(
        old_log_prob: Any, rollout_log_prob: Any, response_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        weights, mask, found = original(old_log_prob, rollout_log_prob, response_mask, *args, **kwargs)
        if _on() and weights is not None:
            from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

            log_ratio = old_log_prob - rollout_log_prob
            ratio, _ = compute_rollout_correction_weights(log_ratio, response_mask, "token", _NO_CAP)
            weights.batch["rollout_is_weights"] = ratio
        return weights, mask, found

    return compute_rollout_correction_and_rejection_mask


def policy_loss(
    old_log_prob: Any,
    log_prob: Any,
    advantages: Any,
    response_mask: Any,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Any = None,
) -> tuple[Any, dict[str, Any]]:
    """Compute verl's ``vanilla`` loss with ``correction.objectives.acr_loss`` in place of its clip; all tensors are [B, T].

    ``rollout_is_weights`` is ρ without truncation. Clip ranges, dual clip, aggregation and metrics are verl's.
    """
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.utils.torch_functional import masked_mean

    from jetrl_patch.correction.objectives import acr_loss

    settings = runtime.active_config()
    _, cap = interval(settings.correction, settings.correction_bounds)
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    dual = config.get("clip_ratio_c", 3.0)
    losses, clipped = acr_loss(log_prob, old_log_prob, advantages, rollout_is_weights, cap, low, high, dual)
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    change = (log_prob - old_log_prob).detach().clamp(-20.0, 20.0)
    at_dual = (advantages < 0) & (change.exp() > dual)
    return loss, {
        "actor/pg_clipfrac": masked_mean(clipped.float(), response_mask).item(),
        "actor/ppo_kl": masked_mean(-change, response_mask).item(),
        "actor/pg_clipfrac_lower": masked_mean(at_dual.float(), response_mask).item(),
    }


def _on() -> bool:
    return runtime.active_with(lambda config: config.acr)
