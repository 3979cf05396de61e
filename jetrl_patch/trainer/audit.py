"""Check that the log-probs of each step keep exact mode's promise, and report mismatch and cost of syncs for the log."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jetrl_patch import session
from jetrl_patch.errors import AuditError, explain
from jetrl_patch.measure.mismatch import Mismatch, Sums, bit_equal, merge, sums
from jetrl_patch.sync.send import SyncStats

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.config import Config

# ---- Compare the log-probs of trainer and rollout, which exact mode makes equal, and apply ``on_mismatch``
# Where the framework computes old log-probs, ``hold`` compares them with the rollout's.
#
# With ``old_log_probs="rollout"`` that pass is skipped: in exact mode it would compute the bits that the rollout returned.
# ``Audit`` checks this at no cost. The first update of a step runs the same weights over the same tokens, so its forward pass is
# compared with ``==`` before the backward pass. Later updates have new weights. In a step with several updates, a share of the
# samples (``audit_fraction``) therefore still goes through the skipped pass.

logger = logging.getLogger(__name__)

_FIX = (
    "check that no sample has sampling parameters of its own, run `jetrl parity` on this machine, and set "
    "on_mismatch='recompute' to train meanwhile"
)


class Audit:
    """What one process compared since the last ``take``.

    Attributes:
        failed: whether any token of this run differed.
    """

    def __init__(self) -> None:
        self.failed = False
        self._parts: list[Sums] = []

    def compare(self, trainer: Tensor, rollout: Tensor, mask: Tensor, config: Config, names: Sequence[str] = ()) -> bool:
        """Compare log-probs [B, T] where ``mask`` counts; return whether all are bit-equal.

        Args:
            trainer: float32 log-probs of this process's forward pass.
            rollout: float32 log-probs of the same tokens, as the rollout returned them.
            names: a name for each of the B samples in messages; by default its row.

        Outside exact mode it only measures, and returns True.

        Raises AuditError if a token differs and ``on_mismatch="stop"``.
        """
        found = sums(trainer, rollout, mask)
        self._parts.append(found)
        if found.equal == found.tokens or not config.exact:
            return True
        self.failed = True
        _stop_or_say(_difference(trainer.detach(), rollout, mask, names, found), config)
        return False

    def take(self) -> dict[str, Any] | None:
        """The sums over all comparisons since the last call, in plain types; None without any."""
        parts, self._parts = self._parts, []
        return asdict(merge(Sums, parts)) if parts else None

    def report(self) -> dict[str, Any]:
        """What a process reports at a weight sync: "sums" from ``take()``, and "differed": whether any token of the run did."""
        return {"sums": self.take(), "differed": self.failed}

    def merged(self, reports: Sequence[Mapping[str, Any]]) -> tuple[Mismatch, dict[str, float]] | None:
        """``take()`` merged with what each process reported as "audit": the step's mismatch, and ``jetrl/audited_tokens``.

        None if nothing was compared. ``failed`` then covers the other processes too.
        """
        parts = [report["audit"] for report in reports]
        self.failed |= any(part["differed"] for part in parts)
        found = [Sums(**sums) for sums in (self.take(), *(part["sums"] for part in parts)) if sums is not None]
        if not found:
            return None
        figures = merge(Sums, found).figures()
        return figures, {"jetrl/audited_tokens": float(figures.tokens)}


def hold(trainer: Tensor, rollout: Tensor, mask: Tensor, current: Tensor, config: Config, names: Sequence[str] = ()) -> None:
    """In exact mode, require equal log-probs of samples from the trainer's current weights. As ``Audit.compare``.

    Args:
        current: bool [B], True for samples made entirely with the trainer's current weights. Others may differ.
    """
    if config.exact:
        Audit().compare(trainer, rollout, mask.bool() & current.unsqueeze(1).to(mask.device), config, names)


def hold_figures(found: Mismatch, config: Config) -> None:
    """``hold`` for figures, where another process has the log-probs. Raises AuditError."""
    if config.exact and found.tokens and found.bit_equal_fraction != 1.0:
        unequal = f"{found.bit_equal_fraction:.4f} of {found.tokens} bit-equal"
        figures = f"{unequal}, mean |dlogp| {found.logp_abs_diff_mean:.3e}, max {found.logp_abs_diff_max:.3e}"
        _stop_or_say(explain("log-probs of a step", required="equal ones on both sides", found=figures, fix=_FIX), config)


def _stop_or_say(difference: str, config: Config) -> None:
    if config.on_mismatch == "stop":
        raise AuditError(difference)
    logger.error("jetrl_patch: exact mode is not exact: %s", difference)


def _difference(trainer: Tensor, rollout: Tensor, mask: Tensor, names: Sequence[str], found: Sums) -> str:
    """Describe the first token that differs: its sample, and its number among the tokens that count.

    The number of samples with such tokens tells samples that were drawn differently from a trainer that computes differently.
    """
    pi, mu = trainer.float().cpu(), rollout.float().cpu()
    counts = mask.bool().cpu()
    differ = counts & ~bit_equal(pi, mu)
    row, position = (int(index) for index in differ.nonzero()[0])
    samples = f"in {int(differ.any(1).sum())} of {int(counts.any(1).sum())} samples"
    number = int(counts[row, :position].sum())
    sample = names[row] if row < len(names) else f"sample {row}"
    theirs, ours = mu[row, position].item(), f"{pi[row, position].item():.9g} in the trainer"
    required, fix = f"the rollout's {theirs:.9g}", _FIX
    if not math.isfinite(theirs):
        required, ours, fix = "a finite number", f"{theirs:.9g} in the rollout and {ours}", "look for NaN in the weights"
    return explain(
        f"log-prob of response token {number} of {sample}",
        required=required,
        found=f"{ours} ({found.tokens - found.equal} of {found.tokens} tokens differ, {samples})",
        fix=fix,
    )


def sample(count: int, fraction: float, multiple: int = 1) -> list[int]:
    """The samples whose old log-probs are computed: evenly spaced indices, a multiple of ``multiple``, at least one.

    >>> sample(32, 1 / 16), sample(8, 0.3, 2), sample(8, 0.0)
    ([0, 16], [0, 2, 4, 6], [])
    """
    wanted = min(count, math.ceil(math.ceil(count * fraction) / multiple) * multiple)
    return [i * count // wanted for i in range(wanted)]


# ---- Mismatch metrics of a step, for the log -----------------------------------------------------
# An asynchronous rollout may sample with weights older than the trainer's. Only tokens from the trainer's current weights must be
# equal; the others show how far the weights have moved.

#: defaults for a step whose correction reports nothing
_UNCORRECTED = {"jetrl/clipped_fraction": 0.0, "jetrl/masked_fraction": 0.0}


class Compared:
    """The comparisons of a step: all of its tokens, and those from the trainer's current weights."""

    def __init__(self) -> None:
        self._all: list[Sums] = []
        self._current: list[Sums] = []

    def add(self, trainer: Tensor, rollout: Tensor, mask: Tensor, current: Tensor) -> None:
        """Add log-probs [B, T] where ``mask`` counts. ``current`` is as in ``hold``."""
        of_current = mask.bool() & current.unsqueeze(1).to(mask.device)
        everything = sums(trainer, rollout, mask)
        self._all.append(everything)
        self._current.append(everything if bool(current.all()) else sums(trainer, rollout, of_current))

    def figures(self) -> tuple[Mismatch, Mismatch]:
        """The mismatch of all tokens, and of those from the current weights."""
        return merge(Sums, self._all).figures(), merge(Sums, self._current).figures()


