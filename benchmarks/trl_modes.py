"""The mismatch of TRL's trainers in each mode and layout, on a CPU: ``python -m benchmarks.trl_modes`` prints the table.

Words behind it choose the runs whose names have one of them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from tests import vision_models
from tests.trl import LORA, ZERO3, pictures, train
from tests.trl.serving import serving

EXACT: dict[str, Any] = {"precision": "fp8-unified"}
STEPS = 3
#: what the table calls a run -> the plugin's settings, TRL's, and the number of ranks; "serve" has arguments for a server,
#: "vision" the family of a model that is asked about pictures
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "exact": (EXACT, {}, 1),
    "exact, BF16 weights": (EXACT, {"model_init_kwargs": {"dtype": "bfloat16"}}, 1),
    "exact, reference model, two batches accumulated": (EXACT, {"beta": 0.04, "gradient_accumulation_steps": 2}, 1),
    "exact, RLOO, reference model": (EXACT, {"rloo": True, "beta": 0.04}, 1),
    "exact, LoRA": (EXACT, {"lora": LORA}, 1),
    "exact, tools and an environment, sleeping engine": (
        EXACT, {"tools": True, "max_completion_length": 60, "vllm_max_model_length": 128, "vllm_enable_sleep_mode": True}, 1,
    ),
    "exact, 2 ranks, DDP": (EXACT, {}, 2),
    "exact, 2 ranks, engine with TP 2": (EXACT, {"vllm_tensor_parallel_size": 2}, 2),
    "exact, 2 ranks, ZeRO-3": (EXACT, {"deepspeed": ZERO3}, 2),
    "exact, 2 ranks, ZeRO-3, LoRA": (EXACT, {"deepspeed": ZERO3, "lora": LORA}, 2),
    "exact, 2 ranks, FSDP2": (EXACT, {"fsdp2": {}}, 2),
    "exact, 2 ranks, FSDP2, LoRA, RLOO": (EXACT, {"fsdp2": {}, "lora": LORA, "rloo": True}, 2),
    "exact, server": (EXACT, {"serve": []}, 1),
    "exact, server with TP 2, RLOO": (
        EXACT, {"serve": ["--tensor-parallel-size", "2"], "vllm_tensor_parallel_size": 2, "rloo": True}, 1,
    ),
    "exact, server, 2 ranks, ZeRO-3": (EXACT, {"serve": [], "deepspeed": ZERO3}, 2),
    "exact, server, 2 ranks, FSDP2, LoRA": (EXACT, {"serve": [], "fsdp2": {}, "lora": LORA}, 2),
    "exact, mixture (Qwen3-MoE), balancing loss, reference model": (
        EXACT, {"family": "qwen3_moe", "router_aux_loss_coef": 0.01, "beta": 0.04}, 1,
    ),
    "exact, delta nets (Qwen3-Next)": (EXACT, {"family": "qwen3_next"}, 1),
    "exact, latent attention (DeepSeek-V3)": (EXACT, {"family": "deepseek_v3"}, 1),
    "exact, pictures (Qwen2.5-VL), reference model": (EXACT, {"vision": "qwen2_5_vl", "beta": 0.04}, 1),
    "exact, pictures (Qwen2.5-VL), LoRA, RLOO": (EXACT, {"vision": "qwen2_5_vl", "lora": LORA, "rloo": True}, 1),
    "exact, pictures (Qwen3-VL), 2 ranks, ZeRO-3": (EXACT, {"vision": "qwen3_vl", "deepspeed": ZERO3}, 2),
    '`align="linear"`': ({**EXACT, "align": "linear"}, {}, 1),
    '`precision="fp8-rollout"`': ({"precision": "fp8-rollout"}, {}, 1),
    '`precision="int8-rollout"`': ({"precision": "int8-rollout"}, {}, 1),
    '`precision="fp16"`': ({"precision": "fp16"}, {"fp16": True}, 1),
    '`precision="fp16"`, 2 ranks, FSDP2': ({"precision": "fp16"}, {"fp16": True, "fsdp2": {}}, 2),
    '`precision="bf16"`, which only measures': ({"precision": "bf16"}, {}, 1),
}  # fmt: skip


def row(name: str) -> str:
    plugin, given, ranks = RUNS[name]
    settings = {"max_steps": STEPS, "max_completion_length": 40, **given}
    words = settings.pop("serve", None)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if family := settings.get("vision"):
            settings |= {"vision": pictures.checkpoint(Path(folder) / "model", family), "vllm_max_model_length": 256}
            stack.enter_context(mock.patch.dict(os.environ, vision_models.environ()))
        if words is not None:
            settings |= stack.enter_context(serving(Path(folder), *words, JETRL_PRECISION=plugin["precision"]))[0]
        log = train(Path(folder), plugin, settings, ranks)
    lines = [line for line in log if "grad_norm" in line]
    assert len(lines) == STEPS
    tokens = sum(line["jetrl/tokens"] for line in lines)
    equal = sum(line["jetrl/tokens"] * line["jetrl/bit_equal_fraction"] for line in lines)
    means = [line["jetrl/logp_abs_diff_mean"] for line in lines]
    far = f"{min(means):.2g} to {max(means):.2g}" if max(means) else "0"
    most = max(line["jetrl/logp_abs_diff_max"] for line in lines)
    return f"| {name} | {tokens:,.0f} | {equal / tokens:.1%} | {far} | {most:.2f} |"


if __name__ == "__main__":
    print("| run | tokens | bit-equal | mean &#124;Δlogp&#124; of a step, nats | max |\n| --- | --- | --- | --- | --- |")
    for name in RUNS:
        if any(word in name for word in sys.argv[1:] or ("",)):
            print(row(name), flush=True)
