"""One run: GRPO with vLLM and trainer in this process; one line of metrics per step.

``python -m examples.stability.loop --precision fp8-rollout --seed 0 --out FILE``
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, get_type_hints

from examples.common.recipe import TASKS, Recipe
from examples.common.task import Question, Task
from examples.stability.arms import OBJECTIVES, Arm, Setting
from examples.words.warm_start import accuracy, prompt_ids

if TYPE_CHECKING:
    from torch import Tensor

    from examples.stability.rollout import Rollout, Sample

#: held-out accuracy of the trainer's own weights, logged if only the rollout is quantized
TRAINERS_ACCURACY = "val-aux/acc/trainer"

#: steps after which a run that can be resumed saves the trainer
SAVE_EVERY = 2

Emit = Callable[[int, dict[str, Any]], None]


class Questions:
    """A task's questions as token ids, and the reward of an answer."""

    def __init__(self, task: Task, response_tokens: int) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(task.model)
        self.stop = int(self.tokenizer.eos_token_id)
        self.train, self.held_out = task.split()
        self.response_tokens = response_tokens
        self.score: Callable[[str, str, str], float] = runpy.run_path(str(task.reward))["compute_score"]

    def reward(self, question: Question, response: Sequence[int]) -> float:
        text = self.tokenizer.decode([token for token in response if token != self.stop])
        return self.score("", text, str(question.answer))

    def sample(
        self, rollout: Rollout, questions: Sequence[Question], n: int, temperature: float, seed: int
    ) -> tuple[list[Sample], list[float]]:
        """``n`` answers to each question, adjacent to one another, and their rewards."""
        prompts = [prompt_ids(self.tokenizer, question) for question in questions]
        samples = rollout.sample(prompts, n, self.response_tokens, self.stop, temperature, seed)
        asked = [question for question in questions for _ in range(n)]
        return samples, [self.reward(q, s.response) for q, s in zip(asked, samples, strict=True)]


@dataclass(frozen=True)
class States:
    """The saved trainers of an unfinished run that writes its metrics to ``out``: ``<out>.<step>.pt``, saved before that step."""

    out: Path

    def path(self, step: int) -> Path:
        return self.out.with_suffix(f".{step}.pt")

    def steps(self) -> list[int]:
        """The steps that the run can go on with, ascending."""
        return sorted(int(path.suffixes[-2][1:]) for path in self.out.parent.glob(f"{self.out.stem}.*.pt"))

    def remove(self, but: int | None = None) -> None:
        """Remove all saved trainers, or all but one."""
        for step in self.steps():
            if step != but:
                self.path(step).unlink()

    def lines(self, identity: dict[str, Any]) -> list[str]:
        """The metrics before the last saved trainer; [] if there is none, or it is another run's."""
        if not self.steps() or not self.out.exists():
            return []
        lines = self.out.read_text(encoding="utf-8").splitlines()[: self.steps()[-1]]
        return lines if all(identity.items() <= json.loads(line).items() for line in lines) else []


