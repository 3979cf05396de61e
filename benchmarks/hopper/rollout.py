"""Part d: prefill and decoding of an 8B shape in vLLM, an engine in a process of its own for each mode.

``python -m benchmarks.hopper.rollout JOB FD`` is that process: it reads a pickled job, then a workload a line from its input, and
writes a row a line to the file descriptor, because vLLM prints to its output.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from benchmarks.gpu.piece import Piece, named
from benchmarks.hopper import shape
from benchmarks.hopper.cells import Cell, Cells, Derived, Setup, ratio
from benchmarks.hopper.plan import find
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
BASELINE, FP8 = "BF16", "vLLM's FP8"
ROUNDS = 3


def cells(setup: Setup) -> dict[str, Cell]:
    exact, linear = (
        Config(precision="fp8-unified", align=a, decode_graphs=a == "exact", backend=setup.backend).resolved()  # type: ignore[arg-type]
        for a in ("exact", "linear")
    )
    jobs = {
        BASELINE: Job(model="", config=STOCK["bfloat16"].config(), stock="bfloat16"),
        FP8: Job(model="", config=STOCK["fp8-online"].config(), stock="fp8-online"),
        "linear": Job(model="", config=linear, engine=(("enforce_eager", False),)),
        "exact": Job(model="", config=exact),
        "exact, the project's attention": Job(model="", config=exact.replace(exact_attention="triton")),
    }
    chosen = {"exact": jobs["exact"]} if setup.dry else jobs
    loads = TINY if setup.dry else LOADS
    return {mode: Cell("Tokens per second", partial(_pieces, setup, mode, job, loads), 220) for mode, job in chosen.items()}


def _pieces(setup: Setup, mode: str, job: Job, loads: Sequence[Load], done: Collection[str]) -> Iterator[Piece]:
    """A piece for each workload. The engine starts with the first that is measured, and is as long as the longest of all."""
    folder = shape.checkpoint(setup.scratch / "qwen3-8b-random", shape.config(shape.LAYERS, setup.dry), setup.device)
    memory = () if setup.dry else (("gpu_memory_utilization", find(["rollout"])[0].share),)
    engine = (*job.engine, ("enable_prefix_caching", False), *memory)
    job = replace(job, model=str(folder), batch=max(load.batch for load in loads), engine=engine)
    with Engine(job, max(load.prompt + load.response for load in loads)) as engine_:
        for load in loads:
            yield Piece(named(*load), lambda load=load: [{"mode": mode, **engine_.time(load)}])  # type: ignore[misc]


class Engine:
    """An engine in a process of its own, started by the first workload.

    Args:
        longest: tokens of its longest sequence.
    """

    def __init__(self, job: Job, longest: int) -> None:
        self.job, self.longest = job, longest
        self._process: subprocess.Popen[str] | None = None
        self._rows: TextIO | None = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self, patience: float = 20.0) -> int | None:
        """Let the process end at the end of its input, and return its status; None if there was none."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None and self._rows is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        self._rows.close()
        try:
            return process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def time(self, load: Load) -> dict[str, Any]:
        """Time a workload.

        Raises:
            RuntimeError: the process ended.
        """
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None and self._rows is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(load) + "\n")
            self._process.stdin.flush()
            line = self._rows.readline()
        if not line:
            status = self._end()  # the next workload gets another
            raise RuntimeError(f"the engine's process ended with status {status} and without a result for {load}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _start(self) -> None:
        read, write = os.pipe()
        with tempfile.NamedTemporaryFile(suffix=".job") as file:
            file.write(pickle.dumps((self.job, self.longest)))
            file.flush()
            command = [sys.executable, "-m", "benchmarks.hopper.rollout", file.name, str(write)]
            self._process = subprocess.Popen(
                command, env=environment(self.job), stdin=subprocess.PIPE, pass_fds=(write,), text=True
            )
            os.close(write)
            self._rows = os.fdopen(read)
            self._rows.readline()  # it has read the job


def main(asked: str, descriptor: str) -> None:
    """Build the engine and time a workload for every line of the input."""
    job, longest = pickle.loads(Path(asked).read_bytes())
    os.set_inheritable(int(descriptor), False)
    with os.fdopen(int(descriptor), "w", buffering=1) as rows:
        print(file=rows)
        from jetrl_patch import session
        from jetrl_patch.adapters.vllm.sample import build_engine

        if job.stock is None:
            session.enable(job.config)
        engine = build_engine(job, longest)
        try:
            for line in sys.stdin:
                print(json.dumps(_time(engine, Load(*json.loads(line)), job.temperature)), file=rows)
        finally:
            engine.llm_engine.engine_core.shutdown()


def _time(engine: Any, load: Load, temperature: float) -> dict[str, Any]:
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
    return {
        "batch": load.batch, "prompt": load.prompt, "response": load.response,
        "prefill tokens/s": load.batch * load.prompt / first,
        "decode tokens/s": load.batch * (load.response - 1) / rest if rest > 0 else float("nan"),
        "KV tokens": _kv_tokens(engine), "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else "",
    }  # fmt: skip


def _kv_tokens(engine: Any) -> int:
    """Tokens that its cache holds."""
    cache = engine.llm_engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks * cache.block_size)


def derive(cells: Cells, planned: Sequence[str]) -> list[Derived]:
    """Speed of each mode over BF16's, for decoding."""
    rows = []
    for base in cells.get(BASELINE, ()):
        load = {key: base[key] for key in ("batch", "prompt", "response")}
        row: dict[str, Any] = dict(load)
        for mode in planned:
            mine = next((r for r in cells.get(mode, ()) if all(r[key] == load[key] for key in load)), {})
            row[mode] = ratio(mine.get("decode tokens/s"), base["decode tokens/s"])
        rows.append(row)
    return [Derived("Decoding, times BF16", rows)] if rows else []


if __name__ == "__main__":
    main(*sys.argv[1:])
