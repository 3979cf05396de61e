"""From the samples of a run to its figures: growth of each, a table and a picture."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.campaigns.soak.slopes import Growth, growth

#: steps over which seconds are taken together, because they are read from outside, a few times a second
WINDOW = 10
#: steps after a start that are not compared: caches fill
WARM = 30
#: figure -> what one of it is called in a table, and how many of its unit that is
UNITS = {
    "memory": ("MiB", 2**20), "shared": ("MiB", 2**20), "files": ("", 1), "threads": ("", 1),
    "seconds of a step": ("s", 1), "processor seconds of a step": ("s", 1),
}  # fmt: skip


def growths(watched: Mapping[str, Any]) -> Iterator[tuple[str, Growth]]:
    """Yield for each role, and for the whole run, how its figures grew."""
    samples = watched["samples"]
    for name, mine in lasting(samples):
        for figure in ("memory", "files", "threads"):
            yield name, growth(figure, [sample["step"] for sample in mine], [sample[figure] for sample in mine])
    moments = totals(samples)
    yield "whole run", growth("shared", [moment["step"] for moment in moments], [moment["shared"] for moment in moments])
    resumed = watched.get("resumed", ())
    for figure, read in {"seconds of a step": elapsed, "processor seconds of a step": processor}.items():
        steps, seconds = read(watched)
        yield "whole run", growth(figure, steps, seconds, new_processes(read, resumed, 0.8 * max(steps)))


Reader = Callable[[Mapping[str, Any]], tuple[list[float], list[float]]]


def new_processes(read: Reader, resumed: Sequence[Mapping[str, Any]], after: float) -> list[float]:
    """What the resumed runs took for the steps beyond ``after``, without those that follow a start."""
    found = []
    for steps, seconds in map(read, resumed):
        found += [one for step, one in zip(steps, seconds, strict=True) if step > max(after, steps[0] + WARM)]
    return found


def lasting(samples: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield each role and its samples, but for those whose processes end with the start of the run."""
    for name in sorted({sample["role"] for sample in samples}):
        mine = [sample for sample in samples if sample["role"] == name]
        if sum(sample["step"] > 0.8 * samples[-1]["step"] for sample in mine) >= 3:
            yield name, mine


def totals(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Sum the roles of each moment."""
    moments: dict[float, dict[str, float]] = {}
    for sample in samples:
        moment = moments.setdefault(sample["seconds"], {"step": sample["step"], "shared": sample["shared"], "cpu": 0.0})
        moment["cpu"] += sample["cpu"]
    return list(moments.values())


def elapsed(watched: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Steps, and the seconds of the clock for each, as means over windows."""
    arrivals = watched["arrivals"]
    ends = sorted(int(step) for step in arrivals)[::WINDOW]
    return list(ends[1:]), [(arrivals[str(b)] - arrivals[str(a)]) / (b - a) for a, b in itertools.pairwise(ends)]


def processor(watched: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Steps, and the processor's seconds for each, as means over windows. After the last step processes end."""
    moments = totals(watched["samples"])
    steps, seconds, before = [], [], None
    for moment in moments:
        if not 1 <= moment["step"] < moments[-1]["step"]:
            continue
        before = before or moment
        if moment["step"] - before["step"] >= WINDOW:
            steps.append(moment["step"])
            seconds.append((moment["cpu"] - before["cpu"]) / (moment["step"] - before["step"]))
            before = moment
    return steps, seconds


def rows(found: Sequence[tuple[str, Growth]]) -> list[str]:
    """Return a table in Markdown."""
    lines = ["| process | figure | early | late | |", "| --- | --- | ---: | ---: | --- |"]
    for name, one in found:
        unit, size = UNITS[one.figure]
        early, late = (f"{value / size:.{2 if unit == 's' else 0}f} {unit}".strip() for value in (one.early, one.late))
        fresh = f" (new processes: {one.fresh / size:.2f} {unit})" if one.fresh is not None else ""
        lines.append(f"| {name} | {one.figure} | {early} | {late}{fresh} | {'flat' if one.flat else '**grows**'} |")
    return lines


def picture(watched: Mapping[str, Any], title: str, file: Path) -> None:
    """Draw memory of each role and the seconds of each step over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6))
    samples, colors = watched["samples"], pyplot.get_cmap("tab20").colors
    for (name, mine), color in zip(lasting(samples), colors, strict=False):
        memory = [sample["memory"] / 2**20 for sample in mine]
        above.plot([sample["step"] for sample in mine], memory, label=name, linewidth=1, color=color)
    above.set(ylabel="private memory [MiB]", title=title, ylim=(0, None))
    above.legend(fontsize=7, ncols=2)
    for read, label in ((elapsed, "wall clock"), (processor, "processor, all processes")):
        (line,) = below.plot(*read(watched), linewidth=1, label=label)
        for again in watched.get("resumed", ()):
            below.plot(*read(again), linewidth=1, linestyle=":", color=line.get_color())
    below.plot([], [], linewidth=1, linestyle=":", color="gray", label="the same steps in new processes")
    below.set(xlabel="step", ylabel="seconds of a step", ylim=(0, None))
    below.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
