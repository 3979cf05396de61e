"""Read metrics in JSON lines. There are three formats; the first line of a file decides which one it is.

The examples' format, with several runs per file::

    {"precision": "fp8-unified", "align": "exact", "seed": 0, "step": 3, "data": {"jetrl/logp_abs_diff_max": 0.0, ...}}
    {"precision": "fp8-unified", "align": "exact", "seed": 0, "final": {"peak_memory_bytes": ..., "versions": {...}}}

The format of verl's ``file`` logger::

    {"step": 3, "data": {"critic/score/mean": 0.5, ...}}

One flat object per step, as in a history exported from Weights & Biases (OpenRLHF's prefixes ``train/`` and ``eval/``
are removed)::

    {"_step": 3, "train/global_step": 3, "train/rollout/reward_mean": 0.5, ...}

``final`` may also hold ``answers``, a list of ``{"question", "before", "before_right", "after", "after_right"}``,
and ``answers_changed``, the counts of ``tables.CHANGES``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jetrl_patch.errors import explain
from jetrl_patch.report.runs import ReportError, Run

__all__ = ["STEP_NAMES", "Keep", "bare", "read_jsonl"]

Keep = Callable[[str], bool]

#: keys that hold the step of a flat record, in order of preference
STEP_NAMES = ("train/global_step", "eval/global_step", "global_step", "step", "training/global_step", "_step")


def read_jsonl(path: Path, keep: Keep, notes: list[str]) -> list[Run]:
    """The runs of one file, in order of appearance; a truncated last line is skipped and reported in ``notes``.

    Args:
        keep: selects the metrics to keep in memory.

    Raises:
        ReportError: a line has none of these formats; the message gives its number.
    """
    runs: dict[object, Run] = {}
    add: Callable[[dict[object, Run], dict[str, Any], str, Keep], None] | None = None
    for number, record in _records(path, notes):
        where = f"{path}, line {number}"
        if not isinstance(record, dict):
            raise ReportError(
                explain(
                    where, required="a JSON object", found=type(record).__name__, fix="check that this is a metrics file"
                )
            )
        if add is None:
            add = _kind(record)
        if add is None:
            wanted = 'an object with "step" and "data", or with one of ' + ", ".join(STEP_NAMES)
            found = "an object with " + (", ".join(list(record)[:8]) or "nothing in it")
            raise ReportError(explain(where, required=wanted, found=found, fix="give a file written by a metrics logger"))
        add(runs, record, where, keep)
    return list(runs.values())


def bare(name: str) -> str:
    """A metric's name without the prefixes of OpenRLHF's loggers."""
    return name.removeprefix("train/").removeprefix("eval/")


def _records(path: Path, notes: list[str]) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as error:  # JSONDecodeError, or UnicodeDecodeError
                if not line.endswith(b"\n"):
                    notes.append(f"{path}, line {number}: truncated; the {number - 1} lines before it are used")
                    return
                why = getattr(error, "msg", "not UTF-8")
                raise ReportError(
                    explain(
                        f"{path}, line {number}: not JSON", required="one object per line", found=why, fix="remove the line"
                    )
                ) from None


def _kind(record: dict[str, Any]) -> Callable[[dict[object, Run], dict[str, Any], str, Keep], None] | None:
    if "precision" in record:
        return _add_ours
    if isinstance(record.get("data"), dict):
        return _add_verl
    return _add_flat if any(name in record for name in STEP_NAMES) else None


def _add_ours(runs: dict[object, Run], record: dict[str, Any], where: str, keep: Keep) -> None:
    precision, align, seed = record.get("precision"), record.get("align"), record.get("seed")
    correction, replay = str(record.get("correction") or ""), str(record.get("router_replay") or "")
    if not isinstance(precision, str) or not isinstance(align, str) or not isinstance(seed, int):
        raise ReportError(f"{where}: a record needs precision and align (strings) and seed (an integer)")
    made = Run(precision, align, seed, correction=correction, router_replay=replay)
    run = runs.setdefault((precision, align, seed, correction, replay), made)
    if isinstance(record.get("final"), dict):
        run.final.update(record["final"])
    elif isinstance(record.get("step"), int) and isinstance(record.get("data"), dict):
        _merge(run, record["step"], record["data"], keep)
    else:
        raise ReportError(f"{where}: a record needs step and data, or final")


def _add_verl(runs: dict[object, Run], record: dict[str, Any], where: str, keep: Keep) -> None:
    if not isinstance(record.get("data"), dict):
        raise ReportError(f'{where}: a record needs "data", as the lines before it have')
    _merge(_only(runs), _step(record.get("step"), where), record["data"], keep)


def _add_flat(runs: dict[object, Run], record: dict[str, Any], where: str, keep: Keep) -> None:
    step = _step(next((record[name] for name in STEP_NAMES if record.get(name) is not None), None), where)
    data = {bare(name): value for name, value in record.items() if name not in STEP_NAMES}
    # a flat history omits what was not logged at this step, or writes null
    _merge(_only(runs), step, {name: value for name, value in data.items() if value is not None}, keep)


def _only(runs: dict[object, Run]) -> Run:
    return runs.setdefault(None, Run("", "", 0))


def _step(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or int(value) != value:
        raise ReportError(explain(where, required="an integer step", found=repr(value), fix="correct or remove the line"))
    return int(value)


def _merge(run: Run, step: int, data: dict[str, Any], keep: Keep) -> None:
    run.steps.setdefault(step, {}).update((name, value) for name, value in data.items() if keep(name))
