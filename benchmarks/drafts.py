"""Speculative decoding in exact mode, on a CPU: ``python -m benchmarks.drafts`` prints the table.

A tiny model learns to count in circles of eight tokens, so that its responses repeat themselves as code and reasoning do. Engines
without drafts and with drafts of n-grams generate from it, one after the other in this process; speeds are ratios to the first.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

CIRCLE, STEPS, LENGTH, BATCH, TIMES = 8, 60, 96, 8, 3
TEMPERATURE = 0.7


def taught(path: Path) -> str:
    """A checkpoint of a model whose next token is most often the next in its circle."""
    import torch
    from transformers import PreTrainedModel

    from tests import models

    model: PreTrainedModel = models.build("qwen3").float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        start = torch.randint(0, 47, (16, 1), generator=generator) * CIRCLE
        ids = start + (torch.randint(0, CIRCLE, (16, 1), generator=generator) + torch.arange(48)) % CIRCLE
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    models.in_bf16(model).save_pretrained(path)
    return str(path)


def measured(job: Any) -> dict[str, float]:
    """Tokens per second, share of drafted tokens that were accepted, tokens, and share of equal log-probs."""
    import torch

    from jetrl_patch.adapters.vllm.sample import build_engine, generate
    from jetrl_patch.cli.parity.score import score

    engine = build_engine(job, LENGTH + 16)
    prompts = [[8 * i + (i + j) % CIRCLE for j in range(10)] for i in range(BATCH)]
    generate(engine, prompts, LENGTH, TEMPERATURE)  # loads kernels
    begin = time.perf_counter()
    samples = [sample for _ in range(TIMES) for sample in generate(engine, prompts, LENGTH, TEMPERATURE)]
    seconds = time.perf_counter() - begin
    counts = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    engine.llm_engine.engine_core.shutdown()
    rollout = torch.tensor([value for sample in samples for value in sample.log_probs])
    drafted = counts.get("vllm:spec_decode_num_draft_tokens", 0)
    return {
        "speed": len(rollout) / seconds, "tokens": len(rollout),
        "equal": float((score(job, samples).log_probs == rollout).float().mean()),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0) / drafted if drafted else float("nan"),
    }  # fmt: skip


def main() -> None:
    import jetrl_patch
    from jetrl_patch.measure.parity import Job

    jetrl_patch.enable(precision="fp8-unified")
    print("| drafts | tokens | bit-equal | accepted drafts | tokens per second, ratio |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        model, first = taught(Path(folder) / "model"), 0.0
        for count in (0, 2, 4):
            config = {"method": "ngram", "num_speculative_tokens": count, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
            engine = (("disable_log_stats", False), *((("speculative_config", config),) if count else ()))
            found = measured(Job(model=model, config=jetrl_patch.status().config, batch=BATCH, engine=engine))
            first = first or found["speed"]
            share = f"{found['accepted']:.0%}" if count else "–"
            speed = found["speed"] / first
            print(f"| {count} | {found['tokens']:,} | {found['equal']:.1%} | {share} | {speed:.2f} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
