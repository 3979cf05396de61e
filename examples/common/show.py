"""Terminal output while arms run, and the final check of their promises."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from examples.common.processes import undisturbed
from examples.common.recipe import Arm, Recipe
from examples.common.runner import RunFailedError, run_arm
from jetrl_patch.cli.report import ReportError, Run, changes_text, make_answers, make_table, write_report
from jetrl_patch.native import build

console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=150)  # do not wrap in a file or a pipe


def run_all(recipe: Recipe, arms: Sequence[Arm], folder: Path, title: str, subtitle: str) -> int:
    """Run the arms in order, write the report, and return the exit status: 0 only if every arm kept its promise.

    Overwrites the folder's ``metrics.jsonl``. If an arm fails or Ctrl-C stops it, the report still covers the logged steps.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("", encoding="utf-8")
    broken: list[str] = []
    verdicts: list[str] = []
    started = time.monotonic()
    for arm in arms:
        try:
            run = _run(recipe, arm, folder)
        except RunFailedError as error:
            console.print(f"[bold red]failed:[/] {arm.name}")
            console.print(str(error), style="red", markup=False)
            return _finish(folder, title, subtitle, [*broken, f"{arm.name} failed"], verdicts, started)
        except KeyboardInterrupt:
            console.print("\n[yellow]stopped[/]; every process of the run has been ended")
            with undisturbed():
                _finish(folder, title, subtitle, broken, verdicts, started)
            return 130
        broken += _promises(arm, run)
        verdicts.append(verdict(arm, run))
        if run.final.get("answers"):
            console.print(make_answers(run.final["answers"][:4]))
            console.print(changes_text(run.final["answers_changed"]))
    return _finish(folder, title, subtitle, broken, verdicts, started)


def _run(recipe: Recipe, arm: Arm, folder: Path) -> Run:
    """Run one arm with a progress bar and a line per step."""
    console.print(
        f"\n[bold]{arm.name}[/]  {recipe.steps} GRPO steps, {recipe.prompts} × {recipe.samples} responses each"
    )
    if recipe.device == "cpu":
        console.print(expected(recipe, *build.available()))
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=recipe.steps)

        def on_step(step: int, metrics: dict[str, Any]) -> None:
            progress.update(bar, completed=step, description="training")
            console.print(step_line(step, metrics))

        def on_phase(phase: str, seconds: float) -> None:
            progress.update(bar, description=phase)
            console.print(f"[dim]{seconds:4.0f} s[/]  {phase}")

        on_phase(recipe.starts, 0.0)
        return run_arm(recipe, arm, folder, on_step, lambda: None, on_phase)


def expected(recipe: Recipe, ok: bool, kernels: str) -> str:
    """What to expect on this processor: the kernels' instruction set, and the time of a step if it was measured."""
    if not ok:
        return f"[yellow]CPU kernels: none; the reference computes, far more slowly.[/] {kernels}"
    seconds = recipe.step_seconds.get(build.instruction_set())
    took = f"; on two such cores of an AMD EPYC a step took {seconds:.1f} s in exact mode" if seconds else ""
    return f"[dim]CPU kernels: {kernels}{took}[/]"


def step_line(step: int, metrics: dict[str, Any]) -> str:
    """One step in one line: ``step 12  reward 0.63  |Δlogp| 0  bit-equal 100%  3,712 tokens  4.1 s``."""
    run = Run("", "", 0, {step: metrics})
    parts = [f"[dim]step[/] {step:3d}"]

    def add(series: str | list[tuple[int, float]], label: str, template: str, unit: str = "") -> None:
        for _, value in run.series(series) if isinstance(series, str) else series:
            shown = "0" if value == 0 and "e" in template else template.format(value)
            parts.append(f"[dim]{label}[/] {shown}{unit}" if label else f"{shown}{unit}")

    add(run.reward, "reward", "{:.2f}")
    add("jetrl/logp_abs_diff_mean", "mean |Δlogp|", "{:.1e}")
    add("jetrl/logp_abs_diff_max", "max", "{:.1e}")
    for _, share in run.series("jetrl/bit_equal_fraction"):
        parts.append(f"[dim]bit-equal[/] {'[green]100%[/]' if share == 1.0 else f'{100 * share:.1f}%'}")
    add("jetrl/tokens", "", "{:,.0f}", " tokens")
    add(run.seconds, "", "{:.1f}", " s")
    for _, accuracy in run.accuracy:
        parts.append(f"[bold cyan]held-out accuracy {100 * accuracy:.1f}%[/]")
    return "  ".join(parts)


def verdict(arm: Arm, run: Run) -> str:
    """Whether every token was bit-equal, in one line. Yes only if every training step was measured."""
    steps, wrong = run.training_steps, _unequal(run)
    tokens = sum(value for _, value in run.series("jetrl/tokens"))
    shares = [value for _, value in run.series("jetrl/bit_equal_fraction")]
    if not steps or not shares:
        answer = "[bold red]not measured[/]"
    elif not wrong:
        answer = f"[bold green]yes[/], all {tokens:,.0f} tokens of {len(steps)} steps, to the last bit"
    else:
        least = math.floor(1000 * min(shares)) / 10 if all(map(math.isfinite, shares)) else math.nan
        promised = "[bold red]no[/], although it is promised" if arm.exact else "[bold]no[/], which this mode does not promise"
        answer = f"{promised}: {len(wrong)} of {len(steps)} steps have unequal tokens, the worst step {least:.1f}% equal ones"
    return f"[bold]every token equal:[/] {answer}  [dim]{arm.name}[/]"


def _unequal(run: Run) -> list[int]:
    """The training steps in which a token is not known to be bit-equal."""
    largest, share = (dict(run.series(f"jetrl/{name}")) for name in ("logp_abs_diff_max", "bit_equal_fraction"))
    return [s for s in run.training_steps if largest.get(s) != 0.0 or share.get(s) != 1.0]


def _promises(arm: Arm, run: Run) -> list[str]:
    """The promises that the arm broke: in an exact arm, every token of every step must be bit-equal."""
    wrong = _unequal(run) if arm.exact else []
    if not wrong:
        return []
    step = wrong[0]
    largest, share = (dict(run.series(f"jetrl/{name}")) for name in ("logp_abs_diff_max", "bit_equal_fraction"))
    return [
        f"{arm.name}: required every token bit-equal, found unequal tokens in {len(wrong)} of {len(run.training_steps)} "
        f"steps, first in step {step} (max |Δlogp| {largest.get(step)}, bit-equal {share.get(step)})"
    ]


def _finish(folder: Path, title: str, subtitle: str, broken: Sequence[str], verdicts: Sequence[str], started: float) -> int:
    try:
        summaries = write_report(folder, title, subtitle)
        console.print()
        console.print(make_table(summaries, title, console.width))
        console.print(f"{(time.monotonic() - started) / 60:.1f} minutes; report: {folder / 'report.html'}")
    except ReportError as error:
        broken = [*broken, str(error)]
    for line in verdicts:
        console.print(line)
    for line in broken:
        console.print(f"[bold red]promise broken:[/] {line}")
    return 1 if broken else 0


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
