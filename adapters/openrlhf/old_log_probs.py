"""``old_log_probs="rollout"`` in OpenRLHF: the policy's forward pass while experience is made is left out.

Driver: ``make_experience`` decides for the step, ``_dispatch_forward`` answers for the policy actors, with a share of the
samples computed and compared where later updates cannot check. Actor: ``training_step`` compares in the first update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.adapters.openrlhf.state import DRIVER, WORKER
from jetrl_patch.gate import while_active
from jetrl_patch.trainer.audit import sample

__all__ = ["check_forward", "dispatch_forward", "is_frozen", "may_skip", "names", "training_step"]


def may_skip(samples: Sequence[Any], are_current: Callable[[Any], Any]) -> bool:
    """Whether the rollout's log-probs are the old ones of this step.

    Args:
        samples: OpenRLHF's experiences, before any forward pass.
        are_current: gives a bool [B, A] that is True where the trainer's current weights made the tokens. For others the pass
            computes what the rollout does not know.
    """
    if not runtime.active_config().skips_old_pass or DRIVER.audit.failed:
        return False
    return all(found.rollout_log_probs is not None and bool(are_current(found).all()) for found in samples)


@while_active
def dispatch_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``RemoteExperienceMaker._dispatch_forward``: the policy's log-probs are those of the samples."""

    def _dispatch_forward(self: Any, group: Any, sync_condition: bool, **kwargs: Any) -> Any:
        if DRIVER.skipped is None or group is not self.actor_model_group:
            return original(self, group, sync_condition, **kwargs)
        import ray

        old = [found.rollout_log_probs * found.action_mask for found in DRIVER.skipped]  # zeros elsewhere, as Actor.forward
        chosen = _chosen(DRIVER.skipped, self.args, len(group._actor_handlers))
        if chosen:
            refs = original(self, group, sync_condition, **{name: [of[i] for i in chosen] for name, of in kwargs.items()})
            if not _equal(self._flatten_results(refs, 1), [DRIVER.skipped[i] for i in chosen]):
                DRIVER.skipped = None
                return original(self, group, sync_condition, **kwargs)
        return [ray.put(old)]

    return _dispatch_forward


def is_frozen(args: Any, step: int) -> bool:
    """Whether the policy is not trained in this step, or in this step on the samples of the frozen steps before it too."""
    last: int = args.critic.freezing_steps  # the first step is 0; -1 freezes none
    return last >= 0 and step <= last + 1


def _chosen(samples: Sequence[Any], args: Any, actors: int) -> list[int]:
    """The samples to compute, by ``audit_fraction``; none if the step has one update, which checks all of them."""
    rows = sum(len(found.sequences) for found in samples)
    if rows <= args.train.batch_size and not DRIVER.frozen:
        return []
    return sample(len(samples), runtime.active_config().audit_fraction, actors)


def _equal(computed: Sequence[Any], samples: Sequence[Any]) -> bool:
    """Compare each, also after a difference, so that the log has all figures. Raises AuditError as the settings say."""
    config = runtime.active_config()
    found = [
        DRIVER.audit.compare(log_probs, of.rollout_log_probs, of.action_mask, config, names(of))
        for log_probs, of in zip(computed, samples, strict=True)
    ]
    return all(found)


def names(experience: Any) -> list[str]:
    """What identifies each sample of an experience in the log: its prompt."""
    return [f"a sample of prompt {prompt!r:.60}" for prompt in experience.prompts or ()]


@while_active
def training_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``ActorPPOTrainer.training_step``: in the first update after a sync, its forward pass checks the old log-probs."""

    def training_step(self: Any, experience: Any, *args: Any, **kwargs: Any) -> Any:
        if self.actor.model.global_steps == WORKER.synced_at:  # the weights are those that sampled
            WORKER.checked = experience
        try:
            return original(self, experience, *args, **kwargs)
        finally:
            WORKER.checked = None

    return training_step


def check_forward(log_probs: Any) -> None:
    """Compare a forward pass [B, A] with the old log-probs of the batch in ``training_step``, before its loss is computed.

    Where they differ and the run goes on, the batch gets what the left-out pass would have computed: the weights are the same.
    Raises AuditError.
    """
    experience = WORKER.checked
    if experience is None:
        return
    old, mask = experience.action_log_probs, experience.action_mask
    if not WORKER.audit.compare(log_probs, old, mask, runtime.active_config(), names(experience)):
        old.copy_(log_probs.detach())
