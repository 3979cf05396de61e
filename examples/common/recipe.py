"""Arms and recipes: what to run, independent of the framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from examples import smollm2, words
from examples.common.task import Task
from jetrl_patch import Config
from jetrl_patch.config.environment import without_settings

Device = Literal["cpu", "cuda"]
R = TypeVar("R", bound="Recipe")
#: what ``make demo-verl MODEL=…`` trains
TASKS: Mapping[str, Task] = {"words": words.TASK, "smollm2": smollm2.TASK}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run of a comparison: precision, alignment (None: the precision's default), replay of routes, seed."""

    precision: str
    align: str | None = None
    router_replay: str = "none"
    seed: int = 0

    def config(self, device: Device) -> Config:
        """The plugin's settings. Raises ConfigError for an invalid combination."""
        settings: dict[str, Any] = {"precision": self.precision, "align": self.align, "platform": device}
        return Config(**settings, router_replay=self.router_replay)

    @property
    def resolved_align(self) -> str:
        return str(self.config("cpu").resolved_align)

    @property
    def exact(self) -> bool:
        """Whether the arm promises bit-equal log-probs."""
        return bool(self.config("cpu").exact)

    @property
    def name(self) -> str:
        """``fp8-unified/exact, seed 0``, ``fp8-rollout+R3, seed 0``."""
        align = "" if self.resolved_align == "none" else f"/{self.resolved_align}"
        replay = "" if self.router_replay == "none" else f"+{self.router_replay}"
        return f"{self.precision}{align}{replay}, seed {self.seed}"

    @property
    def slug(self) -> str:
        """The name as part of a file name."""
        return self.name.replace("/", "-").replace("+", "-").replace(", ", "-").replace(" ", "")


class Steps(Protocol):
    """Reads the steps that a run logs."""

    last: int

    def new(self) -> list[tuple[int, dict[str, Any]]]:
        """``(step, metrics)`` of every step logged since the last call."""


@dataclass
class Launch:
    """One run, ready to start.

    Attributes:
        command: the command line.
        env: the complete environment.
        steps: reads the steps that the run logs.
        milestones: (pattern, text), in order: what the run is doing once a line of its log matches. Shown until the first step.
        answers: called at the end for ``answers`` and ``answers_changed`` of the report (``cli.report.sources``).
    """

    command: list[str]
    env: Mapping[str, str]
    steps: Steps
    milestones: Sequence[tuple[str, str]] = ()
    answers: Callable[[], dict[str, Any]] = field(default=dict)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes of one run: ``prompts`` questions per step, ``samples`` answers to each, ``held_out`` questions per validation."""

    framework: ClassVar[str] = ""
    #: what a run does first, in words
    starts: ClassVar[str] = "starting Ray, then the trainer and vLLM: a minute or two on two cores"

    #: instruction set of the CPU kernels -> seconds of a step in exact mode on two cores of an otherwise idle AMD EPYC
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    task: Task = words.TASK
    model: Path = words.TASK.model
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

    @classmethod
    def of(cls: type[R], task: Task, **given: Any) -> R:
        """The recipe for a task, in its own sizes; given values that are not None override them."""
        if not (task.model / "config.json").exists():
            raise SystemExit(f"{task.model}: required a model for {task.title}, found none. `make demo-verl MODEL=…` makes it.")
        chosen = {name: value for name, value in given.items() if value is not None}
        return cls(**{"task": task, "model": task.model, **task.sizes, **chosen})

    def launch(self, arm: Arm, folder: Path, temporary: Path, log: Path) -> Launch:
        """Write the data under ``folder``; return how to start the run.

        Args:
            temporary: folder of temporary files, with a short path, because Ray puts sockets there.
            log: file of the run's output.
        """
        raise NotImplementedError


def environment(recipe: Recipe, temporary: Path) -> dict[str, str]:
    """The environment of a run: this process's without ``JETRL_*``, with quiet and offline libraries."""
    env = without_settings()
    env.pop("RAY_ADDRESS", None)  # the run starts its own cluster
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
        # trainer, engine and Ray share few cores; more threads would spin against each other
        env.setdefault("OMP_NUM_THREADS", "1")
        env.setdefault("TQ_NUM_THREADS", "1")  # verl's TransferQueue wants 8, and warns at each call if there are fewer cores
    return env
