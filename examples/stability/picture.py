"""Plot held-out accuracy of rollout and trainer, and the mismatch: one line per arm, the range over seeds shaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from examples.stability.loop import TRAINERS_ACCURACY

if TYPE_CHECKING:
    from examples.stability.arms import Arm
    from examples.stability.sweep import Job
    from jetrl_patch.cli.report import Run

#: Okabe and Ito's colours, which colour-blind readers can tell apart
_COLOURS = ("#000000", "#009e73", "#0072b2", "#d55e00", "#e69f00", "#cc79a7", "#56b4e9", "#999999")
_STYLES = ("-", "-", "--", "-", "--", ":", "-.", "-")


def draw(runs: Mapping[Job, Run], path: Path) -> Path:
    """Write the picture and return its path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for i, arm in enumerate(dict.fromkeys(job.arm for job in runs)):
        mine = [run for job, run in runs.items() if job.arm == arm]
        look: dict[str, Any] = {"color": _COLOURS[i % 8], "linestyle": _STYLES[i % 8], "label": arm.name}
        _band(left, [dict(run.accuracy) for run in mine], look)
        trainers = [dict(run.series(TRAINERS_ACCURACY)) for run in mine]
        if all(trainers):
            _band(middle, trainers, look)
        _band(right, [smoothed(dict(run.series("jetrl/logp_abs_diff_mean"))) for run in mine], look)
    left.set(title="held-out accuracy of the rollout", xlabel="step", ylim=(0, 1))
    middle.set(title="held-out accuracy of the trainer's weights", xlabel="step", ylim=(0, 1))
    right.set(title="mean |Δlogp|, averaged over ten steps", xlabel="step")
    right.set_yscale("symlog", linthresh=1e-4)
    right.set_ylim(bottom=-2e-5)
    for axis in (left, middle, right):
        axis.grid(alpha=0.25)
    left.legend(fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def draw_proof(runs: Mapping[Job, Run], shown: str, pair: Sequence[Arm], path: Path) -> Path:
    """Write the picture of ``proof``: curves of the arms in one setting, and the last half of the pair's runs in all of them.

    Args:
        shown: the title of the setting whose curves are drawn.
        pair: the arms that are compared in every setting.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    looks: dict[Arm, dict[str, Any]] = {}
    for i, arm in enumerate(dict.fromkeys(job.arm for job in runs)):
        looks[arm] = {"color": _COLOURS[i % 8], "linestyle": _STYLES[i % 8], "label": arm.name}
        mine = [run for job, run in runs.items() if (job.title, job.arm) == (shown, arm)]
        if mine:
            _band(left, [smoothed(dict(run.reward), 4) for run in mine], looks[arm])
            _band(middle, [dict(run.series("jetrl/logp_abs_diff_mean")) for run in mine], looks[arm])
    titles = list(dict.fromkeys(job.title for job in runs))
    for job, run in runs.items():
        if job.arm in pair:
            rewards = [value for _, value in run.reward]
            place = titles.index(job.title) + 0.3 * (pair.index(job.arm) - (len(pair) - 1) / 2)
            right.plot(place, fmean(rewards[len(rewards) // 2 :]), "o", color=looks[job.arm]["color"], alpha=0.7)
    left.set(title=f"score of the batches in “{shown}”, over four steps", xlabel="step")
    middle.set(title=f"mean |Δlogp| in “{shown}”", xlabel="step")
    right.set(title="score of the last half of the batches, a dot a seed", xticks=range(len(titles)), xlim=(-1, len(titles)))
    right.set_xticklabels(titles, rotation=35, ha="right")
    for axis in (left, middle, right):
        axis.grid(alpha=0.25)
    left.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def smoothed(values: Mapping[int, float], width: int = 10) -> dict[int, float]:
    """Means over ``width`` steps, each placed at its last step."""
    steps = sorted(values)
    return {
        part[-1]: fmean(values[s] for s in part) for part in (steps[i : i + width] for i in range(0, len(steps), width))
    }


def _band(axis: Any, series: list[dict[int, float]], look: dict[str, Any]) -> None:
    steps = sorted(set.intersection(*map(set, series)))
    columns = [[s[step] for s in series] for step in steps]
    axis.plot(steps, [fmean(c) for c in columns], **look)
    axis.fill_between(
        steps, list(map(min, columns)), list(map(max, columns)), color=look["color"], alpha=0.12, linewidth=0
    )
