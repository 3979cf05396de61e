"""Arms and recipes: what is run, whichever framework runs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from jetrl_patch import Config

WORDS = Path(__file__).resolve().parents[1] / "words"
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run: a precision, how far the two sides are aligned (None: the default), and a seed."""

    precision: str
    align: str | None = None
    seed: int = 0

    def config(self, device: Device) -> Config:
        """The plugin's settings. Raises ConfigError for a combination that means nothing."""
        settings: dict[str, Any] = {"precision": self.precision, "align": self.align, "platform": device}
        return Config(**settings)

    @property
    def resolved_align(self) -> str:
        return str(self.config("cpu").resolved_align)

    @property
    def exact(self) -> bool:
        """Whether equality to the last bit is promised."""
        return bool(self.config("cpu").exact)

    @property
    def name(self) -> str:
        """``fp8-unified/exact, seed 0``."""
        align = "" if self.resolved_align == "none" else f"/{self.resolved_align}"
        return f"{self.precision}{align}, seed {self.seed}"

    @property
    def slug(self) -> str:
        """The same as the name of a folder."""
        return self.name.replace("/", "-").replace(", ", "-").replace(" ", "")


class Steps(Protocol):
    """Follows a run: the steps that it has logged so far."""

    last: int

    def new(self) -> list[tuple[int, dict[str, Any]]]:
        """``(step, metrics)`` of every step that was logged since the last call."""


@dataclass
class Launch:
    """One run, ready to start.

    Attributes:
        command: the command line.
        env: its whole environment.
        steps: reads what it logs.
        answers: what the model said before and after, for the report; called at the end.
    """

    command: list[str]
    env: Mapping[str, str]
    steps: Steps
    answers: Callable[[], list[dict[str, Any]]] = field(default=list)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes of one run. ``prompts`` questions a step, ``samples`` answers each; ``held_out`` questions per validation."""

    framework: ClassVar[str] = ""

    model: Path = WORDS / "checkpoint"
    steps: int = 30
    prompts: int = 16
    samples: int = 8
    learning_rate: float = 2e-4
    held_out: int = 512
    validate_every: int = 5
    prompt_tokens: int = 24
    response_tokens: int = 40
    micro_batch: int = 64
    device: Device = "cpu"

    def launch(self, arm: Arm, folder: Path, temporary: Path, log: Path) -> Launch:
        """Write the data under ``folder`` and say how the run is started.

        Args:
            temporary: a folder with a short path (Ray puts sockets there) that holds all that the run leaves behind.
            log: where all that the run prints will go.
        """
        raise NotImplementedError


def environment(recipe: Recipe, temporary: Path) -> dict[str, str]:
    """The environment of a run: this process's own, with quiet, self-contained neighbours."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("JETRL_")}
    env.pop("RAY_ADDRESS", None)  # a cluster of its own, never one that happens to run
    env.update(
        TMPDIR=str(temporary),
        RAY_TMPDIR=str(temporary),
        RAY_DEDUP_LOGS="0",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_memory_monitor_refresh_ms="0",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        WANDB_MODE="disabled",
        VLLM_NO_USAGE_STATS="1",
        PYTHONUNBUFFERED="1",
    )
    if recipe.device == "cpu":
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # with it, vLLM ignores kv_cache_memory_bytes
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # One thread: trainer, engine and Ray's own processes share few cores, and threads that spin for each other lose.
        env.setdefault("OMP_NUM_THREADS", "1")
    return env
