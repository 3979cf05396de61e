"""Write the page: which of the frameworks' launches each mode accepts, and why it refuses the others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jetrl_patch.patching.guards import installed_version
from scripts.official import keys
from scripts.official.expand import Expansion
from scripts.official.judge import ASYNC, Judged, modes
from scripts.official.models import CLASSES

__all__ = ["ROOT", "Source", "classes", "counts", "plain", "unlocks", "write"]

ROOT = Path(__file__).resolve().parents[2]
_CLASS_NAMES = {ASYNC: "asynchronous, or another entry point", "": "unknown model"}
#: the part of a message that repeats the mode
_MODE = re.compile(r" with precision='[\w-]+', align='\w+'")

Source = tuple[str, Sequence[Expansion], Sequence[Judged]]


def classes() -> tuple[str, ...]:
    """All classes of launches, in the page's order."""
    return (*CLASSES, ASYNC, "")


def counts(judged: Sequence[Judged]) -> dict[str, dict[str, int]]:
    """Class -> mode -> number of accepted launches, and ``launches``: their number. Only classes that occur."""
    found: dict[str, dict[str, int]] = {}
    for kind in classes():
        group = [one for one in judged if one.kind == kind]
        if group:
            found[kind] = {"launches": len(group)} | {mode: sum(one.accepted(mode) for one in group) for mode in modes()}
    return found


def unlocks(judged: Sequence[Judged], mode: str) -> list[tuple[str, int, int]]:
    """Subjects of refusals, the most common first: ``(subject, refused launches, those refused for nothing else)``."""
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
    """A message in one line without the words that name the mode, safe in a table."""
    words = " ".join(_MODE.sub("", text).split())
    return words.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("$", "\\$")


