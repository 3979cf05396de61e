"""Which layers run in BF16 on both sides from the next step on: those whose SQNR falls below a floor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.families import MERGED
from jetrl_patch.monitor.figures import Figures

__all__ = ["below", "check_guard", "with_partners"]


def check_guard(config: Config, rollout_tp: int) -> None:
    """Raise ConfigError where the guard was asked for and the rollout is tensor-parallel: no such run was seen yet."""
    if config.guard_sqnr is not None and rollout_tp > 1:
        raise ConfigError(
            explain(
                f"guard_sqnr={config.guard_sqnr:g}",
                required="a rollout whose engines hold whole layers",
                found=f"tensor parallel size {rollout_tp}",
                fix="set it to 1, name the layers in exclude, or leave guard_sqnr unset",
            )
        )


def below(found: Mapping[tuple[str, str], Figures], floor: float) -> dict[str, str]:
    """Layer -> what is below ``floor`` dB, in words. Where nothing was seen (NaN) nothing is below."""
    reasons: dict[str, list[str]] = {}
    for (kind, layer), figures in found.items():
        if figures.worst_db < floor:
            reasons.setdefault(layer, []).append(f"{kind} {figures.worst_db:.1f} dB")
    return {layer: ", ".join(texts) for layer, texts in reasons.items()}


def with_partners(names: Iterable[str], layers: Collection[str]) -> list[str]:
    """``names`` and the layers that vLLM holds together with them, in the order of ``layers``."""
    wanted = set(names)
    for name in list(wanted):
        parent, dot, leaf = name.rpartition(".")
        for group in MERGED:  # they change together
            if leaf in group:
                wanted |= {f"{parent}{dot}{partner}" for partner in group}
    return [layer for layer in layers if layer in wanted]
