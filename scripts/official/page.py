"""Write the page: how many of the frameworks' launches each mode accepts, and why it refuses the others."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.official import keys
from scripts.official.expand import Expansion
from scripts.official.judge import ASYNC, Judged, modes
from scripts.official.models import CLASSES

__all__ = ["BEFORE", "ROOT", "Source", "classes", "counts", "plain", "unlocks", "write"]

ROOT = Path(__file__).resolve().parents[2]
#: the counts of an earlier state of the project, for comparison
BEFORE = Path(__file__).with_name("before.json")
_CLASS_NAMES = {ASYNC: "asynchronous, or another entry point", "": "unknown model"}
#: the part of a message that only repeats the mode
_MODE = re.compile(r" with precision='[\w-]+', align='\w+'")

Source = tuple[str, Sequence[Expansion], Sequence[Judged]]


def classes() -> tuple[str, ...]:
    """All classes of launches, in the page's order."""
    return (*CLASSES, ASYNC, "")


def counts(judged: Sequence[Judged]) -> dict[str, dict[str, int]]:
    """Class -> mode -> accepted launches, and ``launches`` for all; only the classes that occur."""
    found: dict[str, dict[str, int]] = {}
    for kind in classes():
        group = [one for one in judged if one.kind == kind]
        if group:
            found[kind] = {
                "launches": len(group),
                **{mode: sum(one.accepted(mode) for one in group) for mode in modes()},
            }
    return found


def unlocks(judged: Sequence[Judged], mode: str) -> list[tuple[str, int, int]]:
    """What refusals are about: ``(about, refused launches, of these refused for nothing else)``, the most common first."""
    met: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for one in judged:
        if one.kind is not None:
            about = {problem.about for problem in one.verdicts[mode]}
            met.update(about)
            if len(about) == 1:
                alone.update(about)
    return sorted(((name, n, alone[name]) for name, n in met.items()), key=lambda row: (-row[1], -row[2], row[0]))


def plain(text: str) -> str:
    """A message without the words that name the mode, in one line, safe in a table."""
    return (
        " ".join(_MODE.sub("", text).split())
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("*", "\\*")
        .replace("$", "\\$")
    )


