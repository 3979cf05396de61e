"""Checks on a model's config.json before anything starts, without its weights. Importing this imports no torch."""

from __future__ import annotations

import json
import os
from typing import Any

from jetrl_patch.config import Config
from jetrl_patch.errors import UNQUANTIZED, JetrlError, ModelError, explain
from jetrl_patch.structure import check_code, check_structure

__all__ = ["check_checkpoint", "check_model", "cut_note"]


def check_checkpoint(path: Any, config: Config, rollout_tp: int, trust_remote_code: bool = False) -> Any:
    """Run ``check_model`` on a local folder and return its config. The folder's own code is never run.

    Returns None, unchecked, if nothing is quantized, or if the path is remote (workers check once they have it).

    Raises:
        ModelError: as ``check_model``; transformers cannot read the folder; the trainer would run the folder's own code.
    """
    folder = os.path.expanduser(str(path or ""))
    if not config.quantized_rollout or not os.path.isdir(folder):
        return None
    hf_config = _read(folder, trust_remote_code)
    check_model(hf_config, config, rollout_tp)
    return hf_config


def cut_note(path: Any, config: Config, rollout_tp: int) -> list[str]:
    """Return the line that names the layers which ``on_cut="bf16"`` leaves in BF16, if the model is a local folder."""
    folder = os.path.expanduser(str(path or ""))
    if config.on_cut == "refuse" or not config.quantized_rollout or rollout_tp == 1 or not os.path.isdir(folder):
        return []
    from jetrl_patch.fp8.convert import split_layers
    from jetrl_patch.fp8.layers import cut_words

    try:
        cut = split_layers(_on_meta(_read(folder, trust_remote_code=True)), config, rollout_tp)[1]
    except JetrlError:
        return []  # ``check_checkpoint`` reports it
    return [f"on_cut={config.on_cut!r}: {cut_words(cut, rollout_tp)}"] if cut else []


def _on_meta(hf_config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(hf_config)
    except ValueError as error:
        raise _unreadable(f"model_type={hf_config.model_type!r}", "a causal language model", error) from error


def _read(folder: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        if trust_remote_code:
            with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
                check_code(json.load(file), folder)
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except JetrlError:
        raise
    except Exception as error:  # each library below transformers raises its own
        raise _unreadable(f"config.json in {folder}", "a configuration that transformers knows", error) from error


def check_model(hf_config: Any, config: Config, rollout_tp: int) -> None:
    """Check the model's structure, family, quantized layers and norms, and the rollout's tensor parallelism.

    Args:
        hf_config: the Hugging Face config; the model is built on the meta device.

    Raises:
        ModelError: the structure is not handled; exact mode, smoothing or ``invariant_scale`` does not cover the family;
            there is nothing to quantize; a split cuts a block.
        ConfigError: the checkpoint was scaled by another ``invariant_scale``; a guard with tensor parallelism.
    """

    from jetrl_patch.fp8.convert import split_layers
    from jetrl_patch.monitor.guard import check_guard
    from jetrl_patch.scaling.groups import groups_of
    from jetrl_patch.scaling.invariant import check_record

    check_structure(hf_config)
    check_guard(config, rollout_tp)
    if config.exact:
        from jetrl_patch.exact.coverage import check_family

        check_family(hf_config)
    split_layers(_on_meta(hf_config), config, rollout_tp)
    if config.resolved_smoothing:
        groups_of((), hf_config.model_type, f"smoothing={config.resolved_smoothing:g}")
    if config.invariant_scale is not None:
        groups_of((), hf_config.model_type, f"invariant_scale={config.invariant_scale:g}")
        check_record(hf_config, config.invariant_scale)


def _unreadable(what: str, required: str, error: Exception) -> ModelError:
    """One line for an error of transformers, whose own may fill a page."""
    words = " ".join(str(error).split())
    found = f"{type(error).__name__}: {words if len(words) < 120 else words[:117] + '...'}"
    return ModelError(explain(what, required=required, found=found, fix=f"check the folder, or use {UNQUANTIZED}"))
