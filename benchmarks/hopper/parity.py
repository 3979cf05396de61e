"""Part b: ``jetrl parity`` of a small trained model, with long responses and decode batches of 1 to 256."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from benchmarks.hopper.plan import FP8_CACHE, GRAPHS, STOCK_BF16, Setup
from benchmarks.hopper.record import MISSED
from examples.words import CHECKPOINT
from jetrl_patch import Config
from jetrl_patch.cli.parity.run import run_mode
from jetrl_patch.measure.parity import STOCK, Job
from scripts.tables import Row

BATCHES, LENGTH = (256, 64, 7, 1), 2048
#: bytes of the cache: 256 responses of this model take 1.1 GB
CACHE = 4 << 30
STOCK_FP8, LINEAR, EAGER, OWN = "vLLM's FP8", "linear", "exact, eager", f"{GRAPHS}, the project's attention"
STOCKS = {STOCK_BF16: "bfloat16", STOCK_FP8: "fp8-online"}


def pieces(dry: bool) -> list[str]:
    others = [] if dry else [f"{mode}; 64" for mode in (OWN, FP8_CACHE, EAGER, LINEAR, STOCK_BF16)]
    return [f"{GRAPHS}; {batch}" for batch in ((2,) if dry else BATCHES)] + others


def job(mode: str, backend: str) -> Job:
    """A mode with the settings of a rollout."""
    if stock := STOCKS.get(mode):
        return Job(model="", config=STOCK[stock].config(), stock=stock)
    config = Config(precision="fp8-unified", align="linear" if mode == LINEAR else "exact", backend=backend).resolved()
    attention = "triton" if mode == OWN else config.exact_attention
    graphs, cache = mode in (GRAPHS, OWN, FP8_CACHE), "fp8" if mode == FP8_CACHE else config.kv_cache
    return Job(model="", config=config.replace(decode_graphs=graphs, exact_attention=attention, kv_cache=cache))


def measure(name: str, setup: Setup) -> list[Row]:
    mode, batch = name.split("; ")
    tokens = int(batch) * (length := 8 if setup.dry else LENGTH)
    ours = replace(job(mode, setup.backend), model=str(long_model(setup.scratch / "words-long")))
    # vLLM would refuse to profile a GPU's memory while other processes free some
    engine = setup.engine and (*setup.engine, ("kv_cache_memory_bytes", CACHE))
    found = run_mode(replace(ours, batch=int(batch), length=length, tokens=tokens, engine=engine))
    verdict = "" if not ours.promises_equality else "met" if found["bit_equal_fraction"] == 1.0 else MISSED
    return [
        {
            "mode": mode, "batch": batch, "tokens a response": length, "tokens": found["tokens"], "backend": found["backend"],
            "attention": found["attention"] or "its own", "mean abs Δ": found["logp_abs_diff_mean"],
            "max abs Δ": found["logp_abs_diff_max"], "bit-equal": found["bit_equal_fraction"], "verdict": verdict,
        }
    ]  # fmt: skip


def long_model(folder: Path) -> Path:
    """The example's trained model with 4,096 positions instead of 128: its rotary embedding continues."""
    if not folder.exists():
        shutil.copytree(CHECKPOINT, folder)
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 4096}))
    return folder
