"""Compare statistics with their thresholds: warn once per layer, kind and statistic, or stop the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jetrl_patch.config import Config
from jetrl_patch.errors import PrecisionError
from jetrl_patch.monitor.figures import Figures
from jetrl_patch.units import matrix_name

__all__ = ["Finding", "Watch", "findings"]

#: keyed by (kind, layer); the kinds are "weight", "activation" and "gradient"
Found = Mapping[tuple[str, str], Figures]


class Finding(NamedTuple):
    """A statistic that crosses its threshold.

    Attributes:
        matrix: of experts, the one with the worst value: ``17.up_proj``.
    """

    layer: str
    kind: str
    figure: str
    value: float
    threshold: float
    matrix: str = ""

    def __str__(self) -> str:
        sign = "<" if self.figure == "sqnr" else ">"
        unit = " dB" if self.figure == "sqnr" else ""
        name = f"{self.layer}.{self.matrix}" if self.matrix else self.layer
        return f"{name}: {self.kind} {self.figure} {self.value:.4g}{unit} {sign} {self.threshold:g}{unit}"


def findings(found: Found, config: Config) -> Iterator[Finding]:
    """Every statistic that crosses its threshold, in the order of ``found``."""
    for (kind, layer), figures in found.items():
        for figure, value, threshold in _crossed(figures, config):
            number = figures.at.get(figures.worst_figure if figure == "sqnr" else figure)
            yield Finding(layer, kind, figure, value, threshold, "" if number is None else matrix_name(number))


def _crossed(figures: Figures, config: Config) -> Iterator[tuple[str, float, float]]:
    if figures.worst_db < config.monitor_sqnr:
        yield "sqnr", figures.worst_db, config.monitor_sqnr
    if figures.underflow > config.monitor_underflow:
        yield "underflow", figures.underflow, config.monitor_underflow
    if figures.saturated > 0:  # scales follow the values, so nothing should ever saturate
        yield "saturated", figures.saturated, 0.0
    if figures.nonfinite > 0:
        yield "nonfinite", figures.nonfinite, 0.0


class Watch:
    """Reports each (layer, kind, statistic) once, or stops the run at the first."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str, str]] = set()

    def look(self, found: Found, config: Config) -> list[Finding]:
        """Return the findings not reported before.

        Raises:
            PrecisionError: there is one, and ``monitor_action`` is "stop".
        """
        new = [f for f in findings(found, config) if (f.layer, f.kind, f.figure) not in self._told]
        self._told |= {(f.layer, f.kind, f.figure) for f in new}
        if new and config.monitor_action == "stop":
            raise PrecisionError(
                f"monitor_action='stop': {len(new)} statistics cross their thresholds: "
                f"{'; '.join(map(str, new[:3]))}{'; …' if len(new) > 3 else ''}. "
                f"Exclude these layers, set guard_sqnr, or change the threshold."
            )
        return new
