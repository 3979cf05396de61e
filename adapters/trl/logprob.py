"""Leave out the policy's pass for old log-probs, and compare the log-probs of rollout and trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.trl.state import Run, Sampled, mode_of, run_of
from jetrl_patch.errors import AuditError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer.audit import sample

# ---- While completions are made: the rollout's log-probs are the old ones -------------------------
# TRL corrects the mismatch by default, for which ``_generate_and_score_completions`` computes the policy's log-probs of all
# completions. In exact mode the rollout has returned them already, as lists, which TRL pads on the right.

@replacement
def generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``GRPOTrainer._generate``: keep the rollout's log-probs, if they are to stand for the policy's."""
    found, run = original(self, *args, **kwargs), run_of(self)
    if not run.audit.failed and computes_old(self) and found[4] is not None:
        run.sampled = Sampled(log_probs=found[4], model_tokens=found[2])
    return found


def computes_old(trainer: Any) -> bool:
    """Whether ``_generate_and_score_completions`` computes the policy's log-probs."""
    every = trainer.args.steps_per_generation * trainer.num_iterations
    return bool(trainer.vllm_importance_sampling_correction or trainer.args.gradient_accumulation_steps % every)


@replacement
def generate_and_score(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``GRPOTrainer._generate_and_score_completions``: compare the log-probs of a pass that ran."""
    run = run_of(self)
    if run.unchecked:
        what, found = "the forward pass of an update in exact mode", f"a step of {type(self).__qualname__} without it"
        required = "one whose log-probs are compared with the rollout's"
        fix = "call GRPOTrainer._compute_loss in your trainer, or set old_log_probs='recompute'"
        raise AuditError(explain(what, required=required, found=found, fix=fix))
    try:
        found = original(self, *args, **kwargs)
        run.unchecked = run.sampled is not None and run.sampled.taken
    finally:
        run.sampled = None
    run.sampled_at[mode_of(self)] = self._last_loaded_step
    run.compares = run.unchecked or "old_per_token_logps" not in found
    if not run.compares:
        _compare(run, found["old_per_token_logps"], found)
    return found


@replacement
def per_token_logps(
    original: Any, self: Any, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
) -> Any:
    """Wrap ``GRPOTrainer._get_per_token_logps_and_entropies``: log-probs [B, C], entropies, auxiliary loss.

    While completions are made, its first call is the policy's pass. In ``_compute_loss`` it is the update's forward pass.
    """
    run = run_of(self)
    sampled = run.sampled
    if sampled is not None and not sampled.taken:
        like, mask = input_ids[:, -logits_to_keep:], attention_mask[:, -logits_to_keep:]
        old, rows = _padded(sampled.log_probs, like), _to_audit(self, len(like))
        if rows:
            if sampled.model_tokens is not None:
                mask = mask * _padded(sampled.model_tokens, like)
            computed, *_ = original(self, model, input_ids[rows], attention_mask[rows], logits_to_keep, *args, **kwargs)
            run.audit.compare(computed, old[rows], mask[rows], session.active_config())
        if not run.audit.failed:
            sampled.taken = True
            return old, None, None
        run.sampled = None  # the whole pass runs
    found = original(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
    if run.checked is not None:
        run.unchecked = False
        if not _compare(run, found[0], run.checked):
            run.checked["old_per_token_logps"] = found[0].detach()
    return found


def _padded(rows: Sequence[Sequence[float | None]], like: Any) -> Any:
    """Lists of numbers, padded with 0 on the right to the shape of the completions' tokens [B, C]. None is NaN."""
    import torch

    padded = torch.zeros(like.shape, dtype=torch.float32)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = torch.tensor([float("nan") if value is None else value for value in values])
    return padded.to(like.device)


def _to_audit(trainer: Any, rows: int) -> list[int]:
    """The samples whose pass runs although it could be left out; none if one update sees them all."""
    updates = trainer.args.steps_per_generation * trainer.num_iterations / trainer.args.gradient_accumulation_steps
    return [] if updates <= 1 or mode_of(trainer) == "eval" else sample(rows, session.active_config().audit_fraction)


# ---- In an update: compare before its loss is computed -------------------------------------------

@replacement
def compute_loss(original: Any, self: Any, model: Any, inputs: dict[str, Any]) -> Any:
    """Wrap ``GRPOTrainer._compute_loss``: its forward pass is compared with the rollout, if their weights are the same."""
    run = run_of(self)
    current = self.state.global_step == run.sampled_at.get(mode_of(self))
    if current and run.compares and "sampling_per_token_logps" in inputs:
        run.checked = inputs
    try:
        return original(self, model, inputs)
    finally:
        run.checked = None


def _compare(run: Run, log_probs: Any, batch: Mapping[str, Any]) -> bool:
    """Compare a pass's log-probs [B, C] with the rollout's, where a batch's tokens count; outside exact mode, only measure."""
    mask = batch["completion_mask"]
    if "tool_mask" in batch:
        mask = mask * batch["tool_mask"]
    return run.audit.compare(log_probs, batch["sampling_per_token_logps"], mask, session.active_config())
