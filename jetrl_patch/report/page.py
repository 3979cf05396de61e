"""The report as one HTML file that stands alone: style and pictures are inside, nothing is fetched."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from jetrl_patch.report.pictures import colour
from jetrl_patch.report.tables import COLUMNS, cells

__all__ = ["make_page"]

LEGEND = (
    ("accuracy", "share of held-out questions answered right, greedy, before the first step and after the last"),
    ("mean |Δ|, max |Δ|", "difference of the two log-probs of a sampled token, over all tokens of all steps"),
    ("bit-equal", "share of tokens whose two log-probs are the same bits, in the worst step"),
    ("k3 KL", "the non-negative estimator r − 1 − log r of the divergence between rollout and trainer, per token"),
    ("sync", "bytes of the FP8 layers in one weight sync, and their ratio to sending them in BF16"),
    ("s/step", "median wall time of a step, validation left out"),
    ("memory", "largest memory of all processes of the run together"),
)


def make_page(
    summaries: Sequence[dict[str, Any]],
    title: str,
    subtitle: str,
    learning: Path,
    mismatch: Path,
    answers: Sequence[dict[str, Any]] = (),
) -> str:
    """The page's text.

    Args:
        learning, mismatch: PNG files; their bytes go into the page.
        answers: what the model said before and after (see ``runs``); without any, the page has no such section.
    """
    arms = list(dict.fromkeys(cells(summary)[0] for summary in summaries))
    template = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        subtitle=escape(subtitle),
        cards="".join(_cards(summaries)),
        columns="".join(f"<th>{escape(column)}</th>" for column in COLUMNS),
        rows="".join(_row(summary, arms) for summary in summaries),
        mismatch=_inline(mismatch),
        learning=_inline(learning),
        answers=_answers(answers),
        legend="".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in LEGEND),
        versions=escape(_versions(summaries)),
    )


def _cards(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """The few figures that tell the story; a card whose figure was not measured is left out."""
    cards = []
    exact = [s for s in summaries if s["align"] == "exact" and s["tokens"]]
    if exact:
        tokens = sum(s["tokens"] for s in exact)
        equal = all(s["bit_equal_fraction_min"] == 1.0 and s["logp_abs_diff_max"] == 0.0 for s in exact)
        figure = f"0 of {tokens:,}" if equal else f"{max(s['logp_abs_diff_max'] for s in exact):.1e}"
        text = "tokens differ between FP8 rollout and FP8 trainer" if equal else "largest |Δlogp| of the exact runs"
        cards.append(_card(figure, text, good=equal))
    rollout = [
        s["logp_abs_diff_mean"] for s in summaries if s["precision"] == "fp8-rollout" and s["logp_abs_diff_mean"]
    ]
    if rollout:
        cards.append(_card(f"{sum(rollout) / len(rollout):.1e}", "mean |Δlogp| of the usual recipe, FP8 rollout only"))
    best = exact or list(summaries)
    learned = [s for s in best if s["accuracy_first"] is not None and s["accuracy_last"] is not None]
    if learned:
        first, last = (sum(s[k] for s in learned) / len(learned) for k in ("accuracy_first", "accuracy_last"))
        cards.append(_card(f"{100 * first:.0f}% → {100 * last:.0f}%", "accuracy on held-out questions"))
    synced = [s for s in best if s["sync_bytes"] and s["sync_bytes_bf16"]]
    if synced:
        ratio = synced[-1]["sync_bytes"] / synced[-1]["sync_bytes_bf16"]
        cards.append(_card(f"{ratio:.2f}×", "bytes per weight sync of the FP8 layers, against BF16"))
    return cards


def _card(figure: str, text: str, good: bool = False) -> str:
    return f'<div class="card{" good" if good else ""}"><b>{escape(figure)}</b><span>{escape(text)}</span></div>'


def _row(summary: dict[str, Any], arms: Sequence[str]) -> str:
    first, *rest = cells(summary)
    dot = f'<i class="dot" style="background:{colour(first, arms.index(first))}"></i>'
    good = ' class="good"' if summary["logp_abs_diff_max"] == 0 else ""
    return f"<tr{good}><td>{dot}{escape(first)}</td>" + "".join(f"<td>{escape(cell)}</td>" for cell in rest) + "</tr>"


def _answers(answers: Sequence[dict[str, Any]]) -> str:
    if not answers:
        return ""

    def said(answer: dict[str, Any], when: str) -> str:
        kind, mark = ("right", "✓") if answer[f"{when}_right"] else ("wrong", "✗")
        return f'<td class="text"><b class="{kind}">{mark}</b> {escape(answer[when])}</td>'

    rows = "".join(
        f'<tr><td class="text">{escape(a["question"])}</td>{said(a, "before")}{said(a, "after")}</tr>' for a in answers
    )
    heads = "".join(f'<th class="text">{text}</th>' for text in ("held-out question", "before", "after"))
    return (
        "<h2>What the model says</h2>"
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _versions(summaries: Sequence[dict[str, Any]]) -> str:
    merged: dict[str, str] = {}
    for summary in summaries:
        merged.update(summary["versions"] or {})
    return ", ".join(f"{name} {version}" for name, version in merged.items()) or "not recorded"


def _inline(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
