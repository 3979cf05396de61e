"""Long series made short without losing what matters: the smallest and the largest of every stretch, and what is no number."""

from __future__ import annotations

import math

from jetrl_patch.report.runs import Points

__all__ = ["LIMIT", "short", "thin"]

#: most points of one line in the page: about one and a half to a pixel
LIMIT = 600


def thin(points: Points, limit: int = LIMIT) -> Points:
    """At most ``limit`` of the points, in their order: the first, the last, and of each bin its minimum, its maximum and one
    that is not finite.

    A series that is short enough is returned whole. ``limit`` is at least 5.
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
    """A value with the digits that a picture can show; what is not 0, or not 1, does not become it. JSON has no NaN: text."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    rounded = float(f"{value:.5g}")
    if not math.isfinite(rounded) or (rounded in (0.0, 1.0) and rounded != value):
        return value
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
