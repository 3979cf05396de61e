"""``jetrl report``: read the runs, write the page and the pictures, print the table; with ``--watch`` again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jetrl_patch.cli.report.charts import draw
from jetrl_patch.cli.report.figures import script
from jetrl_patch.cli.report.page import write_page, write_summary
from jetrl_patch.cli.report.pictures import draw_pictures
from jetrl_patch.cli.report.prometheus import write_metrics
from jetrl_patch.cli.report.runs import ReportError, Run
from jetrl_patch.cli.report.sources import collect, find_file, parse
from jetrl_patch.cli.report.tables import make_table
from jetrl_patch.errors import check_target, explain, writing
from jetrl_patch.progress import Display, Progress


def write_report(folder: Path, title: str = "jetrl_patch", subtitle: str = "") -> list[dict[str, Any]]:
    """Report on ``folder/metrics.jsonl`` in the same folder, and return the contents of ``summary.json``.

    Raises:
        ReportError: there is nothing to report on, or Plotly or matplotlib is missing (the summary is written anyway).
        ConfigError: the system refuses to read the file.
    """
    notes: list[str] = []
    runs = collect([str(folder / "metrics.jsonl")], notes)
    summaries = write_summary(runs, folder)
    write_page(runs, summaries, folder, title, subtitle, notes)
    draw_pictures(runs, folder)
    return summaries


def command(
    texts: Sequence[str], out: Path, title: str, console: Console, warnings: Console, prometheus: Path | None = None
) -> None:
    """Write a report on the RUN arguments ``texts`` to the folder ``out``, and print the table on ``console``.

    Args:
        prometheus: also write the newest metrics there (``write_metrics``).

    Raises:
        ReportError: a run cannot be read, or no run has a metric that the report shows.
        ConfigError: the system refuses to read a run, or to write the report.
    """
    check_target(out, folder=True)
    if prometheus is not None:
        check_target(prometheus, folder=False)
    notes: list[str] = []
    made = [out / "summary.json"]
    with Display("report", warnings.file) as progress:
        runs = _read(texts, notes, progress, prometheus)
        with writing(out):
            summaries = write_summary(runs, out)
            for stage, make in (
                ("writing the page", lambda: [write_page(runs, summaries, out, title, _count(runs), notes)]),
                ("drawing the pictures", lambda: draw_pictures(runs, out)),
            ):
                progress.stage(stage)
                try:
                    made += make()
                except ReportError as error:
                    notes.append(str(error))
    for note in notes:
        _warn(warnings, f"warning: {note}")
    console.print(make_table(summaries, title, console.width))
    console.print(f"{out}: {', '.join(path.name for path in made)}", markup=False, soft_wrap=True)


def watch(
    texts: Sequence[str],
    out: Path,
    title: str,
    every: int,
    console: Console,
    warnings: Console,
    sleep: Callable[[float], None] = time.sleep,
    prometheus: Path | None = None,
) -> None:
    """Rewrite the page whenever a run's file has grown, until Ctrl-C; then write the finished report like ``command``.

    Waits for files that do not exist yet or hold no step.

    Args:
        every: seconds between two looks at the files, and between two reloads of the page.
        sleep: waits between two looks.
        prometheus: as ``command``.

    Raises:
        ReportError: Plotly is not installed; at the end, there is nothing to report on.
        ConfigError: as ``command``.
    """
    check_target(out, folder=True)
    if prometheus is not None:
        check_target(prometheus, folder=False)
    script()
    console.print(f"watching every {every} s; Ctrl-C ends it and writes the finished report", soft_wrap=True)
    before, said = None, ""
    try:
        while True:
            try:
                state = _state(texts)
                if state != before:
                    with Display("report", warnings.file) as progress:
                        notes: list[str] = []
                        runs = _read(texts, notes, progress, prometheus)
                        progress.stage("writing the page")
                        with writing(out):
                            page = write_page(runs, write_summary(runs, out), out, title, _count(runs), notes, live=every)
                    steps = ", ".join(f"{run.label} step {max(run.steps)}" for run in runs)
                    console.print(f"{time.strftime('%H:%M:%S')}  {steps}  {page}", markup=False, soft_wrap=True)
                    before = state
            except ReportError as error:
                if str(error) != said:
                    _warn(warnings, f"waiting: {error}")
                said = str(error)
            sleep(every)
    except KeyboardInterrupt:
        console.print()
    command(texts, out, title, console, warnings, prometheus)


def _state(texts: Sequence[str]) -> list[tuple[Path, int, int]]:
    """What changes while a run continues: the size and the time of each file."""
    files = [find_file(parse(text).path) for text in texts]
    return [(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _warn(warnings: Console, text: str) -> None:
    warnings.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _count(runs: Sequence[Run]) -> str:
    return f"{len(runs)} run{'s' if len(runs) > 1 else ''}"


def _read(texts: Sequence[str], notes: list[str], progress: Progress, prometheus: Path | None) -> list[Run]:
    """Read the runs, and write their newest metrics. Adds a note if a run has no metric to show, or if the runs share none."""
    runs = collect(texts, notes, progress)
    charts = draw(runs)
    if not charts:
        seen = dict.fromkeys(name for run in runs for data in run.steps.values() for name in data)
        found = ", ".join([*seen][:8]) or "none"
        fix = "make the framework log rewards, timings or jetrl/… metrics"
        raise ReportError(explain("report", required="metrics of a training run", found=found, fix=fix))
    keys = {run.label: {chart.key for chart in charts if chart.series[i]} for i, run in enumerate(runs)}
    notes += [f"{name}: has none of the metrics that the report shows" for name, shown in keys.items() if not shown]
    some = [shown for shown in keys.values() if shown]
    if len(some) > 1 and not set.intersection(*some):
        notes.append("no metric is common to all runs; each chart shows the runs that have it")
    if prometheus is not None:
        with writing(prometheus):
            write_metrics(runs, prometheus)
    return runs
