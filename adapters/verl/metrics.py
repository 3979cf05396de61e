"""Mismatch and sync figures into verl's own log, in every mode, with or without a correction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.adapters.verl.correction import figures as correction_figures
from jetrl_patch.adapters.verl.correction import is_bypassed
from jetrl_patch.adapters.verl.correction_bypass import figures as bypassed_figures
from jetrl_patch.adapters.verl.settings import MARK
from jetrl_patch.adapters.verl.state import DRIVER
from jetrl_patch.correction.mismatch import Mismatch, mismatch
from jetrl_patch.errors import ConflictError, NotPatchedError

logger = logging.getLogger(__name__)

#: of a step whose correction is none, or has no name here
UNCORRECTED = {"jetrl/clipped_fraction": 0.0, "jetrl/masked_fraction": 0.0}


def v0_old_log_prob(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``RayPPOTrainer._compute_old_log_prob`` (trainer V0)."""

    def _compute_old_log_prob(self: Any, batch: Any) -> Any:
        result = original(self, batch)
        if runtime.is_active():
            ours = result[0].batch["old_log_probs"]
            note_mismatch(self.config, ours, batch.batch["rollout_log_probs"], batch.batch["response_mask"])
        return result

    return _compute_old_log_prob


def v1_old_log_prob(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``PPOTrainer._compute_old_log_prob`` (trainer V1, whose batches live in the TransferQueue)."""

    def _compute_old_log_prob(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        result = original(self, batch, metrics)
        if runtime.is_active() and not is_bypassed(self.config):  # there the two are the same tensor
            import transfer_queue

            fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
            data = transfer_queue.kv_batch_get(
                keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
            ).to_padded_tensor()
            note_mismatch(self.config, *(data[field] for field in fields))
        return result

    return _compute_old_log_prob


def note_mismatch(config: Any, trainer: Any, rollout: Any, mask: Any) -> None:
    """Compare log-probs ``[batch, response]`` and keep the figures for the step's line in the log."""
    corrected = correction_figures(config.algorithm.get("rollout_correction", None), trainer - rollout, mask)
    note(mismatch(trainer, rollout, mask), {} if corrected is None else corrected.as_metrics())


def note(found: Mismatch, corrected: dict[str, float]) -> None:
    """Keep the figures of a step, those of its correction above the plain ones; say so where exact is not exact."""
    DRIVER.metrics.update({**found.as_metrics(), **UNCORRECTED, **corrected})
    if runtime.active_config().exact and found.tokens and found.bit_equal_fraction != 1.0:
        logger.error(
            "jetrl_patch: exact mode is not exact: %.4f of %d tokens bit-equal, mean |dlogp| %.3e, max %.3e",
            found.bit_equal_fraction,
            found.tokens,
            found.logp_abs_diff_mean,
            found.logp_abs_diff_max,
        )


def manager_update_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``CheckpointEngineManager.update_weights``: every worker must report, and its figures are kept."""
    from verl.utils.ray_utils import auto_await

    async def update_weights(self: Any, global_steps: int | None = None) -> Any:
        import ray

        if not runtime.is_active():
            return await original.__wrapped__(self, global_steps)  # type: ignore[attr-defined]
        if self.backend != "naive":
            if runtime.active_config().quantized_rollout:
                raise ConflictError(f"checkpoint_engine.backend={self.backend!r} sends BF16; use 'naive' with FP8")
            return await original.__wrapped__(self, global_steps)  # type: ignore[attr-defined]
        results = ray.get(self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend))
        note_sync(results)
        return {}

    return auto_await(update_weights)


def note_sync(results: Sequence[Any]) -> None:
    """Keep what the training workers report of a sync. Raises NotPatchedError when one reports nothing."""
    reports = [result.get(MARK) if isinstance(result, dict) else None for result in results]
    silent = [rank for rank, report in enumerate(reports) if report is None]
    if silent:
        raise NotPatchedError(
            f"training worker {silent} is not patched; install jetrl_patch on its node, give it the JETRL_* variables "
            f"and let verl load its plugins (VERL_USE_EXTERNAL_PLUGINS)"
        )
    first = reports[0]
    assert first is not None
    if (measured := bypassed_figures([report for report in reports if report])) is not None:
        note(*measured)
    names = ("sync_bytes", "sync_bytes_bf16", "sync_bytes_total", "quantized_layers")
    scaling = [name for name in ("loss_scale", "skipped_steps") if name in first]  # the same on every rank
    DRIVER.metrics.update({f"jetrl/{name}": first[name] for name in (*names, *scaling)})
    DRIVER.metrics.update(first["monitor"])
    for line in first["lines"]:
        print(f"jetrl_patch: WARNING: {line}", flush=True)  # as verl's console logger: its TaskRunner shows no warnings
    DRIVER.metrics["jetrl/sync_seconds"] = max(report["sync_seconds"] for report in reports if report)


def log(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``Tracking.log``: the line of a training step also has our figures."""

    def log(self: Any, data: Any, step: Any, backend: Any = None) -> Any:
        if runtime.is_active() and "training/global_step" in data:
            data = {**data, **DRIVER.metrics}
            DRIVER.metrics = {}
        return original(self, data, step, backend)

    return log
