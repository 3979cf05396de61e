"""Random batches, and a scalar reference of every correction in plain Python."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

#: log-ratio scales: mild mismatch, severe mismatch, exact agreement, and both extremes
LOG_RATIOS = (
    st.floats(-0.25, 0.25, width=32)
    | st.floats(-3, 3, width=32)
    | st.sampled_from([0.0, 0.0, -50.0, 50.0, math.log(2), -math.log(2)])
)


@st.composite
def batches(draw: st.DrawFn, values: st.SearchStrategy[float] = LOG_RATIOS) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-ratios (float32) and mask (int64), both [B, T]; rows may be empty."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    cell = st.lists(values, min_size=width, max_size=width)
    marks = st.lists(st.integers(0, 1), min_size=width, max_size=width)
    log_ratio = draw(st.lists(cell, min_size=rows, max_size=rows))
    mask = draw(st.lists(marks | st.just([0] * width), min_size=rows, max_size=rows))
    return torch.tensor(log_ratio, dtype=torch.float32), torch.tensor(mask)


def by_hand(kind: str, log_ratio: torch.Tensor, mask: torch.Tensor, low: float, high: float) -> list[list[float]]:
    """Weights by their definition, as plain floats: 0 at padding and at dropped tokens."""
    rows = []
    for values, marks in zip(log_ratio.tolist(), mask.tolist()):
        chosen = [value for value, mark in zip(values, marks) if mark]
        row = []
        for value, mark in zip(values, marks):
            if not mark:
                row.append(0.0)
                continue
            log = {"seq": sum(chosen), "geo": sum(chosen) / len(chosen)}.get(kind[:3], value)
            found = math.exp(min(log, 600.0))
            inside = low <= found <= high
            if kind in ("tis", "seq-tis"):
                row.append(min(found, high))
            elif kind == "geo-mis":
                row.append(1.0 if inside else 0.0)
            else:
                row.append(found if inside else 0.0)
        rows.append(row)
    return rows
