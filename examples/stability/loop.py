"""One run: GRPO on the words task, with vLLM and trainer in this process; one line of metrics per step.

``python -m examples.stability.loop --precision fp8-rollout --seed 0 --out FILE``
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.stability.arms import OBJECTIVES, Arm
from examples.words import CHECKPOINT, task
from examples.words.reward import compute_score

if TYPE_CHECKING:
    from examples.stability.rollout import Rollout, Sample

RESPONSE_TOKENS = 40
#: held-out accuracy of the trainer's own weights, logged if the example rounds the rollout's weights
TRAINERS_ACCURACY = "val-aux/words/acc/trainer"

Emit = Callable[[int, dict[str, Any]], None]


class Questions:
    """Questions as token ids, and the reward of an answer."""

    def __init__(self) -> None:
        from examples.words.tokenizer import build_tokenizer

        self.tokenizer = build_tokenizer()
        self.stop = int(self.tokenizer.eos_token_id)
        self.train, self.held_out = task.split()

    def ids(self, question: task.Question) -> list[int]:
        chat = [{"role": "user", "content": question.text}]
        found: Any = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)
        return list(found["input_ids"] if hasattr(found, "keys") else found)

    def reward(self, question: task.Question, response: Sequence[int]) -> float:
        text = self.tokenizer.decode([token for token in response if token != self.stop])
        return compute_score("words", text, str(question.answer))

    def sample(
        self, rollout: Rollout, questions: Sequence[task.Question], n: int, temperature: float, seed: int
    ) -> tuple[list[Sample], list[float]]:
        """``n`` answers to each question, adjacent to one another, and their rewards."""
        prompts = [self.ids(question) for question in questions]
        samples = rollout.sample(prompts, n, RESPONSE_TOKENS, self.stop, temperature, seed)
        asked = [question for question in questions for _ in range(n)]
        return samples, [self.reward(q, s.response) for q, s in zip(asked, samples, strict=True)]


def run(
    arm: Arm, *, seed: int, steps: int, learning_rate: float, emit: Emit, pool: Sequence[task.Question] | None = None,
    prompts: int = 16, group: int = 8, validate_every: int = 20, held_out: int = 256,
) -> None:  # fmt: skip
    """Train; ``emit`` receives every step's metrics under verl's names.

    Args:
        pool: the questions to train on; the whole training split by default.
        prompts: questions per step.
        group: answers to each question.
        held_out: questions per validation, answered greedily.
    """
    import torch

    import jetrl_patch
    from examples.stability.objective import loss, prepare
    from examples.stability.policy import Policy
    from examples.stability.rollout import Rollout
    from jetrl_patch.measure.mismatch import mismatch

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    jetrl_patch.enable(arm.config)
    questions = Questions()
    rollout = Rollout(str(CHECKPOINT), seed)
    policy = Policy(str(CHECKPOINT), arm.config, learning_rate)
    pool = questions.train if pool is None else pool
    rng = random.Random(seed)

    def accuracy() -> float:
        _, right = questions.sample(rollout, questions.held_out[:held_out], 1, 0.0, 0)
        return sum(right) / len(right)

    for step in range(steps + 1):
        times = [time.perf_counter()]
        rollout.sync(policy.source, policy.weights(), arm.bits)
        times.append(time.perf_counter())
        metrics: dict[str, Any] = {}
        if step % validate_every == 0 or step == steps:
            metrics["val-core/words/acc/mean@1"] = accuracy()
            if arm.bits is not None:
                rollout.sync(policy.source, policy.weights())
                metrics[TRAINERS_ACCURACY] = accuracy()
                rollout.sync(policy.source, policy.weights(), arm.bits)
        if step == steps:
            emit(step, metrics)
            return
        start = time.perf_counter()
        samples, rewards = questions.sample(rollout, rng.sample(list(pool), prompts), group, 1.0, seed * 100_003 + step)
        times.append(time.perf_counter())
        old, mu, mask = policy.score(samples)
        batch = prepare(arm, old, mu, mask, torch.tensor(rewards), group)
        norm = policy.step(samples, lambda log_probs, rows, batch=batch: loss(arm, batch, log_probs, rows))  # type: ignore[misc]
        times.append(time.perf_counter())
        metrics |= mismatch(old, mu, mask).as_metrics()
        metrics |= {
            "critic/score/mean": sum(rewards) / len(rewards),
            "response_length/mean": float(mask.sum(1).float().mean()),
            "actor/grad_norm": norm,
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--pool", type=Path, help="JSON list of positions in the training split to train on")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    arm = Arm(precision=args.precision, correction=args.correction, objective=args.objective)
    pool = None
    if args.pool is not None:
        train, _ = task.split()
        pool = [train[i] for i in json.loads(args.pool.read_text())]
    identity = {
        "precision": args.precision, "align": arm.config.resolved_align, "correction": args.correction, "seed": args.seed,
        "objective": args.objective, "learning_rate": args.lr,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as file:

        def emit(step: int, metrics: dict[str, Any]) -> None:
            file.write(json.dumps({**identity, "step": step, "data": metrics}) + "\n")
            file.flush()

        run(arm, seed=args.seed, steps=args.steps, learning_rate=args.lr, emit=emit, pool=pool)


if __name__ == "__main__":
    main()
