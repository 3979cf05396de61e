"""Old log-probs: verl's bypass mode, ``old_log_probs="rollout"``, and the old weights that asynchronous trainers restore."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jetrl_patch import session
from jetrl_patch.adapters.verl import correction, state
from jetrl_patch.adapters.verl.state import DRIVER, WORKER
from jetrl_patch.errors import AuditError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer.audit import Audit, sample

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.measure.mismatch import Mismatch


# ---- verl's bypass mode, which runs no separate forward pass for the trainer's log-probs: measure the mismatch ----
# ``old_log_probs`` are the rollout's, and only the loss sees both sides. The first mini-batch after a weight sync runs with the
# weights that sampled it, so its loss compares. The sums reach the trainer loop in the worker's report of the step's next sync,
# before verl logs.

#: verl's name of the loss, and the key of its sums in a worker's report
LOSS = "bypass_mode"


@replacement
def measured(
    original: Any, old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, *args: Any, config: Any, **kwargs: Any
) -> Any:
    """Wrap verl's loss: record the mismatch while the weights are those that sampled."""
    if session.is_active() and WORKER.measuring:
        WORKER.compared = True
        WORKER.measured.append(measure(log_prob, old_log_prob, response_mask, config.policy_loss))
    return original(old_log_prob, log_prob, advantages, response_mask, *args, config=config, **kwargs)


def measure(log_prob: Any, rollout_log_prob: Any, mask: Any, policy_loss: Any) -> tuple[Any, Any]:
    """Return the sums of the mismatch over one micro-batch, and the correction's effect (None if it has no name)."""
    from jetrl_patch.measure.mismatch import sums

    log_ratio = log_prob.detach() - rollout_log_prob
    corrected = correction.figures(policy_loss.get("rollout_correction", None), log_ratio, mask)
    return sums(log_prob.float(), rollout_log_prob.float(), mask), corrected


