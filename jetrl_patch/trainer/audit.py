"""Check the rollout's log-probs where they are a step's old ones, for ``old_log_probs="rollout"``.

In exact mode the rollout returned the bits that the trainer's forward pass would compute, so the pass before the update can be
left out. What proves it costs nothing: the first update of a step runs forward with the same weights over the same tokens,
and its log-probs are compared with ``==`` before its backward pass. Later updates have other weights. Where a step has several,
a share of its samples (``audit_fraction``) goes through the pass that the others skip.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jetrl_patch.correction.mismatch import Mismatch, Sums, bit_equal, sums
from jetrl_patch.correction.parts import merge
from jetrl_patch.errors import AuditError, explain

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.config import Config

__all__ = ["Audit", "audited_metrics", "sample"]

logger = logging.getLogger(__name__)


class Audit:
    """The comparisons of one process since the last ``take``.

    Attributes:
        failed: whether a token differed in this run.
    """

    def __init__(self) -> None:
        self.failed = False
        self._parts: list[Sums] = []

    def compare(self, trainer: Tensor, rollout: Tensor, mask: Tensor, config: Config, names: Sequence[str] = ()) -> bool:
        """Compare log-probs [B, T] where ``mask`` counts; return whether all are bit-equal.

        Args:
            trainer: float32 log-probs of this process's forward pass.
            rollout: float32 log-probs of the same tokens, as the rollout returned them.
            names: what identifies each of the B samples in the log; by default its row.

        Raises:
            AuditError: a token differs and ``on_mismatch="stop"``.
        """
        found = sums(trainer, rollout, mask)
        self._parts.append(found)
        if found.equal == found.tokens:
            return True
        self.failed = True
        text = _difference(trainer.detach(), rollout, mask, names, found)
        if config.on_mismatch == "stop":
            raise AuditError(text)
        logger.error("jetrl_patch: %s", text)
        return False

    def take(self) -> dict[str, Any] | None:
        """The sums of what was compared since the last call, in plain types; None if nothing was."""
        parts, self._parts = self._parts, []
        return asdict(merge(Sums, parts)) if parts else None

    def report(self) -> dict[str, Any]:
        """What a process reports at a weight sync: ``take()`` as "sums", and as "differed" whether a token did in this run."""
        return {"sums": self.take(), "differed": self.failed}


def _difference(trainer: Tensor, rollout: Tensor, mask: Tensor, names: Sequence[str], found: Sums) -> str:
    """Name the first token that differs, in the order of samples and positions, by its number among those that count."""
    pi, mu = trainer.float().cpu(), rollout.float().cpu()
    counts = mask.bool().cpu()
    row, position = (int(index) for index in (counts & ~bit_equal(pi, mu)).nonzero()[0])
    number = int(counts[row, :position].sum())
    sample = names[row] if row < len(names) else f"sample {row}"
    theirs, ours = mu[row, position].item(), f"{pi[row, position].item():.9g} in the trainer"
    required, fix = f"the rollout's {theirs:.9g}", "set old_log_probs='recompute' to train meanwhile"
    if not math.isfinite(theirs):
        required, ours, fix = "a finite number", f"{theirs:.9g} in the rollout and {ours}", "look for NaN in the weights"
    return explain(
        f"log-prob of response token {number} of {sample}",
        required=required,
        found=f"{ours} ({found.tokens - found.equal} of {found.tokens} tokens differ)",
        fix=f"run `jetrl parity` on this machine, and {fix}",
    )


def sample(count: int, fraction: float, multiple: int = 1) -> list[int]:
    """The indices of the samples that go through the old pass: evenly spaced, at least one, a multiple of ``multiple``.

    >>> sample(32, 1 / 16), sample(8, 0.3, 2), sample(8, 0.0)
    ([0, 16], [0, 2, 4, 6], [])
    """
    if fraction == 0.0 or count == 0:
        return []
    wanted = min(count, math.ceil(math.ceil(count * fraction) / multiple) * multiple)
    return [i * count // wanted for i in range(wanted)]


def audited_metrics(parts: Sequence[dict[str, Any] | None]) -> tuple[Mismatch, dict[str, float]] | None:
    """Merge what all processes compared into the step's mismatch and ``jetrl/audited_tokens``; None if nothing was."""
    found = [Sums(**part) for part in parts if part is not None]
    if not found:
        return None
    figures = merge(Sums, found).figures()
    return figures, {"jetrl/audited_tokens": float(figures.tokens)}
