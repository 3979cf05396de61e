"""The mismatch under top-k, top-p and min-p, on a CPU: ``python -m benchmarks.sampling`` prints the table.

Each run samples at least ``TOKENS`` tokens in vLLM from a trained tiny model, and scores them with the trainer's. Words behind
the command choose the runs whose names have one of them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from jetrl_patch.cli.parity.run import run_mode
from jetrl_patch.config import Config
from jetrl_patch.measure.parity import Draw, Job
from tests import models

TOKENS = 4096
ALL = Draw(top_k=50, top_p=0.9, min_p=0.02, temperature=0.7)
MIXED = (
    Draw(top_k=20), Draw(top_p=0.95), Draw(), ALL, Draw(temperature=0.7), Draw(min_p=0.05),
    Draw(top_p=0.7, temperature=1.3),
)  # fmt: skip
MIXTURE, LATENT = "a mixture (Qwen3-MoE)", "latent attention (DeepSeek-V3)"
#: what the table calls a run -> how its requests draw, and what else differs from 32 requests to a dense model
RUNS: dict[str, tuple[tuple[Draw, ...], dict[str, Any]]] = {
    "`top_k=20`": ((Draw(top_k=20),), {}),
    "`top_p=0.95`": ((Draw(top_p=0.95),), {}),
    "`top_p=0.7`": ((Draw(top_p=0.7),), {}),
    "`min_p=0.05`": ((Draw(min_p=0.05),), {}),
    "all three at temperature 0.7": ((ALL,), {}),
    "requests of seven kinds in one batch": (MIXED, {}),
    "the same, one request at a time": (MIXED, {"batch": 1}),
    "the same, 7 requests, no cache, prompts in chunks": (
        MIXED, {"batch": 7, "engine": (("enable_prefix_caching", False), ("max_num_batched_tokens", 32))},
    ),
    "the same, tensor parallel size 2": (MIXED, {"tp": 2, "model": "tp4"}),
    f"the same, {MIXTURE}": (MIXED, {"model": "qwen3_moe"}),
    f"the same, {LATENT}": (MIXED, {"model": "deepseek_v3"}),
    '`top_p=0.95`, `align="linear"`': ((Draw(top_p=0.95),), {"config": Config(precision="fp8-unified", align="linear")}),
    '`top_p=0.95`, `precision="bf16"`': ((Draw(top_p=0.95),), {"config": Config(precision="bf16")}),
}  # fmt: skip


def row(name: str, folder: Path) -> str:
    draws, more = RUNS[name]
    variant = more.get("model", "qwen3")
    path = folder / variant
    job = {"config": Config(precision="fp8-unified"), "tokens": TOKENS, "draws": draws, **more}
    job |= {"model": str(path) if path.exists() else models.variant(path, variant, 0), "config": job["config"].resolved()}
    found = run_mode(Job(**job))
    far = " | ".join(f"{found[key]:.2g}" for key in ("logp_abs_diff_mean", "logp_abs_diff_max"))
    return f"| {name} | {found['tokens']:,} | {found['bit_equal_fraction']:.1%} | {far} |"


if __name__ == "__main__":
    print("| sampling | tokens | bit-equal | mean &#124;Δlogp&#124;, nats | max |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as given:
        for name in RUNS:
            if any(word in name for word in sys.argv[1:] or ("",)):
                print(row(name, Path(given)), flush=True)
