"""A user's script: PLUGIN SETTINGS, both JSON. The plugin's settings go to ``enable()``, the others to the trainer.

With null in place of the plugin's settings, it is not enabled.

Some keys of the settings are for the script: "rloo" takes that trainer instead of GRPO's, "family" builds another model, "loaded"
passes the model itself instead of its folder, "vision" is a folder with one that is asked about pictures, "lora" has arguments of
peft's ``LoraConfig``, "tools" adds tools and an environment, "fsdp2" shards the model, "change" is a number that the reward
function adds to a weight, "weights" saves the trained ones, "resume" names a checkpoint, "half" leaves rank 1 without the plugin,
"kill" is a process group that ends in the next sync after a step, "full" is whether the disk is full then, "martingale" is a
folder for that package's record of the run.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import jetrl_patch

plugin, given = (json.loads(word) for word in sys.argv[1:])
own = (
    "change", "weights", "resume", "half", "rloo", "lora", "tools", "fsdp2", "kill", "family", "vision", "full", "loaded",
    "martingale",
)  # fmt: skip
(
    change, weights, resume, half, rloo, lora, tools, fsdp2, kill, family, vision, full, loaded, martingale,
) = (given.pop(name, None) for name in own)  # fmt: skip
if plugin is not None and not (half and os.environ.get("RANK") == "1"):
    jetrl_patch.enable(**plugin)

import torch  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.trl import CHECKPOINT, parts, pictures  # noqa: E402


def reward(completions: list[Any], **_: Any) -> list[float]:
    if kill and trainer.state.global_step == 1:
        parts.end_in_a_sync(kill)
    if full and trainer.state.global_step == 1:  # as on a full disk, no file can grow any more
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    if change and trainer.state.global_step == 1:
        with torch.no_grad():
            trainer.model.get_decoder().norm.weight[0] += change
    return [float(len(str(text)) % 3) for text in completions]


numbers = ["twenty", "thirty four", "forty", "fifty one", "sixty"]  # prompts of several lengths, so that some are padded
asked = (f"what is {a} plus {b}?" for a in numbers for b in numbers)
prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": words}] if tools else words for words in asked]})
settings = {
    "output_dir": "out", "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 24, "max_steps": 3,
    "vllm_max_model_length": 64, "vllm_gpu_memory_utilization": 0.1, "use_vllm": True, "learning_rate": 5e-4, "logging_steps": 1,
    "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    **({"ddp_backend": "gloo"} if "RANK" in os.environ else {}),
}  # fmt: skip
tokenizer = AutoTokenizer.from_pretrained(str(CHECKPOINT))
model = str(CHECKPOINT)
if family:
    model = parts.checkpoint_of(family, tokenizer)
if vision:
    model, tokenizer, prompts = vision, None, Dataset.from_list(pictures.questions(24))
if loaded:
    model = AutoModelForCausalLM.from_pretrained(model)
more: dict[str, Any] = {**(parts.adapters(lora) if lora else {}), **(parts.tools(tokenizer) if tools else {})}
if given.get("vllm_enable_sleep_mode"):
    parts.let_engines_sleep()
if fsdp2 is not None:
    given |= parts.fsdp2(fsdp2)
kind, configuration = (trl.RLOOTrainer, trl.RLOOConfig) if rloo else (trl.GRPOTrainer, trl.GRPOConfig)
if martingale:
    from martingale.integrations.trl import MartingaleGRPOTrainer, MartingaleRecorder

    kind, more["flight_recorder"] = MartingaleGRPOTrainer, MartingaleRecorder(martingale, tokenizer=tokenizer)
args = configuration(**(settings | given))
if fsdp2 is not None:
    parts.let_accelerate_shard()
trainer = kind(
    model=model, reward_funcs=reward, args=args, train_dataset=prompts,
    eval_dataset=prompts.select(range(8)), processing_class=tokenizer, **more,
)  # fmt: skip
trainer.train(resume_from_checkpoint=resume)
if trainer.accelerator.is_main_process:
    Path("log.json").write_text(json.dumps(trainer.state.log_history))
    if martingale:
        Path("head.txt").write_text(more["flight_recorder"].head())
    if weights:
        torch.save({name: value.detach() for name, value in trainer.model.named_parameters()}, weights)
