"""``jetrl report``: read the runs, write the page and the pictures, print the table; with ``--watch`` again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jetrl_patch.cli.report.charts import draw
from jetrl_patch.cli.report.page import write
from jetrl_patch.cli.report.pictures import draw_pictures
from jetrl_patch.cli.report.runs import ReportError, Run
from jetrl_patch.cli.report.sources import Source, collect, find_file, name_runs, parse, read_runs
from jetrl_patch.cli.report.tables import make_table
from jetrl_patch.errors import check_target, explain, writing
from jetrl_patch.progress import Display, Progress

__all__ = ["command", "watch", "write_report"]


def write_report(folder: Path, title: str = "jetrl_patch", subtitle: str = "") -> list[dict[str, Any]]:
    """Report on ``folder/metrics.jsonl`` in the same folder; see ``page.write``.

    Raises:
        ReportError: there is nothing to report on, or matplotlib is missing (the page is written nevertheless).
    """
    notes: list[str] = []
    runs = read_runs(folder / "metrics.jsonl", notes)
    name_runs([Source(folder, runs=runs)])
    summaries = write(runs, folder, title, subtitle, notes)
    draw_pictures(runs, folder)
    return summaries


def command(texts: Sequence[str], out: Path, title: str, console: Console, warnings: Console) -> None:
    """Write a report on the RUN arguments ``texts`` to the folder ``out``, and print the table on ``console``.

    Raises:
        ReportError: a run cannot be read, or no run has a metric that the report shows.
        ConfigError: the system refuses to read a run, or to write the report.
    """
    check_target(out, folder=True)
    notes: list[str] = []
    made = [out / "report.html", out / "summary.json"]
    with Display("report", warnings.file) as progress:
        runs = _read(texts, notes, progress)
        with writing(out):
            progress.stage("writing the page")
            summaries = write(runs, out, title, _subtitle(runs), notes)
            progress.stage("drawing the pictures")
            try:
                made += draw_pictures(runs, out)
            except ReportError as error:
                notes.append(str(error))
    for note in notes:
        warnings.print(f"warning: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(make_table(summaries, title, console.width))
    console.print(f"{out / 'report.html'} and {', '.join(path.name for path in made[1:])}", soft_wrap=True)


def watch(
    texts: Sequence[str],
    out: Path,
    title: str,
    every: int,
    console: Console,
    warnings: Console,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Rewrite the page whenever a run's file has grown, until Ctrl-C; then write the finished report like ``command``.

    Waits for files that do not exist yet or hold no step.

    Args:
        every: interval in seconds between two looks at the files, and between two reloads of the page.
        sleep: waits between two looks.

    Raises:
        ReportError: at the end, there is nothing to report on.
        ConfigError: as ``command``.
    """
    check_target(out, folder=True)
    page = out / "report.html"
    console.print(f"watching every {every} s; Ctrl-C ends it and writes the finished report", soft_wrap=True)
    before, said = None, ""
    try:
        while True:
            try:
                state = _state(texts)
                if state != before:
                    notes: list[str] = []
                    with Display("report", warnings.file) as progress:
                        runs = _read(texts, notes, progress)
                        progress.stage("writing the page")
                        with writing(out):
                            write(runs, out, title, _subtitle(runs), notes, live=every)
                    steps = ", ".join(f"{run.label} step {max(run.steps)}" for run in runs)
                    console.print(f"{time.strftime('%H:%M:%S')}  {steps}  {page}", markup=False, soft_wrap=True)
                    before = state
            except ReportError as error:
                if str(error) != said:
                    warnings.print(f"waiting: {error}", style="yellow", markup=False, highlight=False, soft_wrap=True)
                said = str(error)
            sleep(every)
    except KeyboardInterrupt:
        console.print()
    command(texts, out, title, console, warnings)


def _state(texts: Sequence[str]) -> list[tuple[Path, int, int]]:
    """What changes while a run continues: each file with its size and time."""
    files = [find_file(parse(text).path) for text in texts]
    return [(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _subtitle(runs: Sequence[Run]) -> str:
    return f"{len(runs)} run{'s' if len(runs) > 1 else ''}"


def _read(texts: Sequence[str], notes: list[str], progress: Progress) -> list[Run]:
    """The runs; notes which have no metric that the report shows, or none in common."""
    runs = collect(texts, notes, progress)
    charts = draw(runs)
    if not charts:
        seen = dict.fromkeys(name for run in runs for data in run.steps.values() for name in data)
        found = ", ".join([*seen][:8]) or "none"
        fix = "make the framework log rewards, timings or jetrl/… metrics"
        raise ReportError(explain("report", required="metrics of a training run", found=found, fix=fix))
    having = [{chart.key for chart in charts if chart.series[i]} for i in range(len(runs))]
    for run, keys in zip(runs, having, strict=True):
        if not keys:
            notes.append(f"{run.label}: has none of the metrics that the report shows")
    some = [keys for keys in having if keys]
    if len(some) > 1 and not set.intersection(*some):
        notes.append("no metric is common to all runs; each chart shows the runs that have it")
    return runs
