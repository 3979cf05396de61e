"""Mismatch and sync metrics in verl's log, in every mode, with or without a correction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.verl import old_log_probs, routes, state, sync
from jetrl_patch.adapters.verl.correction import is_bypassed
from jetrl_patch.adapters.verl.correction import metrics as correction_metrics
from jetrl_patch.adapters.verl.state import DRIVER, report_key
from jetrl_patch.adapters.verl.support import select_of
from jetrl_patch.adapters.verl.yaml_settings import selector
from jetrl_patch.errors import ConfigError, NotPatchedError, explain
from jetrl_patch.measure.mismatch import Mismatch, Sums
from jetrl_patch.patching.patch import gated, replacement
from jetrl_patch.trainer.audit import Compared, hold, hold_figures, say_if_nothing, step_metrics, sync_metrics
from jetrl_patch.trainer.rules import MARK
from jetrl_patch.trainer.support import marks


@replacement
def v0_old_log_prob(original: Any, self: Any, batch: Any) -> Any:
    """Wrap ``RayPPOTrainer._compute_old_log_prob`` (trainer V0)."""
    rollout = batch.batch.get("rollout_log_probs", None)
    if rollout is None:
        without_log_probs()
        return original(self, batch)
    if session.active_config().skips_old_pass:
        taken = old_log_probs.instead_v0(original, self, batch)
        if taken is not None:
            return taken
    result = original(self, batch)
    current = state.are_current(state.of_batch(batch), unknown=state.are_of_one(self.config))
    note_mismatch(self.config, result[0].batch["old_log_probs"], rollout, batch.batch["response_mask"], current)
    return result


def without_log_probs() -> None:
    """Raise ConfigError in exact mode for samples without the rollout's log-probs, which verl's trainers accept, or warn."""
    if session.active_config().exact:
        what, required = "samples of an agent loop with align='exact'", "response_logprobs for every token, from the rollout"
        fix = "return response_logprobs in AgentLoopOutput, or use align='linear'"
        raise ConfigError(explain(what, required=required, found="none", fix=fix))
    _warn("the agent loop returns no response_logprobs, so this step has no mismatch")


@replacement
def separate_log_prob(original: Any, self: Any, batch: Any) -> Any:
    """Wrap ``SeparateRayPPOTrainer._fit_compute_log_prob``: in bypass mode, note which samples are of the current weights."""
    if is_bypassed(self.config):
        current = state.are_current(state.of_batch(batch), unknown=False)
        DRIVER.current.append((current, batch.batch["response_mask"].sum(1).tolist()))
    return original(self, batch)


@replacement
def v1_old_log_prob(original: Any, self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
    """Wrap ``PPOTrainer._compute_old_log_prob`` (trainer V1, which keeps its batches in the TransferQueue)."""
    import transfer_queue

    def fetch(*fields: str) -> Any:
        return transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))

    bypassed = is_bypassed(self.config)
    sampled = fetch("rollout_log_probs", "response_mask")
    if sampled.get("rollout_log_probs", None) is None:
        without_log_probs()
        return original(self, batch, metrics)
    if session.active_config().skips_old_pass and not bypassed:
        taken = old_log_probs.instead_v1(original, self, batch, sampled)
        if taken is not None:
            return taken
    result = original(self, batch, metrics)
    current = state.are_current(state.of_tags(batch.tags), unknown=state.are_of_one(self.config))
    if bypassed:  # old and rollout log-probs are the same tensor; the loss compares
        DRIVER.current.append((current, [int(tag.get("response_len") or 0) for tag in batch.tags]))
    else:
        fields = ("old_log_probs", "rollout_log_probs", "response_mask")
        padded = fetch(*fields).to_padded_tensor()
        old, rollout, mask = (padded[field] for field in fields)
        note_mismatch(self.config, old, rollout, mask, current)
    return result


def note_mismatch(config: Any, trainer: Any, rollout: Any, mask: Any, current: Any) -> None:
    """Compare log-probs [B, T], and keep the metrics over all batches since the last log line for the next one.

    ``current`` is a bool [B], True for samples made by the trainer's weights.
    Raises AuditError in exact mode if a token of a current sample differs and ``on_mismatch="stop"``.
    """
    DRIVER.compared.add(trainer, rollout, mask, current)
    found, of_current = DRIVER.compared.figures()
    corrected = correction_metrics(config.algorithm.get("rollout_correction", None), trainer - rollout, mask)
    corrected |= marks(select_of(selector(config)), session.active_config())
    DRIVER.metrics.update(step_metrics(found, corrected, of_current))
    hold(trainer, rollout, mask, current, session.active_config())


def note(found: Mismatch, corrected: dict[str, float]) -> None:
    """Keep what the losses of a step measured. The correction's metrics override the mismatch's.

    A loss does not know which weights made a sample. If all samples are current, this raises AuditError as ``note_mismatch``
    does, but after the update. If some are older, equality is not promised and nothing is raised.
    """
    rows, DRIVER.current = DRIVER.current, []
    stale = sum(tokens for current, counts in rows for fresh, tokens in zip(current.tolist(), counts) if not fresh)
    DRIVER.metrics.update(step_metrics(found, corrected, None if stale else found))
    if stale:
        DRIVER.metrics["jetrl/stale_fraction"] = stale / sum(sum(counts) for _, counts in rows)
    else:
        hold_figures(found, session.active_config())


def manager_update_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``CheckpointEngineManager.update_weights``: collect a report from every worker.

    verl discards what the workers return after a sync to a colocated rollout. After a sync over a checkpoint engine it merges
    their dictionaries, so each worker uses its own key. verl's ``auto_await`` inspects its caller, so it stays outermost.
    """
    from verl.utils.ray_utils import auto_await

    update_weights: Callable[..., Any] = original.__wrapped__  # type: ignore[attr-defined]
    return auto_await(gated(_collected(update_weights), update_weights, session.is_active))


