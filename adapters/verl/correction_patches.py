"""The patches and registry entries of the corrections in verl."""

from __future__ import annotations

from jetrl_patch.adapters.base import Config, OnImport, Patch
from jetrl_patch.adapters.verl import correction_acr, correction_bypass, correction_masks, old_log_probs
from jetrl_patch.adapters.verl.correction import ACR_LOSS, drops_tokens

__all__ = ["correction_hooks", "correction_patches"]

_ALGORITHMS = "verl.trainer.ppo.core_algos"

_TRAIN_BATCH = Patch(
    module="verl.workers.engine_workers",
    attr="TrainingWorker.train_batch",
    make=correction_bypass.train_batch,
    reason="later mini-batches run on updated weights and would count as mismatch in bypass mode, and where the rollout's "
    "log-probs are the old ones",
    remove_when="verl logs the mismatch of a bypassed batch over its first mini-batch",
)

_WEIGHTS = Patch(
    module="verl.trainer.ppo.rollout_corr_helper",
    attr="compute_rollout_correction_and_rejection_mask",
    make=correction_acr.weights_and_mask,
    reason="ACR needs the ratio before truncation, and verl passes its losses only the truncated weights",
    remove_when="verl passes rollout_log_probs to its policy losses",
)

_MEASURES = Patch(
    module="verl.trainer.ppo.rollout_corr_helper",
    attr="compute_is_metrics",
    make=correction_masks.compute_is_metrics,
    reason="verl 0.9.1 raises ZeroDivisionError when a correction drops every token of a batch (of a micro-batch in bypass mode)",
    upstream="https://github.com/verl-project/verl/pull/7559",
    remove_when="verl has verl#7559",
    fixes="verl",
)

_CHECKED_LOSS = Patch(
    module="verl.workers.utils.losses",
    attr="get_policy_loss_fn",
    make=old_log_probs.get_policy_loss_fn,
    reason="where the rollout's log-probs are the old ones, the loss is the only place that sees the trainer's too, before the "
    "backward pass. Distillation's losses are not covered and are refused",
    remove_when="verl compares rollout and trainer log-probs in every policy loss",
)


def correction_patches(config: Config) -> tuple[Patch, ...]:
    """Return the patch that ends the losses' comparisons, and those that the settings need."""
    masks = (_MEASURES,) if drops_tokens(config) else ()
    checked = (_CHECKED_LOSS,) if config.skips_old_pass else ()
    return (_TRAIN_BATCH, *checked, *masks, *((_WEIGHTS,) if config.acr else ()))


def correction_hooks(config: Config) -> tuple[OnImport, ...]:
    """Return the entries for verl's registry of policy losses."""
    bypass = OnImport(
        module=_ALGORITHMS,
        name=f"POLICY_LOSS_REGISTRY[{correction_bypass.LOSS!r}]",
        apply=correction_bypass.register,
        reason="bypass mode compares rollout and trainer log-probs only in the loss, and does not log their mismatch",
        remove_when="verl logs the mismatch of a bypassed batch over its first mini-batch",
    )
    acr = OnImport(
        module=_ALGORITHMS,
        name=f"POLICY_LOSS_REGISTRY[{ACR_LOSS!r}]",
        apply=correction_acr.register,
        reason="verl has no policy loss with QuRL's adaptive clipping range",
        remove_when="verl has ACR",
    )
    return (bypass, acr) if config.acr else (bypass,)
