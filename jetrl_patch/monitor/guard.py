"""The precision guard: from the next step on, layers whose SQNR falls below a floor run in BF16 on both sides."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.families import MERGED
from jetrl_patch.monitor.figures import Figures
from jetrl_patch.units import matrix_name

__all__ = ["below", "check_guard", "with_partners"]


def check_guard(config: Config, rollout_tp: int) -> None:
    """Raise ConfigError if the guard is on and the rollout is tensor parallel, a combination that is untested."""
    if config.guard_sqnr is not None and rollout_tp > 1:
        raise ConfigError(
            explain(
                f"guard_sqnr={config.guard_sqnr:g}",
                required="rollout tensor parallel size 1",
                found=rollout_tp,
                fix="set the size to 1, or unset guard_sqnr and list the layers in exclude",
            )
        )


def below(found: Mapping[tuple[str, str], Figures], floor: float) -> dict[str, str]:
    """Map each layer below ``floor`` dB to the tensors that are, as text. NaN (no data) is never below."""
    reasons: dict[str, list[str]] = {}
    for (kind, layer), figures in found.items():
        if figures.worst_db < floor:
            inside = figures.at.get(figures.worst_figure)
            where = "" if inside is None else f" in {matrix_name(inside)}"
            reasons.setdefault(layer, []).append(f"{kind} {figures.worst_db:.1f} dB{where}")
    return {layer: ", ".join(texts) for layer, texts in reasons.items()}


def with_partners(names: Iterable[str], layers: Collection[str]) -> list[str]:
    """``names`` and the layers that vLLM fuses with them, in the order of ``layers``."""
    wanted = set(names)
    for name in list(wanted):
        parent, dot, leaf = name.rpartition(".")
        for group in MERGED:  # a fused layer has one precision
            if leaf in group:
                wanted |= {f"{parent}{dot}{partner}" for partner in group}
    return [layer for layer in layers if layer in wanted]
