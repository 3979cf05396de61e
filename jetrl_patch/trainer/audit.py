"""Hold the log-probs of trainer and rollout to what exact mode promises, and the run to ``on_mismatch``.

Where the pass for old log-probs runs, what it computes is compared with the rollout's (``hold``).

With ``old_log_probs="rollout"`` it does not run (``Audit``). In exact mode the rollout returned the bits that the trainer's
forward pass would compute, so the pass before the update can be left out. What proves it costs nothing: the first update of a
step runs forward with the same weights over the same tokens, and its log-probs are compared with ``==`` before its backward
pass. Later updates have other weights. Where a step has several, a share of its samples (``audit_fraction``) goes through the
pass that the others skip.
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

__all__ = ["Audit", "audited_metrics", "hold", "hold_figures", "sample"]

logger = logging.getLogger(__name__)

_FIX = "run `jetrl parity` on this machine, and set on_mismatch='recompute' to train meanwhile"


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
        _stop_or_say(_difference(trainer.detach(), rollout, mask, names, found), config)
        return False

    def take(self) -> dict[str, Any] | None:
        """The sums of what was compared since the last call, in plain types; None if nothing was."""
        parts, self._parts = self._parts, []
        return asdict(merge(Sums, parts)) if parts else None

    def report(self) -> dict[str, Any]:
        """What a process reports at a weight sync: ``take()`` as "sums", and as "differed" whether a token did in this run."""
        return {"sums": self.take(), "differed": self.failed}


def hold(
    trainer: Tensor, rollout: Tensor, mask: Tensor, current: Tensor, config: Config, names: Sequence[str] = ()
) -> None:
    """In exact mode, require equality of what the trainer's own weights made. Arguments and errors as in ``Audit.compare``.

    Args:
        current: bool [B], True for samples of the trainer's weights alone. For the others nothing is promised.
    """
    if config.exact:
        Audit().compare(trainer, rollout, mask.bool() & current.unsqueeze(1).to(mask.device), config, names)


def hold_figures(found: Mismatch, config: Config) -> None:
    """The same for figures over such samples, where their log-probs are in another process. Raises AuditError."""
    if config.exact and found.tokens and found.bit_equal_fraction != 1.0:
        unequal = f"{found.bit_equal_fraction:.4f} of {found.tokens} bit-equal"
        figures = f"{unequal}, mean |dlogp| {found.logp_abs_diff_mean:.3e}, max {found.logp_abs_diff_max:.3e}"
        _stop_or_say(explain("log-probs of a step", required="equal ones on both sides", found=figures, fix=_FIX), config)


def _stop_or_say(difference: str, config: Config) -> None:
    if config.on_mismatch == "stop":
        raise AuditError(difference)
    logger.error("jetrl_patch: exact mode is not exact: %s", difference)


def _difference(trainer: Tensor, rollout: Tensor, mask: Tensor, names: Sequence[str], found: Sums) -> str:
    """Name the first token that differs, in the order of samples and positions, by its number among those that count."""
    pi, mu = trainer.float().cpu(), rollout.float().cpu()
    counts = mask.bool().cpu()
    row, position = (int(index) for index in (counts & ~bit_equal(pi, mu)).nonzero()[0])
    number = int(counts[row, :position].sum())
    sample = names[row] if row < len(names) else f"sample {row}"
    theirs, ours = mu[row, position].item(), f"{pi[row, position].item():.9g} in the trainer"
    required, fix = f"the rollout's {theirs:.9g}", _FIX
    if not math.isfinite(theirs):
        required, ours, fix = "a finite number", f"{theirs:.9g} in the rollout and {ours}", "look for NaN in the weights"
    return explain(
        f"log-prob of response token {number} of {sample}",
        required=required,
        found=f"{ours} ({found.tokens - found.equal} of {found.tokens} tokens differ)",
        fix=fix,
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
