"""Part c: ``jetrl parity`` of a small trained model, with long responses and decode batches of 1 to 256."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.hopper.plan import find
from benchmarks.hopper.record import Piece, Record, Setup, Table
from examples.words import CHECKPOINT
from jetrl_patch import Config
from jetrl_patch.cli.parity.run import run_mode
from jetrl_patch.measure.parity import STOCK, Job
from scripts.tables import Row

BATCHES, LENGTH = (256, 64, 7, 1), 2048
GRAPHS = "exact, CUDA graphs"


def pieces(setup: Setup) -> Iterator[Piece]:
    exact = Config(precision="fp8-unified", align="exact", decode_graphs=True, backend=setup.backend).resolved()  # type: ignore[arg-type]
    jobs = [(GRAPHS, Job(model="", config=exact, batch=batch)) for batch in ((2,) if setup.dry else BATCHES)]
    if not setup.dry:
        jobs += [
            (f"{GRAPHS}, the project's attention", Job(model="", config=exact.replace(exact_attention="triton"), batch=64)),
            ("exact, eager", Job(model="", config=exact.replace(decode_graphs=False), batch=64)),
            ("linear", Job(model="", config=exact.replace(align="linear", decode_graphs=False), batch=64)),
            ("BF16 without the plugin", Job(model="", config=STOCK["bfloat16"].config(), stock="bfloat16", batch=64)),
        ]
    for mode, job in jobs:
        yield Piece("Log-probs of rollout and trainer", f"{mode}, {job.batch}", partial(_run, setup, mode, job))


def _run(setup: Setup, mode: str, job: Job) -> list[Row]:
    length = 8 if setup.dry else LENGTH
    # the trainer's model is loaded into the same process
    engine = () if setup.dry else (("gpu_memory_utilization", find(["parity"])[0].share),)
    model = str(long_model(setup.scratch / "words-long"))
    found = run_mode(replace(job, model=model, length=length, tokens=job.batch * length, engine=engine))
    return [
        {
            "mode": mode, "batch": job.batch, "tokens a response": length, "tokens": found["tokens"], "backend": found["backend"],
            "attention": found["attention"] or "its own", "mean abs Δ": found["logp_abs_diff_mean"],
            "max abs Δ": found["logp_abs_diff_max"], "bit-equal": found["bit_equal_fraction"],
        }
    ]  # fmt: skip


def long_model(folder: Path) -> Path:
    """The example's trained model with 4,096 positions instead of 128: its rotary embedding continues."""
    if not folder.exists():
        shutil.copytree(CHECKPOINT, folder)
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 4096}))
    return folder


def derive(record: Record) -> list[Table]:
    exact = [name for name in record.planned if name.startswith("exact")]
    shares = [row["bit-equal"] for name in exact for row in record.rows.get(name, ())]
    verdict = "MISSED" if any(share != 1.0 for share in shares) else "met" if len(shares) == len(exact) > 0 else "not measured"
    target = "every token of exact mode is bit-equal"
    return [("Target", [{"target": target, "found, the lowest share": min(shares, default=""), "verdict": verdict}], "")]