def write(sources: Sequence[Source], runs: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page's text.

    Args:
        sources: for each checkout its title, what its scripts did, and the verdicts.
        runs: results of real runs, as ``run.py`` stores them.
    """
    before = json.loads(BEFORE.read_text()) if BEFORE.exists() else {}
    titles = " and ".join(title for title, _, _ in sources)
    lines = [
        "# The frameworks' own scripts",
        "",
        f"Which launches in the example scripts of {titles} start with the plugin, in each mode, and why the others do not.",
        "",
        "`make official SCRIPTS=DIR` writes this page from a checkout. It runs each script with stubs in place of the programs",
        "that it starts, and judges each launch by the checks of `jetrl doctor` and the driver. It assumes the machine that the",
        "script was written for, with its GPUs, data and model (by `config.json`). *Accepted*: no setting contradicts the mode.",
        "",
    ]
    for title, expansions, judged in sources:
        lines += _source(title, expansions, judged, before.get(title.split()[0], {}))
    lines += _runs(runs)
    return "\n".join(lines).rstrip() + "\n"


def _source(
    title: str, expansions: Sequence[Expansion], judged: Sequence[Judged], before: Mapping[str, Any]
) -> list[str]:
    lines = [f"## {title}", "", *_summary(expansions, judged), ""]
    lines += _counts(judged, before)
    lines += _open_keys(judged)
    lines += _unlocks(judged)
    lines += _launches(judged)
    return lines


def _summary(expansions: Sequence[Expansion], judged: Sequence[Judged]) -> list[str]:
    training = [one for one in judged if one.kind is not None]
    parts = [f"{len(expansions)} scripts make {len(judged)} launches, {len(training)} of them with a rollout."]
    own = sum(one.launch.own_environment for one in training)
    if own:
        parts.append(
            f"{own} of these start by `uv run`, in an environment that uv makes: install the plugin there, or start the script "
            "with `VERL_USE_UV=0`."
        )
    failed = [one for one in expansions if one.failure]
    if failed:
        parts.append(
            "Not run to their end: "
            + "; ".join(f"`{_short(one.script)}` ({plain(one.failure)})" for one in failed)
            + "."
        )
    notes = dict.fromkeys(note for one in training for note in one.notes)
    parts += [f"{note[0].upper()}{note[1:]}." for note in notes]
    cut = Counter(mode for one in training for mode in one.cut)
    if cut:
        more = ", ".join(f"{cut[mode]} in {mode}" for mode in modes() if cut[mode])
        parts.append(f"Also accepted with `JETRL_ON_CUT=bf16`: {more}.")
    return [" ".join(parts)]


def _counts(judged: Sequence[Judged], before: Mapping[str, Any]) -> list[str]:
    """One row per class; each cell is the number now, and in brackets the number before if it is another."""
    found = counts(judged)
    lines = [
        "### Accepted launches",
        "",
        f"| class | launches | {' | '.join(modes())} |",
        f"| --- | {' | '.join('---' for _ in range(len(modes()) + 1))} |",
    ]
    for kind, row in found.items():
        was = before.get(kind, {})
        cells = [f"{row[mode]} ({was[mode]})" if mode in was else str(row[mode]) for mode in modes()]
        lines.append(f"| {_CLASS_NAMES.get(kind, kind)} | {row['launches']} | {' | '.join(cells)} |")
    if len(found) > 1:
        cells = [str(sum(row[mode] for row in found.values())) for mode in modes()]
        if before:
            cells = [f"{cell} ({sum(row[mode] for row in before.values())})" for cell, mode in zip(cells, modes())]
        lines.append(f"| all | {sum(row['launches'] for row in found.values())} | {' | '.join(cells)} |")
    if before:
        lines += [
            "",
            "In brackets: the number before Ulysses, reward models and distillation were covered, and before Ascend's devices, "
            "mixtures of experts and models of several modalities were refused by name.",
        ]
    return [*lines, ""]


def _open_keys(judged: Sequence[Judged]) -> list[str]:
    found = {name for mode in modes() if mode in ("exact", "linear") for name in keys.open_keys(judged, mode)}
    text = "Every setting that an accepted launch gives is checked by the plugin or known to leave the log-probs alone"
    if found:
        text += f" (`scripts/official/keys.py` says why), except {', '.join(f'`{name}`' for name in sorted(found))}"
    else:
        text += ": `scripts/official/keys.py` says why"
    return [f"{text}.", ""]


def _unlocks(judged: Sequence[Judged]) -> list[str]:
    lines = [
        "### What would unlock more",
        "",
        "Launches that a setting refuses, and in brackets those that nothing else refuses.",
        "",
    ]
    chosen = [mode for mode in modes() if any(one.kind is not None and not one.accepted(mode) for one in judged)]
    rows: dict[str, dict[str, str]] = {}
    for mode in chosen:
        for about, refused, alone in unlocks(judged, mode):
            rows.setdefault(about, {})[mode] = f"{refused} ({alone})"
    if not rows:
        return ["Nothing is refused.", ""]
    lines += [f"| what | {' | '.join(chosen)} |", f"| --- | {' | '.join('---' for _ in chosen)} |"]
    lines += [
        f"| {_code(about)} | {' | '.join(cells.get(mode, '–') for mode in chosen)} |" for about, cells in rows.items()
    ]
    return [*lines, ""]


def _code(about: str) -> str:
    return f"`{about}`" if re.fullmatch(r"[-\w.=']+", about) and ("." in about or "=" in about) else plain(about)


def _launches(judged: Sequence[Judged]) -> list[str]:
    lines = ["### Every launch", "", "*yes*: accepted. A number: refused, for the reason of that number below.", ""]
    reasons: dict[str, int] = {}
    for kind in classes():
        group = [one for one in judged if one.kind == kind]
        if not group:
            continue
        name = _CLASS_NAMES.get(kind, kind)
        lines += [
            f"| {name} | model | {' | '.join(modes())} |",
            f"| --- | --- | {' | '.join('---' for _ in modes())} |",
        ]
        for one in group:
            cells = []
            for mode in modes():
                texts = dict.fromkeys(plain(problem.text) for problem in one.verdicts[mode])
                numbers = [reasons.setdefault(text, len(reasons) + 1) for text in texts]
                cells.append(", ".join(map(str, sorted(numbers))) if numbers else "yes" if kind != "" else "unknown")
            lines.append(f"| `{_short(one.launch.name)}` | {plain(one.model) or '–'} | {' | '.join(cells)} |")
        lines.append("")
    if reasons:
        lines += ["Reasons:", "", *(f"{number}. {text}" for text, number in reasons.items()), ""]
    others = sorted({one.target for one in judged if one.kind is None})
    if others:
        lines += [
            f"Without a rollout, so there is nothing to keep equal: {', '.join(f'`{name}`' for name in others)}.",
            "",
        ]
    return lines


def _short(name: str) -> str:
    return name.removeprefix("examples/").removeprefix("scripts/")


def _runs(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    if not runs:
        return []
    lines = [
        "## Run for real",
        "",
        "For each accepted class one script, on a CPU with real vLLM: the script's own command line, followed by the settings",
        "that shrink it (a small model, small batches and lengths, one process, two steps). All other settings are the",
        "script's. Megatron's launches need GPUs.",
        "",
        "| script | mode | what it covers | steps | tokens | bit-equal, worst step | max abs Δlogp |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs:
        share = f"{run['bit_equal_fraction_min']:.1%}" if run["steps"] else "–"
        largest = f"{run['logp_abs_diff_max']:.1e}" if run["logp_abs_diff_max"] else "0"
        lines.append(
            f"| `{_short(run['script'])}` | {run['mode']} | {run['covers']} | {run['steps']} | {run['tokens']:,} | {share} "
            f"| {largest if run['steps'] else run['failure']} |"
        )
    return [*lines, ""]
