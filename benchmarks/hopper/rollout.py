"""Part d: prefill and decoding of an 8B shape in vLLM, with an engine in a process of its own for each mode."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.hopper import shape
from benchmarks.hopper.plan import find
from benchmarks.hopper.record import Piece, Record, Setup, Table
from jetrl_patch import Config
from jetrl_patch.cli.parity.run import environment
from jetrl_patch.measure.parity import STOCK, Job
from scripts.tables import Row


class Load(NamedTuple):
    """Concurrent requests, and tokens of each prompt and response."""

    batch: int
    prompt: int
    response: int


LOADS = (Load(64, 128, 256), Load(256, 128, 256), Load(1, 128, 256), Load(16, 8192, 128), Load(4, 32768, 128))
TINY = (Load(2, 8, 4),)
BASELINE, TITLE = "BF16", "Tokens per second"
ROUNDS = 3


def pieces(setup: Setup) -> Iterator[Piece]:
    exact, linear = (
        Config(precision="fp8-unified", align=a, decode_graphs=a == "exact", backend=setup.backend).resolved()  # type: ignore[arg-type]
        for a in ("exact", "linear")
    )
    jobs = {
        BASELINE: Job(model="", config=STOCK["bfloat16"].config(), stock="bfloat16"),
        "vLLM's FP8": Job(model="", config=STOCK["fp8-online"].config(), stock="fp8-online"),
        "linear": Job(model="", config=linear, engine=(("enforce_eager", False),)),
        "exact": Job(model="", config=exact),
        "exact, the project's attention": Job(model="", config=exact.replace(exact_attention="triton")),
    }
    for mode, job in jobs.items():
        if mode == "exact" or not setup.dry:
            yield Piece(TITLE, mode, partial(_run, setup, mode, job))


def _run(setup: Setup, mode: str, job: Job) -> list[Row]:
    folder = shape.checkpoint(setup.scratch / "qwen3-8b-random", shape.config(shape.LAYERS, setup.dry), setup.device)
    loads = TINY if setup.dry else LOADS
    memory = () if setup.dry else (("gpu_memory_utilization", find(["rollout"])[0].share),)
    engine = (*job.engine, ("enable_prefix_caching", False), *memory)
    job = replace(job, model=str(folder), batch=max(load.batch for load in loads), engine=engine)
    context = multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ, environment(job), clear=True), ProcessPoolExecutor(1, context) as pool:
        return [{"mode": mode, **row} for row in pool.submit(serve, job, loads).result()]


def serve(job: Job, loads: Sequence[Load]) -> list[Row]:
    """Build the engine and time each workload. One that fails is a row with a note."""
    from jetrl_patch import session
    from jetrl_patch.adapters.vllm.sample import build_engine

    if job.stock is None:
        session.enable(job.config)
    engine, rows = build_engine(job, max(load.prompt + load.response for load in loads)), []
    for load in loads:
        try:
            rows.append(load._asdict() | _time(engine, load, job.temperature))
        except Exception as error:  # the row says so, and the other loads still run
            rows.append(load._asdict() | {"note": f"{type(error).__name__}: {error}"[:200]})
    engine.llm_engine.engine_core.shutdown()
    return rows


def _time(engine: Any, load: Load, temperature: float) -> Row:
    """Medians of turns. Decoding takes what all tokens take beyond the first."""
    from jetrl_patch.adapters.vllm.sample import generate

    prompts = [[(7 * i + j) % 200 + 2 for j in range(load.prompt)] for i in range(load.batch)]

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        generate(engine, prompts, tokens, temperature)
        return time.perf_counter() - start

    seconds(min(load.response, 16))
    turns = [(seconds(1), seconds(load.response)) for _ in range(ROUNDS)]
    first = statistics.median(one for one, _ in turns)
    rest = statistics.median(whole - one for one, whole in turns)
    cache = engine.llm_engine.vllm_config.cache_config
    return {
        "prefill tokens/s": load.batch * load.prompt / first,
        "decode tokens/s": load.batch * (load.response - 1) / rest if rest > 0 else float("nan"),
        "KV tokens": int(cache.num_gpu_blocks * cache.block_size),
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else "",
    }  # fmt: skip


def derive(record: Record) -> list[Table]:
    """Speed of decoding, relative to BF16."""
    table: dict[Load, Row] = {}
    rows = [row for row in record.tables().get(TITLE, []) if "decode tokens/s" in row]
    speeds = {(row["mode"], Load(row["batch"], row["prompt"], row["response"])): row["decode tokens/s"] for row in rows}
    for (mode, load), speed in speeds.items():
        if base := speeds.get((BASELINE, load)):
            table.setdefault(load, load._asdict())[mode] = speed / base
    return [("Decoding, times BF16", list(table.values()), "")]
