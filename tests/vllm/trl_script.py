"""A trainer of TRL with a colocated engine, as a user would write it, and ``enable()`` at its top: MODEL."""

from __future__ import annotations

import sys

import jetrl_patch

(model,) = sys.argv[1:]
jetrl_patch.enable(precision="fp8-unified")

from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from trl import DistillationConfig, DistillationTrainer  # noqa: E402

settings = DistillationConfig(
    output_dir="out", per_device_train_batch_size=4, max_completion_length=4, max_steps=1, report_to="none",
    use_vllm=True, vllm_mode="colocate", vllm_max_model_length=64, vllm_gpu_memory_utilization=0.1, use_cpu=True,
    bf16=False, save_strategy="no", logging_steps=1,
)  # fmt: skip
DistillationTrainer(
    model, model, args=settings, processing_class=AutoTokenizer.from_pretrained(model),
    train_dataset=Dataset.from_dict({"prompt": ["what is two plus two?"] * 4}),
).train()  # fmt: skip
print("TRAINED")
