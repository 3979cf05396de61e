"""Old log-probs without a pass of the trainer: ``old_log_probs="rollout"``, and verl's bypass mode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jetrl_patch import session
from jetrl_patch.adapters.verl import state
from jetrl_patch.adapters.verl.correction import figures as correction_figures
from jetrl_patch.adapters.verl.state import DRIVER, WORKER
from jetrl_patch.registry import Journal
from jetrl_patch.trainer.audit import Audit, audited_metrics, sample

if TYPE_CHECKING:
    from jetrl_patch.measure.mismatch import Mismatch

__all__ = [
    "AUDIT", "LOSS", "bypass_figures", "get_policy_loss_fn", "hand_over", "instead_v0", "instead_v1", "measure",
    "register_bypass", "take", "train_batch",
]  # fmt: skip


# ---- Measure the mismatch in verl's bypass mode, which runs no separate forward pass for the trainer's log-probs
# In this mode ``old_log_probs`` are the rollout's, and the loss is the first place that sees both. The first mini-batch after
# a weight sync is scored with the weights that sampled it. Sums over it reach the trainer loop in the report of the next sync,
# which ends the same step.

#: verl's name of the loss; also the key of the sums in a worker's report
LOSS = "bypass_mode"


def register_bypass(module: ModuleType, journal: Journal) -> None:
    """Wrap the bypass loss in ``POLICY_LOSS_REGISTRY`` of ``verl.trainer.ppo.core_algos``."""
    journal.set_item(
        module.POLICY_LOSS_REGISTRY,
        LOSS,
        measured(module.POLICY_LOSS_REGISTRY[LOSS]),
        target=f"{module.__name__}.POLICY_LOSS_REGISTRY[{LOSS!r}]",
        reason="in bypass mode only the loss sees rollout and trainer log-probs, and it does not log their mismatch",
        remove_when="verl's bypass_mode loss logs the mismatch of rollout and trainer log-probs, over the first mini-batch of "
        "a step only",
    )


def measured(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap verl's loss: record the mismatch while the trainer still has the weights that sampled."""

    def compute_policy_loss_bypass_mode(
        old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, *args: Any, config: Any, **kwargs: Any
    ) -> Any:
        if session.is_active() and WORKER.measuring:
            WORKER.compared = True
            WORKER.measured.append(measure(log_prob, old_log_prob, response_mask, config.policy_loss))
        return original(old_log_prob, log_prob, advantages, response_mask, *args, config=config, **kwargs)

    return compute_policy_loss_bypass_mode


def measure(log_prob: Any, rollout_log_prob: Any, mask: Any, policy_loss: Any) -> tuple[Any, Any]:
    """Sum the mismatch, and the effect of the correction (None if it has no name), over one micro-batch."""
    from jetrl_patch.measure.mismatch import sums

    log_ratio = log_prob.detach() - rollout_log_prob
    corrected = correction_figures(policy_loss.get("rollout_correction", None), log_ratio, mask)
    return sums(log_prob.float(), rollout_log_prob.float(), mask), corrected


