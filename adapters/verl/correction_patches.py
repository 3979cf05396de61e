"""What the corrections replace in verl and enter into its registries."""

from __future__ import annotations

from jetrl_patch.adapters.base import Config, OnImport, Patch
from jetrl_patch.adapters.verl import correction_acr, correction_bypass, correction_masks
from jetrl_patch.adapters.verl.correction import ACR_LOSS, drops_tokens

__all__ = ["correction_hooks", "correction_patches"]

_ALGORITHMS = "verl.trainer.ppo.core_algos"

_TRAIN_BATCH = Patch(
    module="verl.workers.engine_workers",
    attr="TrainingWorker.train_batch",
    make=correction_bypass.train_batch,
    reason="when the weights are no longer those that sampled: the mismatch of a bypassed batch ends there",
    remove_when="verl logs the mismatch of a bypassed batch over its first mini-batch",
)

_WEIGHTS = Patch(
    module="verl.trainer.ppo.rollout_corr_helper",
    attr="compute_rollout_correction_and_rejection_mask",
    make=correction_acr.weights_and_mask,
    reason="ACR needs the ratio before it is truncated, and verl's losses get one tensor",
    remove_when="verl's policy losses get rollout_log_probs",
)

_MEASURES = Patch(
    module="verl.trainer.ppo.rollout_corr_helper",
    attr="compute_is_metrics",
    make=correction_masks.compute_is_metrics,
    reason="verl 0.9.1 divides by zero where a correction drops every token of a batch, or of a micro-batch in bypass mode",
    remove_when="verl's effective sample size of nothing is no error",
)


def correction_patches(config: Config) -> tuple[Patch, ...]:
    """In every mode what measures verl's bypass mode; with ACR what it needs; what dropping tokens needs."""
    masks = (_MEASURES,) if drops_tokens(config) else ()
    return (_TRAIN_BATCH, *masks, *((_WEIGHTS,) if config.acr else ()))


def correction_hooks(config: Config) -> tuple[OnImport, ...]:
    """Entries of verl's registry of policy losses."""
    bypass = OnImport(
        module=_ALGORITHMS,
        name=f"POLICY_LOSS_REGISTRY[{correction_bypass.LOSS!r}]",
        apply=correction_bypass.register,
        reason="in bypass mode the mismatch is seen in the loss and nowhere else",
        remove_when="verl logs the mismatch of a bypassed batch over its first mini-batch",
    )
    acr = OnImport(
        module=_ALGORITHMS,
        name=f"POLICY_LOSS_REGISTRY[{ACR_LOSS!r}]",
        apply=correction_acr.register,
        reason="QuRL's adaptive clipping range, by verl's registry",
        remove_when="verl has ACR",
    )
    return (bypass, acr) if config.acr else (bypass,)
