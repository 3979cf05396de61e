"""The summary of one run, as in ``summary.json``, in the terminal's table and on the page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean, median
from typing import Any

from jetrl_patch.report.runs import Points, Run

__all__ = ["SUMMARY_KEYS", "summarize"]

SUMMARY_KEYS = (
    "name", "precision", "align", "correction", "router_replay", "seed", "steps", "tokens", "reward_first", "reward_last",
    "reward_best", "accuracy_first", "accuracy_last", "accuracy_best", "logp_abs_diff_mean", "logp_abs_diff_max",
    "bit_equal_fraction_min", "route_mismatch_mean", "ess_mean", "clipped_fraction_mean", "k3_kl_mean", "sync_bytes",
    "sync_bytes_bf16", "sync_seconds_mean", "sync_share", "step_seconds_median", "parts", "peak_memory_bytes",
    "quantized_layers", "versions",
)  # fmt: skip


def summarize(run: Run) -> dict[str, Any]:
    """Summarize one run under ``SUMMARY_KEYS``; None means that the run did not measure it.

    Means of mismatch metrics are weighted by tokens. ``sync_bytes`` and ``sync_bytes_bf16`` are per weight sync,
    ``sync_share`` is the weight sync's share of the total time, and ``parts`` are mean seconds per step.
    """
    tokens = run.series("jetrl/tokens")
    parts = run.parts
    whole = sum(parts.values())
    return {
        "name": run.label,
        "precision": run.precision,
        "align": run.align,
        "correction": run.correction,
        "router_replay": run.router_replay,
        "seed": run.seed if run.precision else None,
        "steps": len(run.training_steps),
        "tokens": int(sum(finite(tokens))) if tokens else None,
        "reward_first": _at(run.reward, 0),
        "reward_last": _at(run.reward, -1),
        "reward_best": _best(run.reward),
        "accuracy_first": _at(run.accuracy, 0),
        "accuracy_last": _at(run.accuracy, -1),
        "accuracy_best": _best(run.accuracy),
        "logp_abs_diff_mean": _token_mean(run, run.series("jetrl/logp_abs_diff_mean")),
        "logp_abs_diff_max": _extreme(max, run, "jetrl/logp_abs_diff_max"),
        "bit_equal_fraction_min": _extreme(min, run, "jetrl/bit_equal_fraction"),
        "route_mismatch_mean": _token_mean(run, run.series("jetrl/route_mismatch")),
        "ess_mean": _token_mean(run, run.series("jetrl/ess")),
        "clipped_fraction_mean": _token_mean(run, run.corrected("jetrl/clipped_fraction")),
        "k3_kl_mean": _token_mean(run, run.series("jetrl/k3_kl")),
        "sync_bytes": _last_integer(run, "jetrl/sync_bytes"),
        "sync_bytes_bf16": _last_integer(run, "jetrl/sync_bytes_bf16"),
        "sync_seconds_mean": _mean(finite(run.series("jetrl/sync_seconds"))),
        "sync_share": parts["weight sync"] / whole if whole and parts["weight sync"] else None,
        "step_seconds_median": median(lengths) if (lengths := list(finite(run.seconds))) else None,
        "parts": parts,
        "peak_memory_bytes": run.final.get("peak_memory_bytes"),
        "quantized_layers": _last_integer(run, "jetrl/quantized_layers"),
        "versions": run.final.get("versions") or {},
    }


def finite(points: Points) -> Iterable[float]:
    """The finite values of a series."""
    return (value for _, value in points if math.isfinite(value))


def _at(points: Points, position: int) -> float | None:
    return points[position][1] if points else None


def _best(points: Points) -> float | None:
    return max(finite(points), default=None)


def _token_mean(run: Run, points: Points) -> float | None:
    """Mean over tokens. NaN if any step is NaN, so that a broken step does not disappear in the average."""
    weights = dict(run.series("jetrl/tokens"))
    values = [(value, weights.get(step, 1.0)) for step, value in points]
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values if weight) / total if total else None


def _extreme(pick: Any, run: Run, name: str) -> float | None:
    values = [value for _, value in run.series(name)]
    if any(math.isnan(value) for value in values):
        return math.nan
    return float(pick(values)) if values else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def _last_integer(run: Run, name: str) -> int | None:
    values = list(finite(run.series(name)))
    return int(values[-1]) if values else None