def step_metrics(found: Mismatch, corrected: Mapping[str, float], of_current: Mismatch | None = None) -> dict[str, float]:
    """The metrics of a step. Those of its correction override the defaults.

    ``of_current`` is the mismatch of the tokens from the current weights, if known. It adds the share of the other tokens, and
    its own bit-equal share.
    """
    metrics = {**found.as_metrics(), **_UNCORRECTED, **corrected}
    if of_current is not None:
        metrics["jetrl/stale_fraction"] = 1.0 - of_current.tokens / found.tokens if found.tokens else 0.0
        if of_current.tokens:
            metrics["jetrl/bit_equal_fraction_current"] = of_current.bit_equal_fraction
    return metrics


def say_if_nothing(metrics: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """The metrics of a step for its log line. If the step compared nothing, ``say`` so and set the mismatch to NaN.

    If the values were missing, a minimum over the other steps could be mistaken for one over all steps.
    """
    if metrics.get("jetrl/tokens"):
        return metrics
    say("this step compared no log-prob of rollout and trainer: jetrl/tokens is 0, and the figures of the mismatch are NaN")
    return {**Sums().figures().as_metrics(), **metrics}


# ---- Cost of a weight sync: each training process reports it, the trainer loop logs it -----------

#: fields of a report that are logged unchanged, where the framework and the precision have them
_LOGGED = (
    "sync_bytes", "sync_bytes_bf16", "sync_bytes_total", "sync_bytes_full", "sync_changed_fraction", "sync_calls",
    "quantized_layers", "cut_layers", "loss_scale", "skipped_steps",
)  # fmt: skip


def sync_report(stats: SyncStats, start: float) -> dict[str, Any]:
    """One process's part in a sync that began at ``start`` (``time.perf_counter``), in plain types."""
    cut = session.run_notes().cut
    return {
        "pid": os.getpid(),
        "sync_seconds": time.perf_counter() - start,
        "sync_bytes": stats.quantized,
        "sync_bytes_bf16": stats.quantized_as_bf16,
        "sync_bytes_total": stats.total,
        "quantized_layers": stats.layers,
        **({"cut_layers": len(cut)} if cut else {}),
        **({"sync_bytes_full": stats.full, "sync_changed_fraction": stats.changed / stats.full} if stats.full else {}),
    }


def sync_metrics(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Combine the reports of all ranks: the first rank's figures and the slowest rank's seconds."""
    first = reports[0]
    found = {f"jetrl/{name}": first[name] for name in _LOGGED if name in first}
    return {**found, **first["monitor"], "jetrl/sync_seconds": max(report["sync_seconds"] for report in reports)}
