"""Part d: prefill and decoding of an 8B shape in vLLM, an engine in a process of its own for each mode.

``python -m benchmarks.hopper.rollout JOB`` is that process: it reads a pickled job and workloads, and writes rows.
"""

from __future__ import annotations

import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.hopper import shape
from benchmarks.hopper.cells import Cell, Cells, Derived, Setup, ratio
from jetrl_patch import Config
from jetrl_patch.parity.modes import Job
from jetrl_patch.parity.run import environment
from jetrl_patch.parity.stock import STOCK


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
    return {mode: Cell("Tokens per second", lambda m=mode, j=job: _run(setup, m, j), 150) for mode, job in chosen.items()}  # type: ignore[misc]


def _run(setup: Setup, mode: str, job: Job) -> Iterator[dict[str, Any]]:
    folder = shape.checkpoint(setup.scratch / "qwen3-8b-random", shape.config(shape.LAYERS, setup.dry), setup.device)
    loads = TINY if setup.dry else LOADS
    memory = () if setup.dry else (("gpu_memory_utilization", 0.85),)
    engine = (*job.engine, ("enable_prefix_caching", False), *memory)
    job = Job(
        model=str(folder), config=job.config, stock=job.stock, batch=max(load.batch for load in loads), engine=engine
    )
    with tempfile.TemporaryDirectory() as place:
        asked, answer = Path(place) / "job", Path(place) / "rows"
        asked.write_bytes(pickle.dumps((job, loads)))
        command = [sys.executable, "-m", "benchmarks.hopper.rollout", str(asked), str(answer)]
        done = subprocess.run(command, env=environment(job), check=False)
        if not answer.exists():
            raise RuntimeError(f"the engine's process ended with status {done.returncode} and without a result")
        for row in pickle.loads(answer.read_bytes()):
            yield {"mode": mode, **row}


def main(asked: str, answer: str) -> None:
    """Build the engine, warm it up and time every workload."""
    from jetrl_patch import runtime
    from jetrl_patch.adapters.vllm.sample import build_engine

    job, loads = pickle.loads(Path(asked).read_bytes())
    if job.stock is None:
        runtime.enable(job.config)
    engine = build_engine(job, max(load.prompt + load.response for load in loads))
    try:
        found = [_time(engine, load, job.temperature) for load in loads]
    finally:
        engine.llm_engine.engine_core.shutdown()
    Path(answer).write_bytes(pickle.dumps(found))


def _time(engine: Any, load: Load, temperature: float) -> dict[str, Any]:
    """Medians of turns. Decoding is what all tokens take beyond the first."""
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
    return {
        "batch": load.batch, "prompt": load.prompt, "response": load.response,
        "prefill tokens/s": load.batch * load.prompt / first,
        "decode tokens/s": load.batch * (load.response - 1) / rest if rest > 0 else float("nan"),
    }  # fmt: skip


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
