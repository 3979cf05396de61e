"""Shorten long series without losing the minimum and maximum of any stretch, or non-finite values."""

from __future__ import annotations

import math

from jetrl_patch.report.runs import Points

__all__ = ["LIMIT", "short", "thin"]

#: most points per line on the page, about 1.5 per pixel
LIMIT = 600


def thin(points: Points, limit: int = LIMIT) -> Points:
    """Keep at most ``limit`` points, in order: the first, the last, and the minimum, maximum and one non-finite point of
    each bin.

    A series that is short enough is returned unchanged. ``limit`` must be at least 5.
    """
    if len(points) <= limit:
        return points
    bins = (limit - 2) // 3
    kept = {0, len(points) - 1}
    for b in range(bins):
        inside = range(b * len(points) // bins, (b + 1) * len(points) // bins)
        numbers = [i for i in inside if math.isfinite(points[i][1])]
        if numbers:
            kept |= {min(numbers, key=lambda i: points[i][1]), max(numbers, key=lambda i: points[i][1])}
        if len(numbers) < len(inside):
            kept.add(next(i for i in inside if not math.isfinite(points[i][1])))
    return [points[i] for i in sorted(kept)]


def short(value: float) -> float | str:
    """Round a value to the digits that a chart can show, never to 0 or 1; non-finite values become strings, for JSON."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    rounded = float(f"{value:.5g}")
    if not math.isfinite(rounded) or (rounded in (0.0, 1.0) and rounded != value):
        return value
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
