"""The differences between TRL 1.11 and 1.16. No other module of this adapter checks TRL's version or whether a name exists."""

from __future__ import annotations

from jetrl_patch.patching.guards import Difference, installed_version

_FUSED_HEAD = Difference(
    "trl.trainer.utils.add_fused_lm_head", changed_in="1.15", added=True,
    handled="older trainers take log-probs from a model's logits, by functions that the plugin replaces in exact mode",
)  # fmt: skip
_DIVIDED = Difference(
    "trl.trainer.utils.selective_log_softmax_and_entropy", changed_in="1.14", added=True,
    handled="older trainers divide all logits by the temperature themselves, so exact mode asks for a temperature of 1",
)  # fmt: skip

DIFFERENCES = (
    _FUSED_HEAD,
    _DIVIDED,
    *(
        Difference(
            f"trl.trainer.{kind}_trainer.selective_log_softmax", changed_in="1.15", added=False,
            handled="newer trainers have the fused LM head",
        )
        for kind in ("grpo", "rloo")
    ),
    *(
        Difference(
            f"trl.trainer.{kind}_trainer.selective_log_softmax_and_entropy", changed_in="1.14", added=True, until="1.15",
            handled="older trainers compute entropies apart; newer ones have the fused LM head",
        )
        for kind in ("grpo", "rloo")
    ),
)  # fmt: skip


def has_fused_head() -> bool:
    """Whether TRL's models compute log-probs, instead of logits."""
    return _has(_FUSED_HEAD)


def divides_by_temperature() -> bool:
    """Whether TRL's trainers divide the logits themselves, by a number. On CUDA its result differs from vLLM's."""
    return not _has(_DIVIDED)


def _has(difference: Difference) -> bool:
    found = installed_version("trl")
    return found is None or difference.is_in(found)
