"""The summary as a table in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

__all__ = ["COLUMNS", "cells", "make_answers", "make_table"]

#: below this width of the terminal the columns of ``_WIDE_ONLY`` are left out
_WIDE = 130
_WIDE_ONLY = ("steps", "tokens", "k3 KL", "sync", "s/step", "memory")

COLUMNS = (
    "arm", "seed", "steps", "tokens", "accuracy", "mean |Δ|", "max |Δ|", "bit-equal", "k3 KL",
    "sync", "s/step", "memory",
)  # fmt: skip


def cells(summary: dict[str, Any]) -> tuple[str, ...]:
    """One summary as the texts of one row, in the order of ``COLUMNS``; ``–`` stands for what was not measured."""
    arm = summary["precision"] if summary["align"] in ("", "none") else f"{summary['precision']}/{summary['align']}"
    return (
        arm,
        str(summary["seed"]),
        str(summary["steps"]),
        _text(summary["tokens"], "{:,}"),
        f"{_percent(summary['accuracy_first'])} → {_percent(summary['accuracy_last'])}",
        _small(summary["logp_abs_diff_mean"]),
        _small(summary["logp_abs_diff_max"]),
        _share(summary["bit_equal_fraction_min"]),
        _small(summary["k3_kl_mean"]),
        _sync(summary),
        _text(summary["step_seconds_median"], "{:.1f}"),
        _bytes(summary["peak_memory_bytes"]),
    )


def make_table(summaries: Sequence[dict[str, Any]], title: str, width: int = _WIDE) -> Table:
    """A table with one row for each summary; arms that are equal to the last bit stand out.

    Args:
        width: columns of the terminal; on a narrow one the less important figures are left to ``report.html``.
    """
    shown = [i for i, column in enumerate(COLUMNS) if width >= _WIDE or column not in _WIDE_ONLY]
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i in shown:
        table.add_column(COLUMNS[i], justify="left" if i == 0 else "right", no_wrap=True)
    for summary in summaries:
        row = cells(summary)
        table.add_row(*(row[i] for i in shown), style="green" if summary["logp_abs_diff_max"] == 0 else None)
    return table


def make_answers(answers: Sequence[dict[str, Any]]) -> Table:
    """What the model said before and after, one row a question, right answers marked."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("held-out question", "before", "after"):
        table.add_column(column)
    for answer in answers:
        said = (("✓ " if answer[f"{when}_right"] else "✗ ") + answer[when] for when in ("before", "after"))
        table.add_row(*map(escape, (answer["question"], *said)))
    return table


def _text(value: Any, template: str) -> str:
    return "–" if value is None else template.format(value)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def _share(value: float | None) -> str:
    """A share that says 100% only when it is 1.0: everything else is rounded down."""
    if value is None or math.isnan(value):
        return "–" if value is None else "nan"
    return "100%" if value == 1.0 else f"{math.floor(1000 * value) / 10:.1f}%"


def _small(value: float | None) -> str:
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.1e}"


def _bytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**30:.1f} GiB"


def _sync(summary: dict[str, Any]) -> str:
    sent, bf16 = summary["sync_bytes"], summary["sync_bytes_bf16"]
    if not sent:
        return "–"
    return f"{sent / 2**20:.2f} MiB" + (f" ({sent / bf16:.2f}×)" if bf16 else "")
