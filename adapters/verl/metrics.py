"""Add mismatch and sync metrics to verl's log, in every mode, with or without a correction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.adapters.verl import old_log_probs
from jetrl_patch.adapters.verl.correction import figures as correction_figures
from jetrl_patch.adapters.verl.correction import is_bypassed
from jetrl_patch.adapters.verl.correction_bypass import figures as bypassed_figures
from jetrl_patch.adapters.verl.state import DRIVER
from jetrl_patch.config import Config
from jetrl_patch.correction.mismatch import Mismatch, mismatch
from jetrl_patch.errors import ConfigError, ConflictError, NotPatchedError, explain
from jetrl_patch.gate import while_active
from jetrl_patch.trainer.marks import MARK
from jetrl_patch.trainer.mismatch import say_if_inexact, step_metrics
from jetrl_patch.trainer.report import sync_metrics


@while_active
def v0_old_log_prob(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``RayPPOTrainer._compute_old_log_prob`` (trainer V0)."""

    def _compute_old_log_prob(self: Any, batch: Any) -> Any:
        if runtime.active_config().skips_old_pass:
            taken = old_log_probs.instead_v0(original, self, batch)
            if taken is not None:
                return taken
        result = original(self, batch)
        rollout = batch.batch.get("rollout_log_probs", None)
        if rollout is None:
            _without_log_probs(runtime.active_config())
        else:
            note_mismatch(self.config, result[0].batch["old_log_probs"], rollout, batch.batch["response_mask"])
        return result

    return _compute_old_log_prob


def _without_log_probs(config: Config) -> None:
    """Report samples without log-probs, which verl's V0 trainer accepts: nothing compares the two sides.

    Raises ConfigError in exact mode, whose promise would be unproven.
    """
    if config.exact:
        raise ConfigError(
            explain(
                "samples of an agent loop with align='exact'",
                required="response_logprobs for every token, from the rollout",
                found="none",
                fix="return response_logprobs in AgentLoopOutput, or use align='linear'",
            )
        )
    print("jetrl_patch: WARNING: the agent loop returns no response_logprobs, so this step has no mismatch", flush=True)


@while_active
def v1_old_log_prob(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``PPOTrainer._compute_old_log_prob`` (trainer V1, which keeps its batches in the TransferQueue)."""

    def _compute_old_log_prob(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        bypassed = is_bypassed(self.config)
        if runtime.active_config().skips_old_pass and not bypassed:
            taken = old_log_probs.instead_v1(original, self, batch)
            if taken is not None:
                return taken
        result = original(self, batch, metrics)
        if not bypassed:  # in bypass mode the two are the same tensor
            import transfer_queue

            fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
            data = transfer_queue.kv_batch_get(
                keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
            ).to_padded_tensor()
            note_mismatch(self.config, *(data[field] for field in fields))
        return result

    return _compute_old_log_prob


def note_mismatch(config: Any, trainer: Any, rollout: Any, mask: Any) -> None:
    """Compare log-probs [B, T] and keep the metrics for the step's log line."""
    corrected = correction_figures(config.algorithm.get("rollout_correction", None), trainer - rollout, mask)
    note(mismatch(trainer, rollout, mask), {} if corrected is None else corrected.as_metrics())


def note(found: Mismatch, corrected: dict[str, float]) -> None:
    """Keep a step's metrics, where those of the correction take precedence, and warn if exact mode is not exact."""
    DRIVER.metrics.update(step_metrics(found, corrected))
    say_if_inexact(found, runtime.active_config().exact)


@while_active
def manager_update_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``CheckpointEngineManager.update_weights``: collect a report from every worker."""
    from verl.utils.ray_utils import auto_await

    async def update_weights(self: Any, global_steps: int | None = None) -> Any:
        import ray

        if self.backend != "naive":
            if runtime.active_config().quantized_rollout:
                fix = "set checkpoint_engine.backend=naive"
                raise ConflictError(
                    explain("weight sync to a quantized rollout", required="backend 'naive'", found=repr(self.backend), fix=fix)
                )
            return await original.__wrapped__(self, global_steps)  # type: ignore[attr-defined]
        results = ray.get(self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend))
        note_sync(results)
        return {}

    return auto_await(update_weights)


def note_sync(results: Sequence[Any]) -> None:
    """Keep the training workers' reports of a sync. Raises NotPatchedError if one reports nothing."""
    reports = [result[MARK] for result in results if isinstance(result, dict) and MARK in result]
    if len(reports) < len(results):
        silent = [rank for rank, result in enumerate(results) if not isinstance(result, dict) or MARK not in result]
        raise NotPatchedError(
            f"training workers {silent} are not patched. Install jetrl_patch on their nodes, pass them the JETRL_* variables "
            "and do not exclude jetrl_patch in VERL_USE_EXTERNAL_PLUGINS."
        )
    if (measured := bypassed_figures(reports)) is not None:
        note(*measured)
    if runtime.active_config().skips_old_pass and (audited := old_log_probs.take(reports)) is not None:
        found, corrected, counts = audited
        note(found, corrected)
        DRIVER.metrics.update(counts)
    DRIVER.metrics.update(sync_metrics(reports))
    for line in reports[0]["lines"]:
        print(f"jetrl_patch: WARNING: {line}", flush=True)  # like verl's console logger: verl's TaskRunner shows no warnings


@while_active
def log(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tracking.log``: add the plugin's metrics to the line of a training step; drop those of a pass that did not run."""

    def log(self: Any, data: Any, step: Any, backend: Any = None) -> Any:
        if "training/global_step" in data:
            unknown, DRIVER.unknown = DRIVER.unknown, ()
            data = {**{name: value for name, value in data.items() if name not in unknown}, **DRIVER.take()}
        return original(self, data, step, backend)

    return log