def run(
    arm: Arm, setting: Setting, *, seed: int, emit: Emit, first_step: int = 0, states: States | None = None,
    export: Path | None = None,
) -> None:
    """Train; ``emit`` receives every step's metrics under verl's names.

    Args:
        first_step: the step to go on with, from the trainer that was saved before it.
        states: where the trainer is saved, every ``SAVE_EVERY`` steps.
        export: at each validation, ``export/<step>`` becomes a Hugging Face checkpoint of the policy.
    """
    import torch

    import jetrl_patch
    from examples.stability.objective import loss, prepare
    from examples.stability.policy import Policy
    from examples.stability.rollout import Rollout
    from jetrl_patch.measure.mismatch import mismatch

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    task = TASKS[setting.task]
    recipe = Recipe.of(task)
    jetrl_patch.enable(arm.config)
    questions = Questions(task, setting.response_tokens)
    pool = list(questions.train)
    if setting.pool is not None:
        pool = [pool[i] for i in json.loads(setting.pool.read_text())]
    length = max(128, 2 * recipe.prompt_tokens + setting.response_tokens)
    rollout = Rollout(str(task.model), seed, length)
    policy = Policy(str(task.model), setting.learning_rate, recipe.micro_batch, setting.temperature)
    rng = random.Random(seed)
    for _ in range(first_step):
        rng.sample(pool, setting.prompts)
    if states is not None and first_step:
        policy.load(states.path(first_step))

    def validate() -> dict[str, float]:
        asked = questions.held_out[: setting.held_out]
        _, right = questions.sample(rollout, asked, 1, 0.0, 0)
        found = {f"val-core/{task.name}/acc/mean@1": fmean(right)}
        if arm.precision.endswith("-rollout"):
            found[TRAINERS_ACCURACY] = accuracy(
                policy.model, questions.tokenizer, asked, 0.0, max_new_tokens=setting.response_tokens, score=questions.score
            )
        return found

    for step in range(first_step, setting.steps + 1):
        if states is not None and step % SAVE_EVERY == 0 and step > first_step:
            policy.save(states.path(step))
            states.remove(but=step)
        times = [time.perf_counter()]
        rollout.sync(policy.source, policy.weights(), arm.bits)
        times.append(time.perf_counter())
        metrics: dict[str, Any] = {}
        if step % setting.validate_every == 0 or step == setting.steps:
            metrics |= validate()
            if export is not None:
                policy.export(export / str(step), questions.tokenizer)
        if step == setting.steps:
            emit(step, metrics)
            return
        start = time.perf_counter()
        asked = rng.sample(pool, setting.prompts)
        samples, rewards = questions.sample(rollout, asked, setting.group, setting.temperature, seed * 100_003 + step)
        times.append(time.perf_counter())
        old, mu, mask = policy.score(samples)
        batch = prepare(arm, old if setting.old == "trainer" else mu, mu, mask, torch.tensor(rewards), setting.group)
        norms, clipped = [], []
        for first in range(0, len(samples), len(samples) // setting.updates):
            mini = slice(first, first + len(samples) // setting.updates)
            part, blocked = batch.part(mini), 0.0

            def objective(log_probs: Tensor, rows: slice, part: Any = part) -> Tensor:
                nonlocal blocked
                found, share = loss(arm, part, log_probs, rows)
                blocked += float(share)
                return found

            norms.append(policy.step(samples[mini], objective))
            clipped.append(blocked)
        times.append(time.perf_counter())
        metrics |= mismatch(old, mu, mask).as_metrics()
        metrics |= {
            "critic/score/mean": fmean(rewards),
            "response_length/mean": float(mask.sum(1).float().mean()),
            "actor/grad_norm": fmean(norms),
            "actor/pg_clipfrac": fmean(clipped),
            "jetrl/masked_fraction": 1.0 - float(batch.kept.sum() / mask.sum()),
            "timing_s/update_weights": times[1] - times[0],
            "timing_s/gen": times[2] - start,
            "timing_s/update_actor": times[3] - times[2],
            "timing_s/step": times[3] - start + times[1] - times[0],
        }
        emit(step, metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--correction", default="none")
    parser.add_argument("--objective", default="ppo", choices=OBJECTIVES)
    parser.add_argument("--align")
    parser.add_argument("--kv_cache", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="save the trainer, and go on from the one that was saved")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the policy at each validation, to DIR/<step>")
    hints = get_type_hints(Setting)
    for field in fields(Setting):
        kind = Path if field.name == "pool" else hints[field.name]
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    arm = Arm(**{field.name: getattr(args, field.name) for field in fields(Arm)})
    try:
        setting = Setting(**{field.name: getattr(args, field.name) for field in fields(Setting)})
    except ValueError as error:
        parser.error(str(error))
    if setting.old == "rollout" and arm.correction != "none":
        parser.error(f"old rollout: required no correction, whose ratios would all be 1, found {arm.correction}")
    identity = {
        "precision": args.precision, "align": arm.config.resolved_align, "correction": args.correction, "seed": args.seed,
        "objective": args.objective, "kv_cache": args.kv_cache, "setting": setting.changed(),
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    states = States(args.out) if args.resume else None
    lines = states.lines(identity) if states is not None else []
    with args.out.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
        file.flush()

        def emit(step: int, metrics: dict[str, Any]) -> None:
            file.write(json.dumps({**identity, "step": step, "data": metrics}) + "\n")
            file.flush()

        run(arm, setting, seed=args.seed, emit=emit, first_step=len(lines), states=states, export=args.export)


if __name__ == "__main__":
    main()
