"""Reduce the statistics of all layers to the few numbers that a step logs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jetrl_patch.monitor.figures import FIELDS, Figures, Reduce
from jetrl_patch.units import matrix_expert

__all__ = ["KINDS", "PREFIX", "per_layer", "summary", "unchanged"]

PREFIX = "jetrl/scale/"
KINDS = ("weight", "activation", "gradient")

Found = Mapping[tuple[str, str], Figures]


def summary(found: Found, layers: Sequence[str]) -> dict[str, float]:
    """``jetrl/scale/{kind}_{figure}_{min,mean,max}`` over layers, and the worst layer's index in ``layers``.

    In a mixture also the index of the layer with the worst expert, and the expert's. A statistic that is NaN for every layer is
    left out.
    """
    metrics: dict[str, float] = {}
    for kind in KINDS:
        of_kind = {layer: figures for (k, layer), figures in found.items() if k == kind}
        columns = {
            name: _known([getattr(figures, name) for figures in of_kind.values()])
            for name in FIELDS
        }
        wanted = (
            ("sqnr", "min"), ("sqnr", "mean"), ("slice_sqnr", "min"), ("slice_sqnr", "mean"), ("underflow", "mean"),
            ("underflow", "max"), ("saturated", "max"), ("amax", "max"), ("scale_min", "min"), ("scale_max", "max"),
            ("nonfinite", "max"),
        )  # fmt: skip
        for name, how in wanted:
            if columns[name]:
                label = name if name.startswith("scale_") else f"{name}_{how}"
                metrics[f"{PREFIX}{kind}_{label}"] = _REDUCE[how](columns[name])
        lowest = _lowest(of_kind)
        if lowest is not None:
            metrics[f"{PREFIX}{kind}_worst_layer"] = float(layers.index(lowest))
        lowest = _lowest({layer: figures for layer, figures in of_kind.items() if figures.at})
        if lowest is not None:
            metrics[f"{PREFIX}{kind}_worst_experts"] = float(layers.index(lowest))
            metrics |= _worst_expert(f"{PREFIX}{kind}", of_kind[lowest])
    return metrics


def unchanged(shares: Mapping[str, float]) -> dict[str, float]:
    """``jetrl/scale/weight_unchanged_{min,mean,max}``: share of codes unchanged since the last weight sync."""
    values = list(shares.values())
    return {f"{PREFIX}weight_unchanged_{how}": reduce(values) for how, reduce in _REDUCE.items()} if values else {}


def per_layer(found: Found, shares: Mapping[str, float]) -> dict[str, float]:
    """``jetrl/scale/{layer}/{kind}_{figure}`` of every layer, and of experts the one with the lowest SQNR."""
    metrics = {
        f"{PREFIX}{layer}/{kind}_{name}": value
        for (kind, layer), figures in found.items()
        for name in FIELDS
        if not math.isnan(value := getattr(figures, name))
    }
    for (kind, layer), figures in found.items():
        metrics |= _worst_expert(f"{PREFIX}{layer}/{kind}", figures)
    return metrics | {f"{PREFIX}{layer}/weight_unchanged": share for layer, share in shares.items()}


def _worst_expert(name: str, figures: Figures) -> dict[str, float]:
    at = figures.at.get(figures.worst_figure)
    return {} if at is None else {f"{name}_worst_expert": float(matrix_expert(at))}


def _lowest(of_kind: Mapping[str, Figures]) -> str | None:
    known = {layer: figures.worst_db for layer, figures in of_kind.items() if not math.isnan(figures.worst_db)}
    return min(known, key=lambda layer: known[layer], default=None)


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


_REDUCE: dict[str, Reduce] = {"min": min, "mean": _mean, "max": max}