def write(sources: Sequence[Source], runs: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page's text.

    Args:
        sources: for each checkout its title, its scripts' launches, and the verdicts.
        runs: results of real runs, as stored by ``run.py``.
    """
    titles = " and ".join(title for title, _, _ in sources)
    lines = [
        "# The frameworks' own scripts",
        "",
        f"Which launches of the example scripts of {titles} start with the plugin in each mode, and why the others do not.",
        "",
        "`make official SCRIPTS=DIR` writes this page from a checkout. It runs each script with stubs for the programs that it",
        "starts, and checks each launch as `jetrl doctor` and the driver do. It assumes that the machine has the GPUs, data and",
        "model (its `config.json`) that the script needs. *Accepted* means that no setting contradicts the mode.",
        "",
    ]
    for title, expansions, judged in sources:
        lines += [f"## {title}", "", *_summary(title, expansions, judged), ""]
        lines += [*_counts(judged), *_open_keys(judged), *_unlocks(judged), *_launches(judged)]
    lines += _runs(runs)
    return "\n".join(lines).rstrip() + "\n"


def _summary(title: str, expansions: Sequence[Expansion], judged: Sequence[Judged]) -> list[str]:
    training = [one for one in judged if one.kind is not None]
    parts = [f"{len(expansions)} scripts make {len(judged)} launches, {len(training)} of them with a rollout."]
    own = sum(one.launch.own_environment for one in training)
    if own:
        parts.append(
            f"{own} of these start by `uv run`, in an environment that uv makes: install the plugin there, or start the script "
            "with `VERL_USE_UV=0`."
        )
    name, _, version = title.rpartition(" ")
    installed = installed_version(name.lower()) if name else None
    if installed and installed != version:
        parts.append(f"{name} {installed}, the version that the plugin's tests install, judges them.")
    failed = [one for one in expansions if one.failure]
    if failed:
        parts.append(f"Did not finish: {'; '.join(f'`{_short(one.script)}` ({plain(one.failure)})' for one in failed)}.")
    notes = dict.fromkeys(note for one in training for note in one.notes)
    parts += [f"{note[0].upper()}{note[1:]}." for note in notes]
    cut = Counter(mode for one in training for mode in one.cut)
    if cut:
        more = ", ".join(f"{cut[mode]} in {mode}" for mode in modes() if cut[mode])
        parts.append(f"Also accepted with `JETRL_ON_CUT=bf16`: {more}.")
    return [" ".join(parts)]


def _counts(judged: Sequence[Judged]) -> list[str]:
    """One row per class, and their sums."""
    found = counts(judged)
    rows = [(_CLASS_NAMES.get(kind, kind), *row.values()) for kind, row in found.items()]
    if len(rows) > 1:
        rows.append(("all", *(sum(row[key] for row in found.values()) for key in ("launches", *modes()))))
    return ["### Accepted launches", "", *_table(("class", "launches", *modes()), rows), ""]


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def _open_keys(judged: Sequence[Judged]) -> list[str]:
    found = {name for mode in modes() if mode in ("exact", "linear") for name in keys.open_keys(judged, mode)}
    text = "Every setting of an accepted launch is either checked by the plugin or known not to affect log-probs"
    if found:
        text += f" (`scripts/official/keys.py` says why), except {', '.join(f'`{name}`' for name in sorted(found))}"
    else:
        text += ": `scripts/official/keys.py` says why"
    return [f"{text}.", ""]


def _unlocks(judged: Sequence[Judged]) -> list[str]:
    chosen = [mode for mode in modes() if any(one.kind is not None and not one.accepted(mode) for one in judged)]
    found: dict[str, dict[str, str]] = {}
    for mode in chosen:
        for about, refused, alone in unlocks(judged, mode):
            found.setdefault(about, {})[mode] = f"{refused} ({alone})"
    text = "Launches that each setting blocks; in brackets, those that nothing else blocks."
    lines = ["### What would unlock more", "", text, ""]
    if not found:
        return ["Nothing is blocked.", ""]
    rows = [(_code(about), *(cells.get(mode, "–") for mode in chosen)) for about, cells in found.items()]
    return [*lines, *_table(("what", *chosen), rows), ""]


def _code(about: str) -> str:
    return f"`{about}`" if re.fullmatch(r"[-\w.=']+", about) and ("." in about or "=" in about) else plain(about)


def _launches(judged: Sequence[Judged]) -> list[str]:
    lines = ["### Every launch", "", "*yes*: accepted. A number: rejected, for the reason with that number below.", ""]
    reasons: dict[str, int] = {}
    for kind in classes():
        group = [one for one in judged if one.kind == kind]
        if not group:
            continue
        rows = []
        for one in group:
            cells = []
            for mode in modes():
                texts = dict.fromkeys(plain(problem.text) for problem in one.verdicts[mode])
                numbers = [reasons.setdefault(text, len(reasons) + 1) for text in texts]
                cells.append(", ".join(map(str, sorted(numbers))) if numbers else "yes" if kind != "" else "unknown")
            rows.append((f"`{_short(one.launch.name)}`", plain(one.model) or "–", *cells))
        lines += [*_table((_CLASS_NAMES.get(kind, kind), "model", *modes()), rows), ""]
    if reasons:
        lines += ["Reasons:", "", *(f"{number}. {text}" for text, number in reasons.items()), ""]
    others = sorted({one.target for one in judged if one.kind is None})
    if others:
        lines += [f"These have no rollout, so there is nothing to compare: {', '.join(f'`{name}`' for name in others)}.", ""]
    return lines


def _short(name: str) -> str:
    return name.removeprefix("examples/").removeprefix("scripts/")


def _runs(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    if not runs:
        return []
    text = [
        "One script of each accepted class ran on a CPU with real vLLM: its own command line, followed by settings that shrink",
        "it (a small model, small batches and lengths, one process, two steps). Megatron launches need GPUs.",
    ]
    head = "script", "mode", "what it covers", "steps", "tokens", "bit-equal, worst step", "max abs Δlogp", "scripts of"
    rows = []
    for run in runs:
        share = f"{run['bit_equal_fraction_min']:.1%}" if run["steps"] else "–"
        largest = f"{run['logp_abs_diff_max']:.1e}" if run["logp_abs_diff_max"] else "0"
        found = largest if run["steps"] else run["failure"]
        name = f"`{_short(run['script'])}`"
        rows.append((name, run["mode"], run["covers"], run["steps"], f"{run['tokens']:,}", share, found, run["release"]))
    return ["## Run for real", "", *text, "", *_table(head, rows), ""]
