"""The differences between TRL 1.11 and 1.16. No other module of this adapter checks TRL's version or whether a name exists."""

from __future__ import annotations

from typing import Any

from jetrl_patch.patching.guards import Difference, installed_version

_FUSED_HEAD = Difference(
    "trl.trainer.utils.add_fused_lm_head", changed_in="1.15", added=True,
    handled="older trainers take log-probs from a model's logits, by functions that the plugin replaces in exact mode",
)  # fmt: skip
_DIVIDED = Difference(
    "trl.trainer.utils.selective_log_softmax_and_entropy", changed_in="1.14", added=True,
    handled="older trainers divide all logits by the temperature themselves, so exact mode asks for a temperature of 1",
)  # fmt: skip

_TRITON = Difference(
    "trl.trainer.utils._use_triton", changed_in="1.16", added=True,
    handled="TRL 1.15 passes its head only the tokens that count, on every device",
)  # fmt: skip

DIFFERENCES = (
    _FUSED_HEAD,
    _TRITON,
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


def is_compact(device: Any) -> bool:
    """Whether TRL's fused head gets only the tokens that count, instead of every position."""
    if not _has(_TRITON):
        return True
    from trl.trainer.utils import _use_triton

    return bool(_use_triton(device))


def _has(difference: Difference) -> bool:
    found = installed_version("trl")
    return found is None or difference.is_in(found)
