"""The tables and the picture of ``jetrl parity --explain``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jetrl_patch.errors import JetrlError, writing
from jetrl_patch.measure.parity import PARTS
from jetrl_patch.patching.guards import is_installed

__all__ = ["draw", "require_matplotlib", "show"]

_FIRST = "BF16, stock"
#: blocks in the table of depth
_BLOCKS = 5


def show(result: dict[str, Any], model: str, console: Any) -> None:
    """Print both tables of a result with ``steps``."""
    from rich.table import Table

    steps: list[dict[str, Any]] = result["steps"]
    table = Table(
        title=f"where the mismatch comes from: {Path(model).name}, {result['tokens']:,} tokens",
        caption="Each row makes one more op of the trainer exact. Change: what that took away. Alone: the mismatch if only this "
        "op is stock; 0 where exact mode computes it as Hugging Face does, and changes vLLM's instead. Early and late: in the "
        "first and the last quarter of the responses.",
    )
    _columns(table, "mean |Δ|", "change", "alone", "max |Δ|", "early", "late")
    for before, step in zip([None, *steps], steps):
        change = "" if before is None else f"{step['mean'] - before['mean']:+.4f}"
        alone = "" if step["alone"] is None else _number(step["alone"])
        means = (step["mean"], step["max"], step["parts"][0], step["parts"][-1])
        mean, most, early, late = map(_number, means)
        table.add_row(_name(step), mean, change, alone, most, early, late)
    console.print(table)
    last = len(steps[0]["depth"])
    shown = sorted({1 + round(i * (last - 1) / (_BLOCKS - 1)) for i in range(_BLOCKS)})
    caption = "Norm of the difference to the exact hidden states, over theirs; first batch."
    depth = Table(title="growth with depth: hidden states after a block", caption=caption)
    _columns(depth, *(f"block {block}" for block in shown))
    for step in steps:
        depth.add_row(_name(step), *(f"{step['depth'][block - 1]:.2%}" for block in shown))
    console.print(depth)


def _columns(table: Any, *names: str) -> None:
    table.add_column("trainer", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if value < 1e-3 else f"{value:.4f}"


def _name(step: dict[str, Any]) -> str:
    return f"+ {step['op']}" if step["op"] else _FIRST


def require_matplotlib() -> None:
    """Raise JetrlError where no picture can be drawn."""
    if not is_installed("matplotlib"):
        raise JetrlError("--picture needs matplotlib, which is not installed. Run pip install matplotlib.")


def draw(result: dict[str, Any], model: str, target: str) -> None:
    """Write the picture: the mismatch with each op made exact, and its growth over the model's depth and the response."""
    from matplotlib.figure import Figure

    steps: Sequence[dict[str, Any]] = result["steps"]
    figure = Figure(figsize=(13, 4), layout="constrained")
    bars, depth, position = figure.subplots(1, 3)
    names = [_name(step) for step in steps]
    bars.barh(names, [step["mean"] for step in steps], color="#4477aa")
    bars.invert_yaxis()
    bars.set(xlabel="mean |Δ log-prob|", title="one more op exact at a time")
    bars.locator_params(axis="x", nbins=5)
    apart = [i for i, step in enumerate(steps) if i == 0 or step["mean"] != steps[i - 1]["mean"]]
    for name, step in ((names[i], steps[i]) for i in apart):  # equal trainers would hide one another
        depth.plot(range(1, len(step["depth"]) + 1), step["depth"], label=name)
        position.plot(range(1, len(step["parts"]) + 1), step["parts"], marker="o", label=name)
    depth.set(xlabel="block", ylabel="relative difference", title="hidden states, against exact")
    position.set(xlabel=f"part of the response (of {PARTS})", ylabel="mean |Δ log-prob|", title="over the response")
    position.set_xticks(range(1, PARTS + 1))
    depth.legend(fontsize="small", loc="upper center")
    figure.suptitle(f"{Path(model).name}: {result['tokens']:,} tokens of an exact rollout")
    with writing(target):
        figure.savefig(target, dpi=120)
