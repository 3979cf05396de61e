"""Part c: prefill and decoding of an 8B shape in vLLM."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.hopper.parity import LINEAR, OWN, STOCK_FP8, job
from benchmarks.hopper.plan import FP8_CACHE, GRAPHS, STOCK_BF16, Setup
from benchmarks.hopper.training import build
from benchmarks.shapes import MODELS
from jetrl_patch.backends import choose_backend, get_backend
from jetrl_patch.backends.row_equality import Part, require_row_equality
from jetrl_patch.cli.parity.run import environment
from jetrl_patch.fp8.convert import swap_linears
from jetrl_patch.measure.parity import Job
from scripts.tables import Row

#: concurrent requests, tokens of each prompt, and tokens of each response
Load = tuple[int, int, int]
#: little and much work, each measured with an engine of its own
LOADS: dict[str, tuple[Load, ...]] = {
    "short": ((64, 128, 128), (1, 128, 128), (4, 8192, 128)),
    "long": ((256, 128, 256), (16, 8192, 128), (4, 32768, 128)),
}
LAYERS, ROUNDS = 36, 3
#: the piece that measures no speed: what it leaves behind shortens the start of each engine and the first step of training
PREPARATION = "preparation"
#: of the trial: processes, each of which needs 4 GB of the GPU; an engine's largest batch, vLLM's default; rows in training
PROCESSES, MOST, ROWS = 6, 16384, 16384


def pieces(dry: bool) -> list[str]:
    modes = [GRAPHS] if dry else [STOCK_BF16, GRAPHS, FP8_CACHE, STOCK_FP8, LINEAR, OWN]
    return [PREPARATION, *(f"{mode}; {variant}" for variant in list(LOADS)[: 1 if dry else 2] for mode in modes)]


def measure(name: str, setup: Setup) -> list[Row]:
    """Speeds of one mode, and of decoding relative to BF16."""
    if name == PREPARATION:
        return prepare(setup)
    mode, variant = name.split("; ")
    loads: Sequence[Load] = ((2, 8, 4),) if setup.dry else LOADS[variant]
    engine = (("enable_prefix_caching", False), *setup.engine, *((("enforce_eager", False),) if mode == LINEAR else ()))
    batch = max(load[0] for load in loads)
    ours = replace(job(mode, setup.backend), model=str(checkpoint(setup)), batch=batch, engine=engine)
    variables = environment(ours)
    os.environ.clear()
    os.environ.update(variables)
    rows = [{"mode": mode, **row} for row in serve(ours, loads)]
    base = {(row["requests"], row["prompt"]): row["decode tokens/s"] for row in setup.earlier if row.get("mode") == STOCK_BF16}
    ratios = [row["decode tokens/s"] / base.get((row["requests"], row["prompt"]), math.nan) for row in rows]
    return [row | {"decode, times BF16": ratio} for row, ratio in zip(rows, ratios, strict=True)]


def checkpoint(setup: Setup) -> Path:
    """The folder of a model of this shape with random weights, made once."""
    folder = setup.scratch / "qwen3-8b-random"
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")  # a checkpoint has its name once it is whole
        build(LAYERS, setup).cpu().save_pretrained(part)
        part.rename(folder)
        torch.cuda.empty_cache()
    return folder


def prepare(setup: Setup) -> list[Row]:
    """Write the checkpoint, while processes try the backend on its linears. They share the kernels that each compiles."""
    start, count = time.monotonic(), 1 if setup.dry else PROCESSES
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        tried = [pool.submit(try_linears, setup.backend, setup.device) for _ in range(count)]
        checkpoint(setup)
        (name,) = {each.result() for each in tried}
    what = "checkpoint; rows of its linears do not depend on the batch"
    return [{"what": what, "backend": name, "processes": count, "seconds": time.monotonic() - start, "verdict": "met"}]


def try_linears(asked: str, device: str) -> str:
    """Run the trial of an engine for each linear, and a step of a trainer's, in random order. Returns the backend.

    Raises ModelError if rows depend on the batch. On a CPU there is no trial.
    """
    backend, model = choose_backend(asked, device), MODELS[1]
    fused = {(linear.N, linear.K): layout for linear, layout in model.layouts(1)}
    held = {(linear.N, linear.K): fused.get((linear.N, linear.K)) for linear in model.linears}
    trained = {(part.rows, K) for (N, K), layout in held.items() for part in (layout.parts if layout else (Part(N, 0, N, 0),))}
    works: list[Callable[[], object]] = [
        partial(require_row_equality, get_backend(backend), shape, torch.device(device), "pow2", layout, MOST)
        for shape, layout in held.items()
    ]
    works += [partial(train, backend, shape, device) for shape in trained] if device != "cpu" else []
    random.Random().shuffle(works)  # which differs in each process
    for work in works:
        work()
        torch.cuda.empty_cache()
    return backend


def train(backend: str, shape: tuple[int, int], device: str) -> None:
    """Forward and backward of a linear [N, K]."""
    N, K = shape
    layers = nn.ModuleList([nn.Linear(K, N, bias=False, dtype=torch.bfloat16, device=device)])
    swap_linears(layers, backend=backend, names=["0"])
    x = torch.randn(ROWS, K, dtype=torch.bfloat16, device=device, requires_grad=True)
    y = layers[0](x)
    y.backward(torch.randn_like(y))


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
                generate(engine, prompts, tokens, ours.draws)
                seconds.append(time.perf_counter() - start)
        first, whole = (statistics.median(seconds[1:]) for seconds in turns.values())  # the first turn warms up
        decode = requests * (response - 1) / (whole - first) if whole > first else math.nan
        row = {"requests": requests, "prompt": prompt, "response": response, "prefill tokens/s": requests * prompt / first}
        rows.append(row | {"decode tokens/s": decode})
    engine.llm_engine.engine_core.shutdown()
    return rows
