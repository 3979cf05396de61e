"""Measure the mismatch in verl's bypass mode, which runs no separate forward pass for the trainer's log-probs.

In this mode ``old_log_probs`` are the rollout's, and the loss is the first place that sees both. The first mini-batch after
a weight sync is scored with the weights that sampled it. Sums over it reach the trainer loop in the report of the next sync,
which ends the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.adapters.base import Journal
from jetrl_patch.adapters.verl.correction import figures as correction_figures
from jetrl_patch.adapters.verl.state import WORKER

__all__ = ["LOSS", "figures", "hand_over", "measure", "register", "train_batch"]

#: verl's name of the loss; also the key of the sums in a worker's report
LOSS = "bypass_mode"


def register(module: ModuleType, journal: Journal) -> None:
    """Wrap the bypass loss in ``POLICY_LOSS_REGISTRY`` of ``verl.trainer.ppo.core_algos``."""
    journal.set_item(
        module.POLICY_LOSS_REGISTRY,
        LOSS,
        measured(module.POLICY_LOSS_REGISTRY[LOSS]),
        target=f"{module.__name__}.POLICY_LOSS_REGISTRY[{LOSS!r}]",
        reason="bypass mode compares rollout and trainer log-probs only in the loss, and does not log their mismatch",
        remove_when="verl logs the mismatch of a bypassed batch over its first mini-batch",
    )


def measured(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap verl's loss: record the mismatch while the trainer still has the weights that sampled."""

    def compute_policy_loss_bypass_mode(
        old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, *args: Any, config: Any, **kwargs: Any
    ) -> Any:
        if runtime.is_active() and WORKER.measuring:
            WORKER.compared = True
            WORKER.measured.append(measure(log_prob, old_log_prob, response_mask, config.policy_loss))
        return original(old_log_prob, log_prob, advantages, response_mask, *args, config=config, **kwargs)

    return compute_policy_loss_bypass_mode


def measure(log_prob: Any, rollout_log_prob: Any, mask: Any, policy_loss: Any) -> tuple[Any, Any]:
    """Sum the mismatch, and the effect of the correction (None if it has no name), over one micro-batch."""
    from jetrl_patch.correction.mismatch import sums

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


def figures(reports: Sequence[dict[str, Any]]) -> tuple[Any, dict[str, float]] | None:
    """Merge the workers' reports into the mismatch and the correction's metrics; None if nothing was measured."""
    parts = [part for report in reports for part in report.get(LOSS, ())]
    if not parts:
        return None
    from jetrl_patch.correction.figures import Applied
    from jetrl_patch.correction.mismatch import Sums
    from jetrl_patch.correction.parts import merge

    corrected = [part for _, part in parts if part is not None]
    metrics = merge(Applied, corrected).as_metrics() if corrected else {}
    return merge(Sums, [part for part, _ in parts]).figures(), metrics
