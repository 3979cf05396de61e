"""Mismatch and sync figures into verl's own log, in every mode, with or without a correction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.adapters.verl.correction import figures as correction_figures
from jetrl_patch.adapters.verl.correction import is_bypassed
from jetrl_patch.adapters.verl.correction_bypass import figures as bypassed_figures
from jetrl_patch.adapters.verl.state import DRIVER
from jetrl_patch.correction.mismatch import Mismatch, mismatch
from jetrl_patch.errors import ConflictError, NotPatchedError
from jetrl_patch.gate import while_active
from jetrl_patch.trainer.marks import MARK
from jetrl_patch.trainer.mismatch import say_if_inexact, step_metrics
from jetrl_patch.trainer.report import sync_metrics


@while_active
def v0_old_log_prob(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``RayPPOTrainer._compute_old_log_prob`` (trainer V0)."""

    def _compute_old_log_prob(self: Any, batch: Any) -> Any:
        result = original(self, batch)
        ours = result[0].batch["old_log_probs"]
        note_mismatch(self.config, ours, batch.batch["rollout_log_probs"], batch.batch["response_mask"])
        return result

    return _compute_old_log_prob


@while_active
def v1_old_log_prob(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``PPOTrainer._compute_old_log_prob`` (trainer V1, whose batches live in the TransferQueue)."""

    def _compute_old_log_prob(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        result = original(self, batch, metrics)
        if not is_bypassed(self.config):  # there the two are the same tensor
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
    DRIVER.metrics.update(step_metrics(found, corrected))
    say_if_inexact(found, runtime.active_config().exact)


@while_active
def manager_update_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``CheckpointEngineManager.update_weights``: every worker must report, and its figures are kept."""
    from verl.utils.ray_utils import auto_await

    async def update_weights(self: Any, global_steps: int | None = None) -> Any:
        import ray

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
    reports = [result[MARK] for result in results if isinstance(result, dict) and MARK in result]
    if len(reports) < len(results):
        silent = [rank for rank, result in enumerate(results) if not isinstance(result, dict) or MARK not in result]
        raise NotPatchedError(
            f"training worker {silent} is not patched; install jetrl_patch on its node, give it the JETRL_* variables "
            f"and let verl load its plugins (VERL_USE_EXTERNAL_PLUGINS)"
        )
    if (measured := bypassed_figures(reports)) is not None:
        note(*measured)
    DRIVER.metrics.update(sync_metrics(reports))
    for line in reports[0]["lines"]:
        print(f"jetrl_patch: WARNING: {line}", flush=True)  # as verl's console logger: its TaskRunner shows no warnings


@while_active
def log(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``Tracking.log``: the line of a training step also has our figures."""

    def log(self: Any, data: Any, step: Any, backend: Any = None) -> Any:
        if "training/global_step" in data:
            data = {**data, **DRIVER.take()}
        return original(self, data, step, backend)

    return log
