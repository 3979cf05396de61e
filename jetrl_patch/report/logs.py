"""Read metrics from a run's printed log: verl's ``console`` logger, and the status that OpenRLHF logs at each step.

verl prints ``step:3 - critic/score/mean:0.5 - actor/lr:np.float64(1e-06)``; OpenRLHF prints
``Global step 3: {'rollout/reward_mean': 0.5, ...}`` and ``Evaluation completed in ..., global_step 3, eval_metrics: {...}``;
``jetrl``'s launcher prints ``jetrl: precision NAME, align NAME, correction NAME, ...``. Ray's prefixes and colour codes may
precede any of these.
"""

from __future__ import annotations

import re
from pathlib import Path

from jetrl_patch.report.jsonl import Keep
from jetrl_patch.report.runs import Run

__all__ = ["openrlhf_step", "read_log", "verl_step"]

_VERL = re.compile(r"(?:^|\s|m)step:(\d+) - (.*)")  # the m ends a colour code
_VERL_FIGURE = re.compile(r"(?:np\.\w+\()?(-?(?:inf|nan|[\d.]+(?:e[+-]?\d+)?))\)?")
_OPENRLHF = (
    re.compile(r"Global step (\d+): \{(.*)\}"),
    re.compile(r"Evaluation completed .*global_step (\d+), eval_metrics: \{(.*)\}"),
)
_OPENRLHF_FIGURE = re.compile(r"'([^']+)': (-?(?:inf|nan|[\d.]+(?:e[+-]?\d+)?))")
_SETTINGS = re.compile(r"jetrl: precision ([\w-]+), align ([\w-]+),(?: correction ([\w-]+),)?")

Step = tuple[int, dict[str, float]]


def verl_step(line: str) -> Step | None:
    """Step and metrics from a line of verl's console logger; None for any other line."""
    match = _VERL.search(line)
    if match is None:
        return None
    data = {}
    for part in match[2].split(" - "):
        name, _, text = part.rpartition(":")
        figure = _VERL_FIGURE.fullmatch(text.strip())
        if name and figure:
            data[name] = float(figure[1])
    return (int(match[1]), data) if data else None


def openrlhf_step(line: str) -> Step | None:
    """Step and metrics from an OpenRLHF status or evaluation line; None for any other line."""
    match = next((found for pattern in _OPENRLHF if (found := pattern.search(line))), None)
    if match is None:
        return None
    return int(match[1]), {name: float(value) for name, value in _OPENRLHF_FIGURE.findall(match[2])}


def read_log(path: Path, keep: Keep, notes: list[str]) -> list[Run]:
    """The one run of a log, or [] if no line is a step; a truncated last step is skipped and reported in ``notes``."""
    run = Run("", "", 0)
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.decode("utf-8", errors="replace")
            settings = _SETTINGS.search(line)
            if settings:
                run.precision, run.align, run.correction = settings[1], settings[2], settings[3] or ""
            found = verl_step(line) or openrlhf_step(line)
            if found is None:
                continue
            if not raw.endswith(b"\n"):  # its last value may have lost digits
                notes.append(f"{path}, line {number}: truncated; the lines before it are used")
                break
            step, data = found
            run.steps.setdefault(step, {}).update((name, value) for name, value in data.items() if keep(name))
    return [run] if run.steps else []
