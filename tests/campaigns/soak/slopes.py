"""Whether a figure grows over a run: the median of the last fifth of the steps compared with that of the second fifth.

A machine's speed drifts by more than a leak would cost. So seconds that grew are compared with those of the same steps in new
processes: if these are as slow, the age of the run is not the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

#: figure -> tolerated growth over a run: bytes, numbers, or shares of the early value
LIMITS: dict[str, tuple[float, float]] = {
    "memory": (32 * 2**20, 0.02),
    "shared": (8 * 2**20, 0.02),
    "files": (4, 0.0),
    "threads": (4, 0.0),
    "seconds of a step": (0.0, 0.05),
    "processor seconds of a step": (0.0, 0.05),
}


@dataclass(frozen=True)
class Growth:
    """The medians of a figure early and late in a run, and that of new processes in the late steps, if it was taken."""

    figure: str
    early: float
    late: float
    fresh: float | None = None

    @property
    def flat(self) -> bool:
        """Whether the late value is within what the figure's limit allows above another. Less is never a slope."""
        least, share = LIMITS[self.figure]
        return any(self.late - one <= max(least, share * one) for one in (self.early, self.fresh) if one is not None)


def growth(figure: str, steps: Sequence[float], values: Sequence[float], fresh: Sequence[float] = ()) -> Growth:
    """Compare the second fifth of the steps with the last. In the first, caches fill.

    Args:
        fresh: values of new processes in the last fifth.

    Raises:
        ValueError: one of the two has no value.
    """
    last = max(steps)
    early = [value for step, value in zip(steps, values, strict=True) if 0.2 * last < step <= 0.4 * last]
    late = [value for step, value in zip(steps, values, strict=True) if 0.8 * last < step]
    if not early or not late:
        raise ValueError(f"{figure}: too few values to see a slope in {len(values)}")
    return Growth(figure, median(early), median(late), median(fresh) if fresh else None)
