"""Part c: prefill and decoding of an 8B shape in vLLM."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.hopper.parity import FP8_CACHE, GRAPHS, LINEAR, OWN, STOCK_BF16, STOCK_FP8, job
from benchmarks.hopper.plan import Setup
from benchmarks.hopper.training import build
from jetrl_patch.cli.parity.run import environment
from jetrl_patch.measure.parity import Job
from scripts.tables import Row

#: concurrent requests, tokens of each prompt, and tokens of each response
Load = tuple[int, int, int]
LOADS: tuple[Load, ...] = ((64, 128, 256), (256, 128, 256), (1, 128, 256), (16, 8192, 128), (4, 32768, 128))
LAYERS, ROUNDS = 36, 3


def pieces(dry: bool) -> list[str]:
    return [GRAPHS] if dry else [STOCK_BF16, GRAPHS, STOCK_FP8, LINEAR, OWN, FP8_CACHE]


def measure(name: str, setup: Setup) -> list[Row]:
    """Speeds of one mode, and of decoding relative to BF16."""
    folder = setup.scratch / "qwen3-8b-random"
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")  # a checkpoint has its name once it is whole
        build(LAYERS, setup).save_pretrained(part)
        part.rename(folder)
        torch.cuda.empty_cache()
    loads: Sequence[Load] = ((2, 8, 4),) if setup.dry else LOADS
    engine = (("enable_prefix_caching", False), *setup.engine, *((("enforce_eager", False),) if name == LINEAR else ()))
    ours = replace(job(name, setup.backend), model=str(folder), batch=max(load[0] for load in loads), engine=engine)
    variables = environment(ours)
    os.environ.clear()
    os.environ.update(variables)
    rows = [{"mode": name, **row} for row in serve(ours, loads)]
    base = {(row["requests"], row["prompt"]): row["decode tokens/s"] for row in setup.earlier if row["mode"] == STOCK_BF16}
    ratios = [row["decode tokens/s"] / base.get((row["requests"], row["prompt"]), math.nan) for row in rows]
    return [row | {"decode, times BF16": ratio} for row, ratio in zip(rows, ratios, strict=True)]


def serve(ours: Job, loads: Sequence[Load]) -> list[Row]:
    """Tokens per second of prefill and decoding: medians of turns. Decoding takes what all tokens take beyond the first."""
    from jetrl_patch import session
    from jetrl_patch.adapters.vllm.sample import build_engine, generate

    if ours.stock is None:
        session.enable(ours.config)
    engine, rows = build_engine(ours, max(prompt + response for _, prompt, response in loads)), []
    for requests, prompt, response in loads:
        prompts = [[(7 * i + j) % 200 + 2 for j in range(prompt)] for i in range(requests)]
        turns: dict[int, list[float]] = {1: [], response: []}
        for _ in range(1 + ROUNDS):
            for tokens, seconds in turns.items():
                start = time.perf_counter()
                generate(engine, prompts, tokens, ours.temperature)
                seconds.append(time.perf_counter() - start)
        first, whole = (statistics.median(seconds[1:]) for seconds in turns.values())  # the first turn warms up
        decode = requests * (response - 1) / (whole - first) if whole > first else math.nan
        row = {"requests": requests, "prompt": prompt, "response": response, "prefill tokens/s": requests * prompt / first}
        rows.append(row | {"decode tokens/s": decode})
    engine.llm_engine.engine_core.shutdown()
    return rows