def train_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``TrainingWorker.train_batch``: losses stop comparing once the optimizer step has changed the weights."""

    def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            if WORKER.compared:  # not in a critic's batch
                WORKER.measuring = WORKER.compared = False

    return train_batch


def hand_over() -> list[tuple[Any, Any]]:
    """At a weight sync, return what was measured since the last one, and measure the next mini-batch again."""
    found, WORKER.measured, WORKER.measuring = WORKER.measured, [], True
    return found


def bypass_figures(reports: Sequence[dict[str, Any]]) -> tuple[Any, dict[str, float]] | None:
    """Merge the workers' reports into the mismatch and the correction's metrics; None if nothing was measured."""
    parts = [part for report in reports for part in report.get(LOSS, ())]
    if not parts:
        return None
    from jetrl_patch.measure.mismatch import Applied, Sums, merge

    corrected = [part for _, part in parts if part is not None]
    metrics = merge(Applied, corrected).as_metrics() if corrected else {}
    return merge(Sums, [part for part, _ in parts]).figures(), metrics


# ---- Take the rollout's log-probs for a step's old ones (``old_log_probs="rollout"``), in both trainers of verl
# Both trainers fill ``old_log_probs`` in ``_compute_old_log_prob``, by a forward pass of the actor. In exact mode that pass
# computes the bits that the rollout returned, so ``rollout_log_probs`` are copied and the pass is left out. Two places compare:
#
# - in the worker, the policy loss of the first mini-batch after a sync, which runs with the weights that sampled. It has the
#   trainer's log-probs before its backward pass. The sums reach the trainer loop in the report of the next sync;
# - in the trainer loop, where a step has another number of updates than one: a share of the samples goes through the pass.
#
# The pass runs as always for samples without log-probs or of other weights, and after a difference that did not stop the run.
# verl's bypass mode has no pass; ``correction_bypass`` measures it.

#: key of ``Audit.report`` in a worker's report
AUDIT = "audit"

#: what V0's loop logs of a pass: figures of the pass itself, and of a comparison that would be of a tensor with itself
_OF_THE_PASS = (
    "actor/entropy",
    "perf/mfu/actor_infer",
    "training/rollout_probs_diff_valid",
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_std",
    "training/rollout_actor_probs_pearson_corr",
)


# the worker


def get_policy_loss_fn(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_policy_loss_fn``, which ``ppo_loss`` calls for each micro-batch, so that its loss compares log-probs first."""

    def get_policy_loss_fn(name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = original(name)
        return found if name == LOSS else checked(found)

    return get_policy_loss_fn


def checked(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a policy loss of verl: compare ``log_prob`` with ``old_log_prob`` [B, T] while the weights are those that sampled.

    Raises AuditError before the backward pass if a token differs; with ``on_mismatch="recompute"`` the micro-batch then takes
    its own log-probs for the old ones. They are what the pass would give.
    """

    @functools.wraps(loss)
    def policy_loss(*, old_log_prob: Any, log_prob: Any, response_mask: Any, **others: Any) -> Any:
        import torch

        own = log_prob.detach()
        # where no token counts, the rollout has no log-prob; a ratio of one is finite there in every loss
        old = torch.where(response_mask.bool(), old_log_prob, own)
        if WORKER.measuring:
            WORKER.compared = True
            if not WORKER.audit.compare(own, old_log_prob, response_mask, session.active_config()):
                old = own
        return loss(old_log_prob=old, log_prob=log_prob, response_mask=response_mask, **others)

    return policy_loss


# the trainer loop


def instead_v0(original: Callable[..., Any], trainer: Any, batch: Any) -> tuple[Any, float] | None:
    """Return what ``RayPPOTrainer._compute_old_log_prob`` would, without its pass; None if the pass must run."""
    import torch
    from verl.protocol import DataProto
    from verl.utils import tensordict_utils as tu

    rollout, mask = batch.batch.get("rollout_log_probs", None), batch.batch["response_mask"]

    def recomputed(rows: list[int]) -> Any:
        part = batch[rows]
        lengths = batch.meta_info["global_token_num"]  # one per sample
        part.meta_info = {**batch.meta_info, "global_token_num": [lengths[row] for row in rows]}
        return original(trainer, part)[0].batch["old_log_probs"]

    if not _may_skip(rollout) or not _agrees(trainer, rollout, mask, recomputed):
        return None
    old = torch.where(mask.bool(), rollout, 0.0)
    _skipped(trainer, mask, _OF_THE_PASS)
    # verl's loop takes a mean over the entropies; it must not find one
    result = tu.get_tensordict({"old_log_probs": old, "entropys": torch.full_like(old, float("nan"))})
    return DataProto.from_tensordict(result), float("nan")


def instead_v1(original: Callable[..., Any], trainer: Any, batch: Any) -> Any:
    """Return what ``PPOTrainer._compute_old_log_prob`` would, without its pass; None if the pass must run.

    V1 keeps its batches in the TransferQueue, as rows of different lengths, and tags each with the steps of the weights that
    sampled it. Samples can be older than the last sync there: those that a checkpoint brought back.
    """
    import torch
    import transfer_queue
    from tensordict import TensorDict
    from verl.workers.utils.padding import response_to_nested

    def fetch(keys: list[str], *fields: str) -> Any:
        return transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(fields))

    def recomputed(rows: list[int]) -> Any:
        keys = [batch.keys[row] for row in rows]
        original(trainer, batch.select_keys(keys), {})  # drops the metrics, which are those of a sample
        found = fetch(keys, "old_log_probs").to_padded_tensor()["old_log_probs"]
        return torch.nn.functional.pad(found, (0, mask.shape[1] - found.shape[1]))

    data = fetch(batch.keys, "rollout_log_probs", "response_mask")
    rows = data["response_mask"]
    data = data.to_padded_tensor()
    rollout, mask = data.get("rollout_log_probs", None), data["response_mask"]
    current = state.are_current(state.of_tags(batch.tags), unknown=False)
    if not _may_skip(rollout) or not bool(current.all()):
        return None
    if not _agrees(trainer, rollout, mask, recomputed):
        return None
    old = response_to_nested(torch.where(mask.bool(), rollout, 0.0), rows)
    fields = TensorDict({"old_log_probs": old}, batch_size=len(batch.keys))
    _skipped(trainer, mask, ())
    return transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def _may_skip(rollout: Any) -> bool:
    """Whether there are log-probs of the current weights to take. After this step there are none until the next sync."""
    fresh, DRIVER.fresh, DRIVER.audit = DRIVER.fresh, False, None
    return rollout is not None and fresh and not DRIVER.given_up


def _agrees(trainer: Any, rollout: Any, mask: Any, recomputed: Callable[[list[int]], Any]) -> bool:
    """Compare a share of the samples with the pass, where not every update of the step is the one that compares.

    Raises AuditError if a token differs and ``on_mismatch="stop"``.
    """
    config = session.active_config()
    DRIVER.audit = Audit()
    count = len(mask)
    if _updates(trainer, count) == 1:
        return True
    rows = sample(count, config.audit_fraction, _multiple(trainer))
    if not rows:
        return True
    names = [f"sample {row}" for row in rows]
    if DRIVER.audit.compare(recomputed(rows), rollout[rows], mask[rows], config, names):
        return True
    DRIVER.audit = None
    _give_up()
    return False


def _updates(trainer: Any, count: int) -> int:
    """The optimizer steps over a batch of ``count`` samples; none while the critic warms up."""
    config, actor = trainer.config, trainer.config.actor_rollout_ref.actor
    if config.trainer.critic_warmup > trainer.global_steps:
        return 0
    return int(count // (actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n) * actor.ppo_epochs)


def _multiple(trainer: Any) -> int:
    """What the number of samples in a pass must be a multiple of: every rank gets as many, in whole micro-batches."""
    group, rollout = trainer.actor_rollout_wg, trainer.config.actor_rollout_ref.rollout
    if "actor" not in group._dispatch_info:  # as verl's loops do to balance a batch
        group._dispatch_info["actor"] = group._query_dispatch_info("actor")
    ranks = max(group._dispatch_info["actor"]) + 1
    return ranks * (1 if rollout.log_prob_use_dynamic_bsz else int(rollout.log_prob_micro_batch_size_per_gpu))


def _skipped(trainer: Any, mask: Any, unknown: tuple[str, ...]) -> None:
    """Note that this step's old log-probs are the rollout's, so verl's correction finds ratios of one."""
    import torch

    section = trainer.config.algorithm.get("rollout_correction", None)
    corrected = correction_figures(section, torch.zeros(mask.shape), mask)
    DRIVER.corrected = {} if corrected is None else corrected.as_metrics()
    DRIVER.unknown = unknown


def _give_up() -> None:
    """Let the pass run until the end of the run, and print it once: verl's TaskRunner shows no warnings."""
    if not DRIVER.given_up:
        print("jetrl_patch: ERROR: rollout and trainer differ; the forward pass for old log-probs runs again", flush=True)
    DRIVER.given_up = True


def take(reports: Sequence[dict[str, Any]]) -> tuple[Mismatch, dict[str, float], dict[str, float]] | None:
    """Merge what workers and trainer loop compared since the last sync; begin the next step.

    Returns:
        The mismatch, the correction's metrics and the audit's; None if the step's old log-probs are not the rollout's, or
        nothing was compared.
    """
    DRIVER.fresh = True
    audit, DRIVER.audit = DRIVER.audit, None
    if audit is None:
        return None
    parts = [report[AUDIT] for report in reports]
    if any(part["differed"] for part in parts):
        _give_up()
    found = audited_metrics([audit.take(), *(part["sums"] for part in parts)])
    return None if found is None else (found[0], DRIVER.corrected, found[1])
