"""Teach the converted model the form of the answers, by cross-entropy on a few hundred questions of reasoning-gym.

``python -m examples.smollm2.warm_start MODEL OUT``, with reasoning-gym on the path, takes a few minutes of plain PyTorch on two
cores. As it comes, the model hardly solves such sums and writes no ``<answer>``, so GRPO would find no reward to start from.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import shutil
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from examples.smollm2 import TASK, task
from examples.words.warm_start import accuracy, fit, padded, prompt_ids

#: the share of answers that take the tens first: little enough for GRPO to have something to find
WORKED_SHARE = 0.5
REPORT_EVERY = 10


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, steps: int, batch_size: int, lr: float, seed: int) -> None:
    """Train the model on ``batch_size`` new questions a step."""
    rng = random.Random(seed)
    questions = task.warm()
    started = time.perf_counter()

    def examples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked = rng.sample(questions, batch_size)
        return padded(tokenizer, [(prompt_ids(tokenizer, q), task.answer(q, WORKED_SHARE, rng)) for q in asked])

    def report(step: int, loss: float) -> None:
        if step % REPORT_EVERY == 0 or step == steps:
            print(f"step {step:3d} of {steps}  loss {loss:.3f}  {time.perf_counter() - started:.0f} s", flush=True)

    fit(model, examples, steps, lr, report)


def solved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> float:
    """The mean score of greedy answers to the held-out questions of a run."""
    from examples.smollm2.reward import compute_score

    _, held_out = task.split()
    asked, longest = held_out[: TASK.sizes["held_out"]], TASK.sizes["response_tokens"]
    return accuracy(model, tokenizer, asked, temperature=0.0, max_new_tokens=longest, score=compute_score)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    print(f"answering {TASK.sizes['held_out']} held-out questions, before and after {args.steps} steps of training", flush=True)
    before = solved(model, tokenizer)
    print(f"before: {before:.2f} of them right", flush=True)
    train(model, tokenizer, args.steps, args.batch_size, args.lr, args.seed)
    unfinished = args.out.with_name(f".{args.out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    after = solved(AutoModelForCausalLM.from_pretrained(unfinished), tokenizer)
    record = {k: v for k, v in vars(args).items() if k not in ("model", "out")} | {"before": before, "after": after}
    (unfinished / "warm_start.json").write_text(json.dumps(record, indent=2) + "\n")
    shutil.rmtree(args.out, ignore_errors=True)
    unfinished.rename(args.out)
    gym = importlib.metadata.metadata("reasoning-gym")
    print(f"{args.out}: {args.steps * args.batch_size} questions of reasoning-gym {gym['Version']}, {gym['License-Expression']}")
    print(f"mean score of greedy answers to {TASK.sizes['held_out']} held-out questions: before {before:.2f}, after {after:.2f}")


if __name__ == "__main__":
    main()
