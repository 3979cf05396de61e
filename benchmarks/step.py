"""A complete training step of the demo model (log-probs, forward, backward, AdamW), FP8 vs. BF16."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

import jetrl_patch
from benchmarks.timing import best_of
from examples.words import task, warm_start
from examples.words.tokenizer import build_tokenizer
from jetrl_patch import Config
from jetrl_patch.adapters.transformers.prepare import prepare_model
from jetrl_patch.exact.ops import token_log_probs

MODES = {
    "bf16": Config(precision="bf16"),
    "fp8-unified, linear": Config(precision="fp8-unified", align="linear"),
    "fp8-unified, exact": Config(precision="fp8-unified", align="exact"),
}


def training_steps(batch_size: int = 64) -> Iterator[dict[str, object]]:
    """Milliseconds per step and the ratio to BF16, on one thread."""
    tokenizer = build_tokenizer()
    prompts = {q: warm_start.prompt_ids(tokenizer, q) for q in task.split()[0][:256]}
    ids, labels = warm_start.batch(tokenizer, prompts, batch_size, 0.5, random.Random(0))
    jetrl_patch.enable(precision="fp8-unified", align="exact")
    steps = {}
    for name, config in MODES.items():
        model = warm_start.build_model(tokenizer, 0).to(torch.bfloat16)
        prepare_model(model, config.resolved())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

        def step(model=model, optimizer=optimizer) -> None:  # type: ignore[no-untyped-def]
            with torch.no_grad():  # the old log-probs
                token_log_probs(model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:])
            logits = model(input_ids=ids, use_cache=False).logits
            loss = -(token_log_probs(logits[:, :-1], ids[:, 1:]) * (labels[:, 1:] >= 0)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        steps[name] = step
    best = best_of(steps, seconds=6.0, rounds=5)
    jetrl_patch.disable()
    for name, seconds in best.items():
        yield {"mode": name, "tokens": ids.numel(), "ms per step": seconds * 1e3, "ratio to BF16": seconds / best["bf16"]}