@replacement
def train_batch(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``TrainingWorker.train_batch``: after an optimizer step the losses no longer compare."""
    try:
        return original(self, *args, **kwargs)
    finally:
        if WORKER.compared:  # false in a critic's batch
            WORKER.measuring = WORKER.compared = False


def take_measured() -> list[tuple[Any, Any]]:
    """At a weight sync, return what was measured since the last one, and let the losses compare again."""
    found, WORKER.measured, WORKER.measuring = WORKER.measured, [], True
    return found


def bypass_figures(reports: Sequence[dict[str, Any]]) -> tuple[Any, dict[str, float]] | None:
    """Merge the workers' reports to the mismatch and the correction's metrics; None if nothing was measured."""
    parts = [part for report in reports for part in report.get(LOSS, ())]
    if not parts:
        return None
    from jetrl_patch.measure.mismatch import Applied, Sums, merge

    corrected = [part for _, part in parts if part is not None]
    metrics = merge(Applied, corrected).as_metrics() if corrected else {}
    return merge(Sums, [part for part, _ in parts]).figures(), metrics


# ---- ``old_log_probs="rollout"``: use the rollout's log-probs as the step's old ones, in both trainers of verl ----
# Both trainers fill ``old_log_probs`` in ``_compute_old_log_prob``, with a forward pass of the actor. In exact mode that pass
# computes the bits that the rollout returned, so the plugin copies ``rollout_log_probs`` and skips the pass. Two places compare:
#
# - In the worker, the policy loss of the first mini-batch after a sync: it has the trainer's log-probs, under the weights that
#   sampled, before its backward pass. The sums reach the trainer loop as in bypass mode.
# - In the trainer loop, unless a step has exactly one update: a share of the samples goes through the pass.
#
# The pass still runs for samples without log-probs or of other weights, and after a difference that did not stop the run.

#: what V0's loop logs about the pass, or computes from a comparison of the rollout's log-probs with themselves
_OF_THE_PASS = (
    "actor/entropy",
    "perf/mfu/actor_infer",
    "training/rollout_probs_diff_valid",
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_std",
    "training/rollout_actor_probs_pearson_corr",
)


@replacement
def get_policy_loss_fn(original: Any, name: str) -> Callable[..., Any]:
    """Wrap ``get_policy_loss_fn``, which ``ppo_loss`` calls for each micro-batch: the loss first compares log-probs."""
    found: Callable[..., Any] = original(name)
    return found if name == LOSS else checked(found)


def checked(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a policy loss of verl: compare ``log_prob`` with ``old_log_prob`` [B, T] while the weights are those that sampled.

    Raises AuditError before the backward pass if a token differs. With ``on_mismatch="recompute"`` it instead takes the
    micro-batch's own log-probs as the old ones, as if the pass had run.
    """

    @functools.wraps(loss)
    def policy_loss(*, old_log_prob: Any, log_prob: Any, response_mask: Any, **others: Any) -> Any:
        import torch

        own = log_prob.detach()
        # masked tokens have no rollout log-prob; their own gives a ratio of 1, which is finite in every loss
        old = torch.where(response_mask.bool(), old_log_prob, own)
        if WORKER.measuring:
            WORKER.compared = True
            if not WORKER.audit.compare(own, old_log_prob, response_mask, session.active_config()):
                old = own
        return loss(old_log_prob=old, log_prob=log_prob, response_mask=response_mask, **others)

    return policy_loss


def instead_v0(original: Callable[..., Any], trainer: Any, batch: Any) -> tuple[Any, float] | None:
    """Return the result of ``RayPPOTrainer._compute_old_log_prob`` without its pass; None if the pass must run."""
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
    # verl's loop averages the entropies, which only the pass computes
    result = tu.get_tensordict({"old_log_probs": old, "entropys": torch.full_like(old, float("nan"))})
    return DataProto.from_tensordict(result), float("nan")


def instead_v1(original: Callable[..., Any], trainer: Any, batch: Any, data: Any) -> Any:
    """Return the result of ``PPOTrainer._compute_old_log_prob`` without its pass; None if the pass must run.

    V1 keeps batches in the TransferQueue, as rows of different lengths tagged with the versions of the weights that sampled them.
    Samples restored from a checkpoint can be older than the last sync. ``data`` has their rollout's log-probs and masks.
    """
    import torch
    import transfer_queue
    from tensordict import TensorDict
    from verl.workers.utils.padding import response_to_nested

    def recomputed(rows: list[int]) -> Any:
        keys = [batch.keys[row] for row in rows]
        original(trainer, batch.select_keys(keys), {})  # the metrics of a few samples are dropped
        found = transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["old_log_probs"])
        found = found.to_padded_tensor()["old_log_probs"]
        return torch.nn.functional.pad(found, (0, mask.shape[1] - found.shape[1]))

    rows = data["response_mask"]
    data = data.to_padded_tensor()
    rollout, mask = data.get("rollout_log_probs", None), data["response_mask"]
    current = state.are_current(state.of_tags(batch.tags), unknown=False)
    if not _may_skip(rollout) or not bool(current.all()) or not _agrees(trainer, rollout, mask, recomputed):
        return None
    old = response_to_nested(torch.where(mask.bool(), rollout, 0.0), rows)
    fields = TensorDict({"old_log_probs": old}, batch_size=len(batch.keys))
    _skipped(trainer, mask, ())
    return transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def _may_skip(rollout: Any) -> bool:
    """Whether the rollout's log-probs are of the current weights: only in the first step after a sync."""
    fresh, DRIVER.fresh, DRIVER.audit = DRIVER.fresh, False, None
    return rollout is not None and fresh and not DRIVER.given_up


def _agrees(trainer: Any, rollout: Any, mask: Any, recomputed: Callable[[list[int]], Any]) -> bool:
    """Compare a share of the samples with the pass, unless the step has one update, whose loss compares all of them.

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
    """Return the number of optimizer steps over a batch of ``count`` samples; 0 while the critic warms up."""
    config, actor = trainer.config, trainer.config.actor_rollout_ref.actor
    if config.trainer.critic_warmup > trainer.global_steps:
        return 0
    return int(count // (actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n) * actor.ppo_epochs)


def _multiple(trainer: Any) -> int:
    """Return what the number of samples in a pass must be a multiple of: all ranks get equally many whole micro-batches."""
    group, rollout = trainer.actor_rollout_wg, trainer.config.actor_rollout_ref.rollout
    if "actor" not in group._dispatch_info:  # as verl's loops do to balance a batch
        group._dispatch_info["actor"] = group._query_dispatch_info("actor")
    ranks = max(group._dispatch_info["actor"]) + 1
    return ranks * (1 if rollout.log_prob_use_dynamic_bsz else int(rollout.log_prob_micro_batch_size_per_gpu))


def _skipped(trainer: Any, mask: Any, unknown: tuple[str, ...]) -> None:
    """Record a step whose old log-probs are the rollout's: verl's correction sees ratios of 1."""
    import torch

    section = trainer.config.algorithm.get("rollout_correction", None)
    DRIVER.corrected = correction.metrics(section, torch.zeros(mask.shape), mask)
    DRIVER.unknown = unknown


def _give_up() -> None:
    """Run the pass from now on. Print that once, because verl's TaskRunner shows no warnings."""
    if not DRIVER.given_up:
        print("jetrl_patch: ERROR: rollout and trainer differ; the forward pass for old log-probs runs again", flush=True)
    DRIVER.given_up = True


