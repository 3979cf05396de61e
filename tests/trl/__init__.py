"""TRL in a folder of its own: verl imports it wherever it is installed. So every test runs it in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from tests.ray.cluster import free_port

#: what `make trl` installs
TRL = Path(sys.prefix) / "trl"
#: its version; empty if it is not installed
VERSION = next((found.version for found in distributions(name="trl", path=[str(TRL)])), "")
needs_trl = pytest.mark.skipif(not TRL.is_dir(), reason=f"needs {TRL}, which `make trl` makes")
#: arguments of peft's ``LoraConfig``
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
#: a configuration of DeepSpeed
ZERO3: dict[str, Any] = {
    "zero_optimization": {"stage": 3}, "bf16": {"enabled": True},
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"),
}  # fmt: skip
#: the policy of all runs
CHECKPOINT = Path(__file__).parents[2] / "examples" / "words" / "checkpoint"
#: what vLLM needs here
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_AOT_COMPILE": "0", "TORCHDYNAMO_DISABLE": "1",  # without the plugin; TRL has no enforce_eager
}  # fmt: skip
#: seconds for one process
LIMIT = 600


def environ() -> dict[str, str]:
    """What a process needs to find TRL."""
    return {"PYTHONPATH": os.pathsep.join(path for path in (str(TRL), os.environ.get("PYTHONPATH", "")) if path)}


def run_python(
    folder: Path, *words: str, ranks: int = 1, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python on ``words``, as each of ``ranks`` ranks by torchrun, without the plugin's variables. ``given``: its input."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JETRL_")}
    # TRL looks for a free port long before it listens there, and another run's TRL finds the same
    own, python = {"MASTER_PORT": str(free_port())}, [sys.executable]
    if ranks > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        own["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [*python, *words], capture_output=True, text=True, cwd=folder, timeout=LIMIT, input=given,
        env={**clean, **environ(), **CPU, **own},
    )  # fmt: skip


def train(
    folder: Path, plugin: dict[str, Any] | None, settings: dict[str, Any] | None = None, ranks: int = 1
) -> list[dict[str, float]]:
    """Run ``script.py``, and return TRL's log of rank 0."""
    words = [json.dumps(plugin), json.dumps(settings or {})]
    done = run_python(folder, str(Path(__file__).with_name("script.py")), *words, ranks=ranks)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found: list[dict[str, float]] = json.loads((folder / "log.json").read_text())
    return found
