"""``jetrl report``: read the runs, write the page and the pictures, print the table."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jetrl_patch.errors import explain
from jetrl_patch.places import check_target, writing
from jetrl_patch.report import write
from jetrl_patch.report.charts import draw, wanted
from jetrl_patch.report.pictures import draw_pictures
from jetrl_patch.report.runs import ReportError, Run
from jetrl_patch.report.sources import collect
from jetrl_patch.report.tables import make_table

__all__ = ["command"]


def command(texts: Sequence[str], out: Path, title: str, console: Console, warnings: Console) -> None:
    """Write a report on the RUN arguments ``texts`` to the folder ``out``, and print the table on ``console``.

    Raises:
        ReportError: a run cannot be read, or no run has a metric that the report shows.
        ConfigError: the system refuses to read a run, or to write the report.
    """
    check_target(out, folder=True)
    notes: list[str] = []
    seen: list[str] = []

    @functools.cache  # so that ``seen`` lists each name once
    def keep(name: str) -> bool:
        seen.append(name)
        return wanted(name)

    runs = collect(texts, keep, notes)
    _look(runs, seen, notes)
    made = [out / "report.html", out / "summary.json"]
    with writing(out):
        summaries = write(runs, out, title, f"{len(runs)} run{'s' if len(runs) > 1 else ''}", notes)
        try:
            made += draw_pictures(runs, out)
        except ReportError as error:
            notes.append(str(error))
    for note in notes:
        warnings.print(f"warning: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(make_table(summaries, title, console.width))
    console.print(f"{out / 'report.html'} and {', '.join(path.name for path in made[1:])}", soft_wrap=True)


def _look(runs: Sequence[Run], seen: Sequence[str], notes: list[str]) -> None:
    """Note the runs without anything to show, and runs that have no metric in common."""
    drawn = draw(runs)
    if not drawn:
        found = ", ".join(seen[:8]) or "none"
        fix = "make the framework log rewards, timings or jetrl/… metrics"
        raise ReportError(explain("report", required="metrics of a training run", found=found, fix=fix))
    having = [{d.chart.key for d in drawn if d.series[i]} for i in range(len(runs))]
    for run, keys in zip(runs, having, strict=True):
        if not keys:
            notes.append(f"{run.label}: has none of the metrics that the report shows")
    some = [keys for keys in having if keys]
    if len(some) > 1 and not set.intersection(*some):
        notes.append("no metric is common to all runs; each chart shows the runs that have it")