@replacement
async def _collected(original: Any, self: Any, global_steps: int | None = None) -> Any:
    import ray

    if self.backend == "naive":
        results = ray.get(self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend))
        others: dict[str, Any] = {}
    else:
        if session.active_config().sync == "delta":
            await sync.announce(self, session.active_config())
        merged = await original(self, global_steps)
        results, others = split_reports(merged or {}, self.actor_wg.world_size)
    note_sync(results)
    DRIVER.version = global_steps
    return others


def split_reports(merged: dict[str, Any], workers: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Split merged results into the workers' reports (``report_key``), by rank, and verl's own metrics of the sync."""
    keys = [report_key(rank) for rank in range(workers)]
    results = [{key: merged[key]} if key in merged else {} for key in keys]
    return results, {name: value for name, value in merged.items() if name not in keys}


def note_sync(results: Sequence[Any]) -> None:
    """Keep the training workers' reports of a sync. Raises NotPatchedError if one reports nothing."""
    found = [next((result[key] for key in result or () if key.startswith(MARK)), None) for result in results]
    reports = [report for report in found if report is not None]
    if len(reports) < len(results):
        silent = [rank for rank, report in enumerate(found) if report is None]
        raise NotPatchedError(
            f"training workers {silent} are not patched. Install jetrl_patch on their nodes, pass them the JETRL_* variables "
            "and do not exclude jetrl_patch in VERL_USE_EXTERNAL_PLUGINS."
        )
    measured = old_log_probs.bypass_figures(reports)
    if measured is None and DRIVER.current:  # no loss has compared these batches
        measured = Sums().figures(), {}
    if measured is not None:
        note(*measured)
    if session.active_config().skips_old_pass and (audited := old_log_probs.take(reports)) is not None:
        mismatch, corrected, counts = audited
        note(mismatch, corrected)
        DRIVER.metrics.update(counts)
    DRIVER.metrics.update(routes.metrics(reports))
    DRIVER.metrics.update(sync_metrics(reports))
    for line in reports[0]["lines"]:
        _warn(line)


def _warn(line: str) -> None:
    """Print a line like verl's console logger: verl's TaskRunner shows no warnings."""
    print(f"jetrl_patch: WARNING: {line}", flush=True)


@replacement
def log(original: Any, self: Any, data: Any, step: Any, backend: Any = None) -> Any:
    """Wrap ``Tracking.log``: add the plugin's metrics to a training step's line, and drop those of a skipped pass.

    What the losses compare (``DRIVER.current``) arrives with the next sync.
    """
    if "training/global_step" in data:
        unknown, DRIVER.unknown = DRIVER.unknown, ()
        DRIVER.compared = Compared()
        ours = DRIVER.take()
        if "jetrl/tokens" in ours or not DRIVER.current:
            ours = say_if_nothing(ours, _warn)
        data = {**{name: value for name, value in data.items() if name not in unknown}, **ours}
    return original(self, data, step, backend)
