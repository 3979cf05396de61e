"""The page's tables: plain HTML with the run as an attribute of each row and the sort key as an attribute of each cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from jetrl_patch.report.described import describe
from jetrl_patch.report.runs import PARTS
from jetrl_patch.report.scales import Scales
from jetrl_patch.report.styles import DASHES, Style
from jetrl_patch.report.tables import Column, changes_text, shown_columns, versions_text

__all__ = [
    "answers_table",
    "cards",
    "layers_table",
    "one_environment",
    "parts_table",
    "steady_table",
    "summary_table",
    "swatch",
]

Cell = tuple[str, float | str | None, str]  # HTML, sort key, class


def swatch(style: Style) -> str:
    """A short sample of a run's line."""
    dash = " ".join(map(str, DASHES[style.dash])) or "none"
    return (
        '<svg class="swatch" viewBox="0 0 34 10" aria-hidden="true"><line x1="2" x2="32" y1="5" y2="5" stroke-width="3" '
        f'stroke-dasharray="{dash}" style="stroke:var(--run{style.colour})"/></svg>'
    )


def summary_table(summaries: Sequence[dict[str, Any]], swatches: Sequence[str]) -> str:
    """One row per run, with the columns for which any run has a value."""
    alike = one_environment(summaries)
    columns = [c for c in shown_columns(summaries) if c.title != "versions" or not alike]
    rows = [
        (
            i,
            summary["logp_abs_diff_max"] == 0,
            [_name(summary, swatches[i])]
            + [(escape(c.text(summary)), c.value(summary), _kind(c)) for c in columns[1:]],
        )
        for i, summary in enumerate(summaries)
    ]
    return _table("Summary", [(c.title, _kind(c), c.help) for c in columns], rows, ident="summary-table")


def _kind(column: Column) -> str:
    """The classes of a column's cells: left-aligned, and hidden until all columns are asked for."""
    return " ".join(("left",) * column.left + ("more",) * column.page)


def one_environment(summaries: Sequence[dict[str, Any]]) -> bool:
    """Whether all runs are known to use the same versions."""
    found = {versions_text(summary, all_of_them=True) for summary in summaries}
    return len(found) == 1 and found != {""}


def parts_table(summaries: Sequence[dict[str, Any]], swatches: Sequence[str]) -> str:
    """The parts of a step, as a bar and as numbers; "" if no run has them."""
    known = [(i, summary) for i, summary in enumerate(summaries) if summary["parts"]]
    if not known:
        return ""
    names = [*PARTS, "other"]
    keys = "".join(f'<span><i class="part{k}"></i>{escape(name)}</span>' for k, name in enumerate(names))
    rows = []
    for i, summary in known:
        parts = [summary["parts"][name] for name in names]
        total = sum(parts)
        pieces = "".join(
            f'<i class="part{k}" style="--v:{value:.5g}" title="{escape(name)} {value:.3g} s"></i>'
            for k, (name, value) in enumerate(zip(names, parts, strict=True))
            if value
        )
        bar: Cell = (f'<div class="bar" data-total="{total:.5g}">{pieces}</div>', total, "wide")
        figures: list[Cell] = [(f"{v:.2f} s ({100 * v / total if total else 0:.0f}%)", v, "") for v in parts]
        rows.append((i, False, [_name(summary, swatches[i]), bar, *figures]))
    heads = [("run", "left", ""), ("mean seconds per step", "", ""), *((name, "", "") for name in names)]
    return (
        f"<h2>Parts of a step</h2><div class=keys>{keys}</div>{_table('Parts of a step', heads, rows)}"
        '<p class="soft">Means over the steps, from the framework’s own timers; “other” is the rest of the step. '
        "In an asynchronous run the parts overlap.</p>"
    )


def layers_table(scales: Scales, summaries: Sequence[dict[str, Any]], swatches: Sequence[str]) -> str:
    """The worst value of every statistic, per layer and run; "" if there are no per-layer statistics."""
    whats = [what for what in scales.whats if scales.per_layer(what)]
    rows = []
    for i, summary in enumerate(summaries):
        for number, layer in enumerate(scales.layers):
            values = [scales.worst(i, what, layer) for what in whats]
            if any(value is not None for value in values):
                cells: list[Cell] = [("–" if v is None else f"{v:.4g}", v, "") for v in values]
                rows.append((i, False, [_name(summary, swatches[i]), (escape(layer), f"{number:06d}", "left"), *cells]))
    if not rows:
        return ""
    told = [describe(what) for what in whats]
    heads = [("run", "left", ""), ("layer", "left", ""), *((d.title, "", d.help or "worst value over the steps") for d in told)]
    return f"<details><summary>Worst value per layer</summary>{_table('Layers', heads, rows, tall=True)}</details>"


