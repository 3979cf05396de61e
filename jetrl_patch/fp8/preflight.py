"""What a model's config.json tells before anything starts and without its weights."""

from __future__ import annotations

from typing import Any

import torch

from jetrl_patch.config import Config
from jetrl_patch.fp8.convert import select_layers
from jetrl_patch.fp8.layers import check_splits

__all__ = ["check_model"]


def check_model(hf_config: Any, config: Config, rollout_tp: int) -> None:
    """The model's family, its FP8 layers, and the rollout's tensor parallelism.

    Args:
        hf_config: Hugging Face's; the model is built on the meta device.

    Raises:
        ModelError: an unsupported family in exact mode, nothing to quantize, or a split that cuts a block.
    """
    from transformers import AutoModelForCausalLM

    if config.exact:
        from jetrl_patch.exact.families import check_family

        check_family(hf_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    modules = dict(model.named_modules())
    check_splits(((name, modules[name].in_features) for name in select_layers(model, config.exclude)), rollout_tp)
