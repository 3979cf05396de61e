"""One combination a seed: settings of the plugin, options of TRL's trainers, shapes of the data, and a model."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from typing import Any

from jetrl_patch.config import SETTINGS, Config
from tests.combinations import settings_of

__all__ = ["Combination", "combination"]

#: settings of the plugin that are drawn more often than at random, because random ones are mostly refused
_PLUGIN: tuple[dict[str, Any], ...] = (
    {"precision": "fp8-unified"}, {"precision": "fp8-unified"}, {"precision": "fp8-unified"},
    {"precision": "fp8-unified", "align": "linear"}, {"precision": "fp8-rollout"}, {"precision": "bf16"},
    {"precision": "int8-rollout"},
)  # fmt: skip
#: further settings of the plugin
_WITH: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"scale_format": "fp32"}, {"scale_format": "mxfp8"}, {"scale_format": "nvfp4"}, {"kv_cache": "fp8"},
    {"head_dtype": "float32"}, {"old_log_probs": "recompute"}, {"audit_fraction": 1.0}, {"exclude": ("layers.0",)},
    {"invariant_scale": 1.5}, {"smoothing": 0.5}, {"correction": "tis"}, {"correction": "geo-mis"}, {"on_mismatch": "recompute"},
    {"rollout_granularity": "channel"},
)  # fmt: skip
#: options of ``GRPOConfig`` that are set together, and of the script that trains (``tests/trl/script.py``)
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7}, {"temperature": 1.3}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"repetition_penalty": 1.1},
    {"num_iterations": 2}, {"gradient_accumulation_steps": 2}, {"steps_per_generation": 4}, {"beta": 0.04},
    {"loss_type": "grpo"}, {"loss_type": "dr_grpo"}, {"loss_type": "bnpo"}, {"loss_type": "cispo"}, {"loss_type": "sapo"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"}, {"importance_sampling_level": "sequence"},
    {"scale_rewards": "batch"}, {"scale_rewards": "none"}, {"mask_truncated_completions": True}, {"epsilon_high": 0.28},
    {"delta": 2.0}, {"top_entropy_quantile": 0.5}, {"disable_dropout": True}, {"gradient_checkpointing": False},
    {"bf16": False}, {"optim": "sgd"}, {"weight_decay": 0.1}, {"max_grad_norm": 0.1}, {"learning_rate": 0.0},
    {"vllm_importance_sampling_correction": False}, {"vllm_importance_sampling_mode": "token_mask"},
    {"vllm_importance_sampling_clip_max": 1.5}, {"sync_ref_model": True, "beta": 0.01}, {"use_liger_kernel": True},
    {"cast_lm_head_to_fp32": True}, {"off_policy_mask_threshold": 0.5}, {"use_bias_correction_kl": True, "beta": 0.02},
    {"generation_kwargs": {"seed": 3}}, {"generation_kwargs": {"min_tokens": 2}},
    {"generation_kwargs": {"stop": ["e"]}},
    {"vllm_structured_outputs_regex": "[a-z ]+"}, {"model_init_kwargs": {"dtype": "bfloat16"}}, {"full_determinism": True},
    {"shuffle_dataset": False}, {"pad_to_multiple_of": 8}, {"torch_empty_cache_steps": 1}, {"neftune_noise_alpha": 5.0},
    {"rloo": True}, {"lora": {"r": 4, "target_modules": "all-linear"}}, {"tools": True}, {"loaded": True},
)  # fmt: skip
#: of a batch: samples of a process, samples of a prompt, tokens of a completion
_SHAPES: tuple[dict[str, Any], ...] = (
    {"per_device_train_batch_size": 8, "num_generations": 4}, {"per_device_train_batch_size": 6, "num_generations": 2},
    {"per_device_train_batch_size": 5, "num_generations": 5, "max_completion_length": 7},
    {"per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": 1},
    {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 33},
)  # fmt: skip
#: the words example's model, or a tiny one of a family
_MODELS: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"family": "llama"}, {"family": "qwen2"}, {"family": "qwen3_moe"}, {"family": "deepseek_v3"},
    {"family": "granite"}, {"family": "qwen3_next"},
)  # fmt: skip
#: options of the script that are arguments of the trainer
SCRIPTS_OWN = frozenset({"rloo", "lora", "tools", "loaded", "family"})


@dataclass(frozen=True)
class Combination:
    """What a seed stands for: the plugin's settings, and what ``tests/trl/script.py`` takes."""

    seed: int
    plugin: dict[str, Any]
    given: dict[str, Any]

    @property
    def key(self) -> str:
        """What its verdict depends on."""
        return json.dumps([self.plugin, self.given])


def combination(seed: int) -> Combination:
    draw = random.Random(seed)
    plugin = draw.choice(_PLUGIN) | draw.choice(_WITH) if draw.random() < 0.8 else _changed(settings_of(draw))
    given = {**draw.choice(_SHAPES), **draw.choice(_MODELS)}
    for options in draw.sample(_OPTIONS, draw.randint(0, 4)):
        given |= options
    return Combination(seed, plugin, given)


def _changed(config: Config) -> dict[str, Any]:
    """The settings that differ from their defaults."""
    every = dataclasses.asdict(config)
    return {name: value for name, value in every.items() if name in SETTINGS and value != SETTINGS[name].default}