def answers_table(answers: Sequence[dict[str, Any]], changed: Mapping[str, int]) -> str:
    """The model's answers before and after training, and how many of all became right or wrong; "" if there are none."""

    def said(answer: dict[str, Any], when: str) -> str:
        kind, mark = ("right", "✓") if answer[f"{when}_right"] else ("wrong", "✗")
        return f'<td class="text"><b class="{kind}">{mark}</b> {escape(answer[when])}</td>'

    if not answers:
        return ""
    rows = "".join(
        f'<tr><td class="text">{escape(a["question"])}</td>{said(a, "before")}{said(a, "after")}</tr>' for a in answers
    )
    heads = "".join(f'<th class="text" scope="col">{text}</th>' for text in ("held-out question", "before", "after"))
    table = _scroll("Answers", f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody>")
    counts = f'<p class="soft">{escape(changes_text(changed))}</p>' if changed else ""
    return f"<h2>The model’s answers</h2>{counts}{table}"


def steady_table(found: Sequence[tuple[str, str, str]]) -> str:
    """Metrics with one value at every step of every run, as ``(title, explanation, value)``; "" if there are none."""
    rows = "".join(f"<dt>{escape(title)}</dt><dd title=\"{escape(text)}\">{escape(value)}</dd>" for title, text, value in found)
    return f"<h3>The same at every step of every run</h3><dl>{rows}</dl>" if rows else ""


def cards(summaries: Sequence[dict[str, Any]]) -> str:
    """The main figures as cards; figures that were not measured are omitted."""
    found = []
    exact = [s for s in summaries if s["align"] == "exact" and s["tokens"]]
    if exact:
        tokens = sum(s["tokens"] for s in exact)
        equal = all(s["bit_equal_fraction_min"] == 1.0 and s["logp_abs_diff_max"] == 0.0 for s in exact)
        figure = f"0 of {tokens:,}" if equal else f"{max(s['logp_abs_diff_max'] for s in exact):.1e}"
        text = "tokens differ between FP8 rollout and FP8 trainer" if equal else "largest |Δ log-prob| of the exact runs"
        found.append(_card(figure, text, good=equal))
    usual = [s["logp_abs_diff_mean"] for s in summaries if s["precision"] == "fp8-rollout" and s["logp_abs_diff_mean"]]
    if usual:
        found.append(_card(f"{sum(usual) / len(usual):.1e}", "mean |Δ log-prob| with FP8 in the rollout only"))
    best = exact or (list(summaries) if len(summaries) == 1 else [])
    learned = [s for s in best if s["accuracy_first"] is not None]
    if learned:
        first, last = (sum(s[k] for s in learned) / len(learned) for k in ("accuracy_first", "accuracy_last"))
        whose = " of the exact runs" if exact and len(summaries) > len(exact) else ""
        found.append(_card(f"{100 * first:.0f}% → {100 * last:.0f}%", f"accuracy on held-out questions{whose}"))
    synced = [s for s in best if s["sync_bytes"] and s["sync_bytes_bf16"]]
    if synced:
        ratio = synced[-1]["sync_bytes"] / synced[-1]["sync_bytes_bf16"]
        found.append(_card(f"{ratio:.2f}×", "bytes per weight sync for the FP8 layers, relative to BF16"))
    return f'<section class="cards" aria-label="Main figures">{"".join(found)}</section>' if found else ""


def _card(figure: str, text: str, good: bool = False) -> str:
    return f'<div class="card{" good" if good else ""}"><b>{escape(figure)}</b><span>{escape(text)}</span></div>'


def _name(summary: dict[str, Any], line: str) -> Cell:
    return f"{line}{escape(summary['name'])}", summary["name"], "left name"


def _table(
    name: str,
    heads: Sequence[tuple[str, str, str]],
    rows: Sequence[tuple[int, bool, list[Cell]]],
    tall: bool = False,
    ident: str = "",
) -> str:
    """A sortable table.

    Args:
        heads: per column, the title, its classes (``left`` for text), and its explanation.
        rows: per row, the run, whether to highlight it, and the cells.
        tall: whether it scrolls within a limited height.
        ident: the table's id.
    """
    top = "".join(
        f'<th scope="col" class="{kind}">'
        f'<button type="button" title="{escape(help)}">{escape(title)}</button></th>'
        for title, kind, help in heads
    )
    body = "".join(
        f"<tr data-run={run}{' class=good' if good else ''}>"
        + "".join(f'<td class="{kind}" data-value="{_value(value)}">{html}</td>' for html, value, kind in cells)
        + "</tr>"
        for run, good, cells in rows
    )
    return _scroll(name, f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>", tall, ident)


def _value(value: float | str | None) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return "" if value is None else escape(str(value))


def _scroll(name: str, inside: str, tall: bool = False, ident: str = "") -> str:
    """A table in a box that scrolls on its own, also by keyboard, so that the page never scrolls sideways."""
    named = f' id="{ident}"' if ident else ""
    label = f'role="region" aria-label="{escape(name)}, table" tabindex="0"'
    return f'<div class="scroll{" tall" if tall else " pin"}" {label}><table{named}>{inside}</table></div>'
