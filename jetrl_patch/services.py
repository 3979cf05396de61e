"""The services that adapters offer to each other and to the core, as types.

Each service is a protocol. A module implements it with its functions, so an adapter offers the module itself and mypy
checks the signatures. No adapter is imported here; ``registry.py`` finds the adapter that offers a service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jetrl_patch.config import Config
from jetrl_patch.errors import JetrlError
from jetrl_patch.trainer.interface import Trainer

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.parity.modes import Job
    from jetrl_patch.parity.sample import Sample, Sampled, Scored
    from jetrl_patch.progress import Progress

__all__ = ["Exchange", "Merger", "Models", "Platform", "Rollout", "Services"]


class Exchange(Protocol):
    """Trades tokens for heads between the ``size`` ranks that share sequences of T tokens. Differentiable, collective."""

    size: int

    def to_heads(self, x: Tensor, /) -> Tensor:
        """All heads of a slice [B, H, T/size, D] -> some heads of all tokens [B, H/size, T, D]."""

    def to_slices(self, x: Tensor, /) -> Tensor:
        """Some heads of all tokens [B, T, H/size, D] -> all heads of a slice [B, T/size, H, D]."""

    def gather(self, positions: Tensor, /) -> Tensor:
        """The positions of a slice [B, T/size] -> those of all tokens [B, T]."""


class Models(Protocol):
    """Computes Hugging Face models as the trainer does."""

    def prepare_model(
        self, model: Any, config: Config, /, rollout_tp: int, device_type: str, rollout_ep: int = 1
    ) -> list[str]:
        """Convert a loaded model in place and return the names of its quantized layers."""

    def share_sequences(self, model: Any, exchange: Exchange, /) -> None:
        """Let attention see whole sequences, of which each rank of ``exchange`` holds a slice. Raises ModelError."""

    def to_bf16(self, layers: Mapping[str, Any], /, exact: bool) -> None:
        """Take layers of a converted model out of FP8: all of them, or none with an error."""

    def score(self, job: Job, samples: Sequence[Sample], progress: Progress, /) -> Scored:
        """The trainer's log-probs of the sampled tokens."""


class Rollout(Protocol):
    """The rollout engine."""

    def sample(self, job: Job, progress: Progress, /) -> Sampled:
        """Sampled tokens with the log-probs that the engine gave them."""

    def kv_cache_error(self) -> JetrlError | None:
        """The error to raise on a machine that does not support an FP8 KV cache; None where it does."""

    def routes_error(self, what: str, /) -> JetrlError | None:
        """The error, about the setting ``what``, for an engine that does not return the experts of a mixture; None if it does."""

    def argument_problems(
        self, given: Mapping[str, Any], config: Config, rollout_tp: int, name: Callable[[str], str], /
    ) -> Iterator[JetrlError]:
        """Yield an error for each engine argument that the mode does not handle; ``name`` returns the user's name of one."""

    def refuse_exact_on(self, device_type: str, /) -> None:
        """Raise ConfigError if the device lacks the ops of exact mode. Imports no framework."""


class Platform(Protocol):
    """The kind of machine a run uses."""

    def is_cpu_run(self, config: Config, /) -> bool:
        """Whether the run computes on the CPU."""

    def logical_gpus(self, framework: str, /) -> int:
        """The number of logical GPUs that a CPU run of a framework gets where its settings name none."""


class Merger(Protocol):
    """Merges the shards of a training checkpoint into one Hugging Face folder."""

    def merge(self, checkpoint: Path, target: Path, /) -> None:
        """Write ``checkpoint`` to ``target`` as a BF16 Hugging Face folder. Raises ConfigError if that fails."""


@dataclass(frozen=True)
class Services:
    """The services of one adapter; None for those it does not offer."""

    models: Models | None = None
    rollout: Rollout | None = None
    platform: Platform | None = None
    trainer: Trainer | None = None
    merger: Merger | None = None