def take(reports: Sequence[dict[str, Any]]) -> tuple[Mismatch, dict[str, float], dict[str, float]] | None:
    """Merge what workers and trainer loop have compared since the last sync, and begin the next step.

    Returns the mismatch, the correction's metrics and the audit's metrics; None if the step's old log-probs are not the
    rollout's, or nothing was compared.
    """
    DRIVER.fresh = True
    audit, DRIVER.audit = DRIVER.audit, None
    if audit is None:
        return None
    if any(report["audit"]["differed"] for report in reports):
        _give_up()
    found = audit.merged(reports)
    return None if found is None else (found[0], DRIVER.corrected, found[1])


# ---- Weights of the last sync, which verl's asynchronous trainers restore for a moment to compute old log-probs ----
# With several updates between two syncs (``parameter_sync_step``, ``trigger_parameter_sync_step``), old log-probs are those of
# the weights that sampled. So the workers save these weights, and restore them while the pass runs:
#
#     save(0) · pass · update · save(1) · restore(0) · pass · restore(1) · update · save(2) · restore(0) · …
#
# For FSDP2 and VeOmni verl saves with ``.detach().cpu()``, which does not copy a tensor that is already on the CPU. With
# ``param_offload``, ``restore(0)`` then overwrites what ``save(1)`` saved, and ``restore(1)`` leaves the old weights in place:
# every update but the last before a sync is lost. With ``offload_policy``, and on a CPU, ``restore(0)`` restores nothing. A
# comment in verl says that callers must load the parameters to the device first; verl's callers do not.

@replacement
def save_model_to_cpu(original: Any, self: Any, n: Any) -> None:
    """Wrap ``DetachActorWorker.save_model_to_cpu``: save copies that share no memory with the parameters, and their digests."""
    _wait_for_copies()
    original(self, n)
    saved = self.cpu_saved_models[n]
    if isinstance(saved, tuple):  # FSDP2 and VeOmni
        self.cpu_saved_models[n] = _own(saved[0], _local(self.actor.engine.module)), saved[1]
    WORKER.saved[n] = _digests(self.actor.engine.module)


@replacement
def restore_model_from_cpu(original: Any, self: Any, n: Any) -> None:
    """Wrap ``DetachActorWorker.restore_model_from_cpu``: raise AuditError if the restored weights are not the saved ones."""
    _wait_for_copies()
    original(self, n)
    saved, found = WORKER.saved.get(n, {}), _digests(self.actor.engine.module)
    differing = [name for name, digest in found.items() if saved.get(name) != digest]
    if differing:
        what = f"{differing[0]}, restored for or after verl's pass for old log-probs"
        fix = "keep parameters on the GPU (param_offload=False, offload_policy=False)"
        raise AuditError(explain(what, required="the bytes that were saved", found="others; updates would be lost", fix=fix))


def _own(saved: Mapping[str, tuple[Tensor, Any]], parameters: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Any]]:
    """Return saved shards with their specs. Copy those of parameters on the CPU, which verl did not."""
    return {
        name: (shard.clone() if parameters[name].device.type == "cpu" else shard, spec)
        for name, (shard, spec) in saved.items()
    }


def _local(module: Any) -> dict[str, Tensor]:
    """Return this rank's shards of an FSDP module; nothing for Megatron's modules, which verl does copy."""
    from torch.distributed.tensor import DTensor

    named = () if isinstance(module, list) else module.named_parameters()
    return {name: (p._local_tensor if isinstance(p, DTensor) else p).detach() for name, p in named}


def _digests(module: Any) -> dict[str, int]:
    from jetrl_patch.fp8.gather import Fp8Shard
    from jetrl_patch.sync.digest import read, start

    local = _local(module)
    started = [start(shard.plain if isinstance(shard, Fp8Shard) else shard) for shard in local.values()]
    return dict(zip(local, (digest for digest, _ in read(started)), strict=True))


def _wait_for_copies() -> None:
    """Wait for the copies that ``param_offload`` makes from the GPU, before the host reads or overwrites them."""
    from verl.utils.device import get_torch_device

    get_torch_device().synchronize()
