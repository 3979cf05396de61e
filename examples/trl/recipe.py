"""The recipe for TRL: the command line of ``grpo.py``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from examples.common.recipe import Arm, Launch, environment
from examples.common.recipe import Recipe as CommonRecipe
from examples.common.tail import Follower

ROOT = Path(__file__).resolve().parents[2]
#: lines of vLLM and TRL -> what the run does from then on
MILESTONES = (
    (r"Initializing a V1 LLM engine", "vLLM builds its engine"),
    (r"init engine .* took", "TRL has its engine; the first evaluation and the first step follow"),
)


@dataclass(frozen=True, kw_only=True)
class Recipe(CommonRecipe):
    """GRPO, one update per step, colocated vLLM, one process."""

    framework: ClassVar[str] = "trl"
    starts: ClassVar[str] = "starting TRL and vLLM in one process: half a minute on two cores"

    steps: int = 15
    held_out: int = 128

    def launch(self, arm: Arm, folder: Path, temporary: Path, log: Path) -> Launch:
        lines = temporary / "log.jsonl"
        values = {
            "steps": self.steps, "prompts": self.prompts, "samples": self.samples, "held-out": self.held_out,
            "response-tokens": self.response_tokens, "learning-rate": self.learning_rate, "seed": arm.seed, "log": lines,
        }  # fmt: skip
        command = [sys.executable, "-m", "examples.trl.grpo"]
        command += [part for name, value in values.items() for part in (f"--{name}", str(value))]
        env = environment(self, temporary) | arm.config(self.device).to_env()
        env["PYTHONPATH"] = os.pathsep.join(path for path in (str(ROOT), env.get("PYTHONPATH")) if path)
        if self.device == "cpu":
            env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2"}
            env |= {"VLLM_USE_AOT_COMPILE": "0", "TORCHDYNAMO_DISABLE": "1"} if arm.precision == "bf16" else {}
        return Launch(command, env, Follower(lines, step_of), MILESTONES)


def step_of(line: str) -> tuple[int, dict[str, Any]] | None:
    """The step and the metrics in a line of TRL's log; None for its summary of the run."""
    metrics = json.loads(line)
    step = int(metrics.pop("step"))
    if "eval_reward" in metrics:  # 1 for each right answer
        return step, {**metrics, "eval_words_pass1": metrics["eval_reward"]}
    return (step, metrics) if "reward" in metrics else None
