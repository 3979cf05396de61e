"""A user's GRPO script: PLUGIN SETTINGS, both JSON. The plugin's settings go to ``enable()``, the others to ``GRPOConfig``.

Some keys of the settings are for the script: "change" lets the reward function change a weight, "weights" saves the trained ones,
"resume" names a checkpoint, "half" leaves rank 1 without the plugin.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jetrl_patch

plugin, given = (json.loads(word) for word in sys.argv[1:])
change, weights, resume, half = (given.pop(name, None) for name in ("change", "weights", "resume", "half"))
if not (half and os.environ.get("RANK") == "1"):
    jetrl_patch.enable(**plugin)

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

CHECKPOINT = str(Path(__file__).parents[2] / "examples" / "words" / "checkpoint")


def reward(completions: list[str], **_: Any) -> list[float]:
    if change and trainer.state.global_step == 1:
        with torch.no_grad():
            trainer.model.model.norm.weight[0] += 0.5
    return [float(len(text) % 3) for text in completions]


numbers = ["twenty", "thirty four", "forty", "fifty one", "sixty"]  # prompts of several lengths, so that some are padded
prompts = Dataset.from_dict({"prompt": [f"what is {a} plus {b}?" for a in numbers for b in numbers]})
settings = {
    "output_dir": "out", "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 24, "max_steps": 3,
    "vllm_max_model_length": 64, "vllm_gpu_memory_utilization": 0.1, "use_vllm": True, "learning_rate": 5e-4, "logging_steps": 1,
    "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    **({"ddp_backend": "gloo"} if "RANK" in os.environ else {}),
}  # fmt: skip
trainer = GRPOTrainer(
    model=CHECKPOINT, reward_funcs=reward, args=GRPOConfig(**(settings | given)), train_dataset=prompts,
    eval_dataset=prompts.select(range(8)), processing_class=AutoTokenizer.from_pretrained(CHECKPOINT),
)  # fmt: skip
trainer.train(resume_from_checkpoint=resume)
if trainer.accelerator.is_main_process:
    Path("log.json").write_text(json.dumps(trainer.state.log_history))
    if weights:
        torch.save({name: value.detach() for name, value in trainer.model.named_parameters()}, weights)
