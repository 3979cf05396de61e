"""Part d: prefill and decoding of an 8B shape in vLLM, an engine in a process of its own for each mode."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.harness import Row
from benchmarks.hopper import shape
from benchmarks.hopper.plan import find
from benchmarks.hopper.record import Record, Table
from benchmarks.hopper.worker import Piece, Setup
from jetrl_patch import Config
from jetrl_patch.cli.parity.run import environment
from jetrl_patch.measure.parity import STOCK, Job


class Load(NamedTuple):
    """Requests at once, and tokens of each prompt and response."""

    batch: int
    prompt: int
    response: int


LOADS = (Load(64, 128, 256), Load(256, 128, 256), Load(16, 128, 256), Load(1, 128, 256), Load(16, 8192, 128), Load(4, 32768, 128))
TINY = (Load(2, 8, 4),)
BASELINE, TITLE = "BF16", "Tokens per second"
ROUNDS = 3


def pieces(setup: Setup) -> Iterator[Piece]:
    """One for each mode and workload. An engine is as long as the longest of all."""
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
    loads, engine = TINY if setup.dry else LOADS, Engine(setup, TINY if setup.dry else LOADS)
    setup.at_end.callback(engine.end)
    for mode, job in jobs.items():
        for load in loads:
            if mode == "exact" or not setup.dry:
                yield Piece(TITLE, ", ".join(map(str, (mode, *load))), partial(engine.time, mode, job, load), 90)


class Engine:
    """The engine of the last mode that was measured, in a process of its own."""

    def __init__(self, setup: Setup, loads: tuple[Load, ...]) -> None:
        self.setup, self.loads, self.mode = setup, loads, ""
        self._process: Any = None
        self._connection: Connection | None = None

    def time(self, mode: str, job: Job, load: Load) -> list[Row]:
        """Time a workload.

        Raises:
            RuntimeError: the process ended. The next workload gets another.
        """
        if self.mode != mode or self._connection is None:
            self.end()
            self._start(job)
            self.mode = mode
        assert self._connection is not None
        try:
            self._connection.send(load)
            return [{"mode": mode, **self._connection.recv()}]
        except (EOFError, OSError):
            raise RuntimeError(f"the engine's process ended with status {self.end()} and without a result for {load}") from None

    def _start(self, job: Job) -> None:
        dry = self.setup.dry
        folder = shape.checkpoint(
            self.setup.scratch / "qwen3-8b-random", shape.config(shape.LAYERS, dry), self.setup.device
        )
        memory = () if dry else (("gpu_memory_utilization", find(["rollout"])[0].share),)
        engine = (*job.engine, ("enable_prefix_caching", False), *memory)
        job = replace(job, model=str(folder), batch=max(load.batch for load in self.loads), engine=engine)
        longest = max(load.prompt + load.response for load in self.loads)
        self._connection, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, job, longest))
        with mock.patch.dict(os.environ, environment(job), clear=True):
            self._process.start()
        theirs.close()

    def end(self, patience: float = 20.0) -> int | None:
        """Let the process end, and return its status; None if there was none."""
        if self._connection is None:
            return None
        self._connection.close()
        self._connection = None
        self._process.join(patience)
        self._process.kill()
        self._process.join()
        return int(self._process.exitcode)


def serve(connection: Connection, job: Job, longest: int) -> None:
    """Build the engine and time each workload that is sent, until the other end closes."""
    from jetrl_patch import session
    from jetrl_patch.adapters.vllm.sample import build_engine

    if job.stock is None:
        session.enable(job.config)
    engine = build_engine(job, longest)
    try:
        while True:
            connection.send(_time(engine, connection.recv(), job.temperature))
    except EOFError:
        pass
    finally:
        engine.llm_engine.engine_core.shutdown()


def _time(engine: Any, load: Load, temperature: float) -> Row:
    """Medians of turns. Decoding is what all tokens take beyond the first."""
    from jetrl_patch.adapters.vllm.sample import generate

    prompts = [[(7 * i + j) % 200 + 2 for j in range(load.prompt)] for i in range(load.batch)]

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        generate(engine, prompts, tokens, temperature)
        return time.perf_counter() - start

    seconds(min(load.response, 16))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    turns = [(seconds(1), seconds(load.response)) for _ in range(ROUNDS)]
    first = statistics.median(one for one, _ in turns)
    rest = statistics.median(whole - one for one, whole in turns)
    cache = engine.llm_engine.vllm_config.cache_config
    return {
        **load._asdict(), "prefill tokens/s": load.batch * load.prompt / first,
        "decode tokens/s": load.batch * (load.response - 1) / rest if rest > 0 else float("nan"),
        "KV tokens": int(cache.num_gpu_blocks * cache.block_size),
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else "",
    }  # fmt: skip


def derive(record: Record) -> list[Table]:
    """Speed of each mode over BF16's, for decoding."""
    table: dict[Load, Row] = {}
    rows = record.tables().get(TITLE, [])
    for row in rows:
        load = Load(row["batch"], row["prompt"], row["response"])
        base = [mine["decode tokens/s"] for mine in rows if mine["mode"] == BASELINE and mine.items() >= load._asdict().items()]
        if base:
            table.setdefault(load, load._asdict())[row["mode"]] = row["decode tokens/s"] / base[0]
    return [("Decoding, times BF16", list(table.values()), "")]
