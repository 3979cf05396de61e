"""Part c: ``jetrl parity`` of a small trained model, with long responses and decode batches of 1 to 256."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.hopper.cells import Cell, Cells, Derived, Setup, whole
from benchmarks.hopper.plan import find
from examples.words import CHECKPOINT
from jetrl_patch import Config
from jetrl_patch.cli.parity.run import run_mode
from jetrl_patch.measure.parity import STOCK, Job

BATCHES, LENGTH = (256, 64, 7, 1), 2048
GRAPHS = "exact, CUDA graphs"


def cells(setup: Setup) -> dict[str, Cell]:
    exact = Config(precision="fp8-unified", align="exact", decode_graphs=True, backend=setup.backend).resolved()
    jobs: dict[tuple[str, int], Job] = {}
    for batch in (2,) if setup.dry else BATCHES:
        jobs[GRAPHS, batch] = Job(model="", config=exact, batch=batch)
    if not setup.dry:
        jobs[f"{GRAPHS}, the project's attention", 64] = Job(model="", config=exact.replace(exact_attention="triton"), batch=64)
        jobs["exact, eager", 64] = Job(model="", config=exact.replace(decode_graphs=False), batch=64)
        jobs["linear", 64] = Job(model="", config=exact.replace(align="linear", decode_graphs=False), batch=64)
        jobs["BF16 without the plugin", 64] = Job(model="", config=STOCK["bfloat16"].config(), stock="bfloat16", batch=64)
    title = "Log-probs of rollout and trainer"
    return {
        f"{mode}, {batch}": Cell(title, whole(partial(_run, setup, mode, batch, job)), 120)
        for (mode, batch), job in jobs.items()
    }


def _run(setup: Setup, mode: str, batch: int, job: Job) -> Iterator[dict[str, Any]]:
    length = 8 if setup.dry else LENGTH
    # the trainer's model comes into the same process
    engine = () if setup.dry else (("gpu_memory_utilization", find(["parity"])[0].share),)
    job = Job(
        model=str(long_model(setup.scratch / "words-long")), config=job.config, stock=job.stock, batch=batch, length=length,
        tokens=batch * length, engine=engine,
    )  # fmt: skip
    found = run_mode(job)
    yield {
        "mode": mode, "batch": batch, "tokens a response": length, "tokens": found["tokens"], "backend": found["backend"],
        "attention": found["attention"] or "its own",
        "mean abs Δ": found["logp_abs_diff_mean"], "max abs Δ": found["logp_abs_diff_max"],
        "bit-equal": found["bit_equal_fraction"],
    }  # fmt: skip


def long_model(folder: Path) -> Path:
    """The example's trained model with 4,096 positions: its answers end before 64, and the rotary embedding goes on."""
    if not folder.exists():
        shutil.copytree(CHECKPOINT, folder)
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 4096}))
    return folder


def derive(cells: Cells, planned: Sequence[str]) -> list[Derived]:
    exact = [name for name in planned if name.startswith("exact")]
    rows = [row for name in exact for row in cells.get(name, ())]
    worst = min((row["bit-equal"] for row in rows), default="")
    complete = len(rows) == len(exact) > 0
    verdict = "MISSED" if rows and worst != 1.0 else "met" if complete else "not measured"
    target = "every token of exact mode is equal to the last bit"
    return [Derived("Target", [{"target": target, "found, the lowest share": worst, "verdict": verdict}])]
