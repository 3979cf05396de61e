"""The arms of the comparison: precision of trainer and rollout, correction, objective."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jetrl_patch import Config

OBJECTIVES = ("ppo", "pg-seq-is", "gspo")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train.

    Attributes:
        precision: as in ``Config``, or ``"intN-rollout"`` with N below 8: BF16 training, and a BF16 rollout whose weights
            are rounded to N bits per output channel. This exaggerates a rollout quantizer; it is not meant for real use.
        correction: as in ``Config``.
        objective: ``ppo`` (GRPO's clipped objective), ``pg-seq-is`` (Precision-RL's policy gradient) or ``gspo``.
    """

    precision: str
    correction: str = "none"
    objective: str = "ppo"

    @property
    def bits(self) -> int | None:
        """N of an ``intN-rollout`` below 8, which the example rounds itself; None for the plugin's own precisions."""
        digits = self.precision.removeprefix("int").removesuffix("-rollout")
        return int(digits) if digits.isdigit() and int(digits) < 8 else None

    @property
    def config(self) -> Config:
        """The plugin's settings. The loop applies corrections itself, with the plugin's formulas."""
        settings: dict[str, Any] = {"precision": self.precision if self.bits is None else "bf16", "monitor_every": 0}
        return Config(**settings)

    @property
    def name(self) -> str:
        """``fp8-rollout``, ``int3-rollout+tis``, ``bf16 pg-seq-is``."""
        name = self.precision + ("" if self.correction == "none" else f"+{self.correction}")
        return name if self.objective == "ppo" else f"{name} {self.objective}"

    @property
    def slug(self) -> str:
        return self.name.replace(" ", "-").replace("+", "-")

    def arguments(self) -> list[str]:
        """The arm as arguments of ``examples.stability.loop``."""
        return [word for key, value in asdict(self).items() for word in (f"--{key}", value)]
