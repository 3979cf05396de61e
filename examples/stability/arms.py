"""What is compared: arms (precision, correction, objective), and the setting that they share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from examples.common.recipe import TASKS
from jetrl_patch import Config

OBJECTIVES = ("ppo", "pg-seq-is", "gspo")
OLD = ("trainer", "rollout")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train.

    Attributes:
        precision: as in ``Config``, or ``"intN-rollout"`` with N below 8: BF16 training, and a BF16 rollout whose weights
            are rounded to N bits per output channel. This exaggerates a rollout quantizer; it is not meant for real use.
        correction: as in ``Config``.
        objective: ``ppo`` (GRPO's clipped objective), ``pg-seq-is`` (Precision-RL's policy gradient) or ``gspo``.
        align: as in ``Config``; None for the precision's default.
        kv_cache: as in ``Config``.
    """

    precision: str
    correction: str = "none"
    objective: str = "ppo"
    align: str | None = None
    kv_cache: str = "auto"

    @property
    def bits(self) -> int | None:
        """N of an ``intN-rollout`` below 8, which the example rounds itself; None for the plugin's own precisions."""
        digits = self.precision.removeprefix("int").removesuffix("-rollout")
        return int(digits) if digits.isdigit() and int(digits) < 8 else None

    @property
    def config(self) -> Config:
        """The plugin's settings. The loop applies corrections itself, with the plugin's formulas."""
        settings: dict[str, Any] = {"precision": self.precision if self.bits is None else "bf16", "monitor_every": 0}
        settings |= {"align": self.align, "kv_cache": self.kv_cache}
        return Config(**settings)

    @property
    def name(self) -> str:
        """``fp8-rollout``, ``int3-rollout+tis``, ``bf16 pg-seq-is``, ``fp8-unified/linear``, ``fp8-unified kv-fp8``."""
        name = self.precision + ("" if self.align is None else f"/{self.align}")
        name += "" if self.correction == "none" else f"+{self.correction}"
        name += "" if self.kv_cache == "auto" else f" kv-{self.kv_cache}"
        return name if self.objective == "ppo" else f"{name} {self.objective}"

    @property
    def slug(self) -> str:
        return self.name.replace(" ", "-").replace("+", "-").replace("/", "-")

    def arguments(self) -> list[str]:
        """The arm as arguments of ``examples.stability.loop``."""
        return [word for key, value in asdict(self).items() if value is not None for word in (f"--{key}", value)]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All of a run but its arm and its seed. Runs of one setting and one seed see the same questions in the same order.

    Attributes:
        task: a key of ``TASKS``, which also has the model to start from.
        steps: batches of samples, each from new weights.
        learning_rate: AdamW's, after a warm-up of ten updates.
        prompts: questions per step.
        group: answers to each question.
        updates: mini-batches of a step, each of whole questions and with an update of its own.
        response_tokens: the most tokens of an answer.
        temperature: of the samples; the trainer's log-probs are under the same one.
        old: what PPO's ratios refer to: ``trainer`` computes π_old again, ``rollout`` takes the rollout's log-probs for it
            (verl's bypass mode).
        validate_every: steps between validations.
        held_out: questions per validation, answered greedily.
        pool: JSON list of positions in the training split to train on; the whole split by default.

    Raises:
        ValueError: a value makes no sense.
    """

    task: str = "words"
    steps: int = 120
    learning_rate: float = 2e-4
    prompts: int = 16
    group: int = 8
    updates: int = 1
    response_tokens: int = 40
    temperature: float = 1.0
    old: str = "trainer"
    validate_every: int = 20
    held_out: int = 256
    pool: Path | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("task", tuple(TASKS)), ("old", OLD)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: required one of {', '.join(allowed)}, found {getattr(self, name)!r}")
        for name, value in asdict(self).items():
            if isinstance(value, int | float) and value <= 0:
                raise ValueError(f"{name}: required more than 0, found {value}")
        if self.group < 2:
            raise ValueError(f"group: required 2 answers or more, which GRPO compares with one another, found {self.group}")
        if self.prompts % self.updates:
            raise ValueError(f"updates: required a divisor of the {self.prompts} questions of a step, found {self.updates}")

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults, and the learning rate always; as JSON has them."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) != field.default}
        return {name: str(v) if isinstance(v, Path) else v for name, v in ({"learning_rate": self.learning_rate} | found).items()}

    def arguments(self) -> list[str]:
        """The setting as arguments of ``examples.stability.loop``."""
        return [word for name, value in self.changed().items() for word in (f"--{name.replace('_', '-')}", str(value))]
