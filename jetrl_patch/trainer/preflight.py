"""Checks on a model's config.json before anything starts, without its weights. Importing this imports no torch."""

from __future__ import annotations

import os
from typing import Any

from jetrl_patch.config import Config

__all__ = ["check_checkpoint", "check_model", "cut_note"]


def check_checkpoint(path: Any, config: Config, rollout_tp: int, trust_remote_code: bool = False) -> Any:
    """Run ``check_model`` on a local folder and return its config.

    Returns None, unchecked, if nothing is quantized, if the path is remote (workers check once they have it), or if the
    checkpoint brings its own code, which is not run here.
    """
    folder = os.path.expanduser(str(path or ""))
    if not config.quantized_rollout or not os.path.isdir(folder) or trust_remote_code:
        return None
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(folder)
    check_model(hf_config, config, rollout_tp)
    return hf_config


def cut_note(path: Any, config: Config, rollout_tp: int) -> list[str]:
    """Return the line that names the layers which ``on_cut="bf16"`` leaves in BF16, if the model is a local folder."""
    folder = os.path.expanduser(str(path or ""))
    if config.on_cut == "refuse" or not config.quantized_rollout or rollout_tp == 1 or not os.path.isdir(folder):
        return []
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from jetrl_patch.fp8.convert import split_layers
    from jetrl_patch.fp8.layers import cut_words

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    cut = split_layers(model, config, rollout_tp)[1]
    return [f"on_cut={config.on_cut!r}: {cut_words(cut, rollout_tp)}"] if cut else []


def check_model(hf_config: Any, config: Config, rollout_tp: int) -> None:
    """Check the model's family, its quantized layers, its norms, and the rollout's tensor parallelism.

    Args:
        hf_config: the Hugging Face config; the model is built on the meta device.

    Raises:
        ModelError: exact mode, smoothing or ``invariant_scale`` does not cover the family; there is nothing to quantize;
            a split cuts a block.
        ConfigError: the checkpoint was scaled by another ``invariant_scale``; a guard with tensor parallelism.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from jetrl_patch.fp8.convert import split_layers
    from jetrl_patch.monitor.guard import check_guard
    from jetrl_patch.scaling.groups import groups_of
    from jetrl_patch.scaling.invariant import check_record

    check_guard(config, rollout_tp)
    if config.exact:
        from jetrl_patch.exact.coverage import check_family

        check_family(hf_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    split_layers(model, config, rollout_tp)
    if config.resolved_smoothing:
        groups_of((), hf_config.model_type, f"smoothing={config.resolved_smoothing:g}")
    if config.invariant_scale is not None:
        groups_of((), hf_config.model_type, f"invariant_scale={config.invariant_scale:g}")
        check_record(hf_config, config.invariant_scale)
