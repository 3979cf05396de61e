"""Leave out the policy's pass for old log-probs, and compare the log-probs of rollout and trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.trl import correction, support
from jetrl_patch.adapters.trl.state import ENGINES, OLD, ROLLOUT, Sampled, kind_of, mode_of, run_of
from jetrl_patch.errors import AuditError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer.audit import sample

# ---- While completions are made: the rollout's log-probs are the old ones -------------------------
# GRPO corrects the mismatch by default, for which ``_generate_and_score_completions`` computes the policy's log-probs of all
# completions; RLOO needs them for its ratio and its KL penalty. In exact mode the rollout has returned them already, as lists,
# which TRL pads on the right.

@replacement
def generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``GRPOTrainer._generate``: keep the rollout's log-probs for the policy's pass, and join what turns were drawn from."""
    found, run = original(self, *args, **kwargs), run_of(self)
    if computes_old(self) and found[4] is not None:
        run.sampled = Sampled(found[4], model_tokens=found[2])
    if run.drawn is not None and found[2] is not None:
        run.drawn = support.of_turns(run.calls, *found[:3])
    return found


@replacement
def engine_generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``VLLMGeneration.generate``: keep the log-probs that ``RLOOTrainer`` leaves, one turn being its whole rollout.

    And in exact mode what each token was drawn from, which both trainers leave.
    """
    found, run = original(self, *args, **kwargs), ENGINES.get(self)
    if run is not None and session.active_config().exact:
        run.drawn = support.of_completions(run, found[1], found[3])
        if run.drawn is not None:
            run.calls.append((list(kwargs["prompts"]), list(found[1]), run.drawn))  # TRL changes these lists for the next turn
    if run is not None and run.keeps_log_probs:
        run.sampled = Sampled([[of_token[0] for of_token in row] for row in found[2]])
    return found


def computes_old(trainer: Any) -> bool:
    """Whether ``_generate_and_score_completions`` computes the policy's log-probs. RLOO always does, and has no correction."""
    every = trainer.args.steps_per_generation * trainer.num_iterations
    corrects = getattr(trainer, "vllm_importance_sampling_correction", True)
    return bool(corrects or trainer.args.gradient_accumulation_steps % every)


@replacement
def generate_and_score(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``_generate_and_score_completions``: give the batch what the updates compare with."""
    run = run_of(self)
    if run.unchecked:
        what, found = "the forward pass of an update in exact mode", f"a step of {type(self).__qualname__} without it"
        required = "one whose log-probs are compared with the rollout's"
        fix = f"call {kind_of(self)}._compute_loss in your trainer, or set old_log_probs='recompute'"
        raise AuditError(explain(what, required=required, found=found, fix=fix))
    try:
        found = original(self, *args, **kwargs)
        sampled = run.sampled
        support.add_to(found, run.drawn)
    finally:
        run.sampled = run.drawn = None
        run.calls.clear()
    if sampled is not None and ROLLOUT not in found:  # RLOO's
        found[ROLLOUT] = _padded(sampled.log_probs, found["completion_ids"])
    run.unchecked = sampled is not None and sampled.left_out
    if OLD in found and ROLLOUT in found and not run.unchecked:
        log_ratio = found[OLD] - found[ROLLOUT]
        applied = correction.weigh(self, found, log_ratio, _counted(found), session.active_config())
        if applied is not None:
            run.corrected.append(applied)
    if self.use_vllm:
        run.sampled_at[mode_of(self)] = self._last_loaded_step
    run.compares = run.unchecked or sampled is None or not sampled.compared
    return found


@replacement
def per_token_logps(
    original: Any, self: Any, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
) -> Any:
    """Wrap ``_get_per_token_logps_and_entropies``: log-probs [B, C], entropies, auxiliary loss.

    While completions are made, its first call is the policy's pass. In ``_compute_loss`` it is the update's forward pass.
    """
    run, config = run_of(self), session.active_config()
    sampled = run.sampled

    def compute(rows: Any = slice(None)) -> Any:
        ids, seen = input_ids[rows], attention_mask[rows]
        with support.drawn_from(run, ids, seen, logits_to_keep, rows):
            return original(self, model, ids, seen, logits_to_keep, *args, **kwargs)

    if sampled is not None and not sampled.compared:
        sampled.compared = True
        like, mask = input_ids[:, -logits_to_keep:], attention_mask[:, -logits_to_keep:]
        old = _padded(sampled.log_probs, like)
        if sampled.model_tokens is not None:
            mask = mask * _padded(sampled.model_tokens, like)
        if config.skips_old_pass and not run.audit.failed:
            if rows := _to_audit(self, len(like)):
                computed, *_ = compute(rows)
                run.audit.compare(computed, old[rows], mask[rows], config)
            if not run.audit.failed:
                sampled.left_out = True
                return old, None, None
        found = compute()
        run.audit.compare(found[0], old, mask, config)
        return found
    found = compute()
    if run.checked is not None:
        run.unchecked = False
        batch = run.checked
        mask = _counted(batch)
        if not run.audit.compare(found[0], batch[ROLLOUT], mask, config):
            log_probs = found[0].detach()
            batch |= {OLD: log_probs} if "old_logps" not in batch else {"old_logps": (log_probs * mask).sum(1)}
    return found


def _counted(batch: Mapping[str, Any]) -> Any:
    """Where a batch's tokens count [B, C]: those of completions, without those of tools."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


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
    """Wrap ``_compute_loss``: its forward pass is compared with the rollout, if their weights are the same."""
    run = run_of(self)
    current = self.state.global_step == run.sampled_at.get(mode_of(self))
    run.batch = inputs
    if current and run.compares and ROLLOUT in inputs:
        run.checked = inputs
    try:
        with correction.clip_of(self, inputs, session.active_config()):
            return original(self, model, inputs)
    finally:
        run.checked = run.batch = None
