"""What adapters offer one another and the core, as types: an adapter gives a ``Services`` with the slots that it fills.

A slot is a protocol that a module satisfies by its functions, so that an adapter offers the module itself and mypy
compares the signatures. Nothing of an adapter is imported here; ``registry.py`` finds the one that fills a slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jetrl_patch.config import Config
from jetrl_patch.errors import JetrlError
from jetrl_patch.trainer.interface import Trainer

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.parity.modes import Job
    from jetrl_patch.parity.sample import Sample

__all__ = ["Merger", "Models", "Platform", "Rollout", "Services"]


class Models(Protocol):
    """Hugging Face models as the trainer computes them."""

    def prepare_model(self, model: Any, config: Config, /, rollout_tp: int, device_type: str) -> list[str]:
        """Convert a loaded model in place; gives the names of its quantized layers."""

    def to_bf16(self, layers: Mapping[str, Any], /, exact: bool) -> None:
        """Take layers of a converted model out of FP8: all of them, or none and an error."""

    def score(self, job: Job, samples: Sequence[Sample], /) -> Tensor:
        """The trainer's log-probs of sampled tokens, float32 [tokens]."""


class Rollout(Protocol):
    """The rollout engine."""

    def sample(self, job: Job, /) -> list[Sample]:
        """Tokens, and the log-probs with which the engine sampled them."""

    def kv_cache_error(self) -> JetrlError | None:
        """The error to raise on a machine without an FP8 KV cache."""

    def refuse_exact_on(self, device_type: str, /) -> None:
        """Raise ConfigError for a device without the ops of exact mode. Imports no framework."""


class Platform(Protocol):
    """A kind of machine."""

    def is_cpu_run(self, config: Config, /) -> bool:
        """Whether the run computes on the CPU."""


class Merger(Protocol):
    """Shards of a training checkpoint as one Hugging Face folder."""

    def merge(self, checkpoint: Path, target: Path, /) -> None:
        """Write a BF16 Hugging Face folder. Raises ConfigError where that fails."""


@dataclass(frozen=True)
class Services:
    """What one adapter offers; None where it does not."""

    models: Models | None = None
    rollout: Rollout | None = None
    platform: Platform | None = None
    trainer: Trainer | None = None
    merger: Merger | None = None
