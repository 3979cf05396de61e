"""A step of TRL's GRPOTrainer beside TRL in BF16, on a CPU: ``python -m benchmarks.trl_steps`` prints the table.

BF16 is ``precision="bf16"``, which only measures: without its fixes vLLM's CPU engine takes no weights after the first ones.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tests.trl import train

STEPS = 8
ROUNDS = 2
SETTINGS = {
    "per_device_train_batch_size": 64, "num_generations": 8, "max_completion_length": 40, "max_steps": STEPS,
    "generation_kwargs": {"ignore_eos": True},  # the same number of tokens in each run
}  # fmt: skip
BF16, UNIFIED = {"precision": "bf16"}, {"precision": "fp8-unified"}
#: what the table calls a run -> the plugin's settings, and TRL's
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BF16": (BF16, {}),
    "BF16 without TRL's correction": (BF16, {"vllm_importance_sampling_correction": False}),
    '`precision="fp8-unified"`': (UNIFIED, {}),
    '`precision="fp8-unified"`, `align="linear"`': ({**UNIFIED, "align": "linear"}, {}),
}


def seconds(plugin: dict[str, Any], settings: dict[str, Any]) -> float:
    """The median time of a step, without the first."""
    with tempfile.TemporaryDirectory() as folder:
        log = train(Path(folder), plugin, {**SETTINGS, **settings})
    return median([line["step_time"] for line in log if "grad_norm" in line][1:])


if __name__ == "__main__":
    found: dict[str, list[float]] = {name: [] for name in RUNS}
    for _ in range(ROUNDS):  # in turn, because a machine's speed drifts
        for name, run in RUNS.items():
            found[name].append(seconds(*run))
    usual = min(found["BF16"])
    print("| run | seconds of a step | beside BF16 |\n| --- | --- | --- |")
    for name, times in found.items():
        print(f"| {name} | {min(times):.2f} | {min(times) / usual:.2f}× |")
