"""Check a model's config.json before anything starts, without its weights. Importing this imports no torch."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Generator, Iterator
from typing import Any

from jetrl_patch.config import Config
from jetrl_patch.errors import UNQUANTIZED, JetrlError, ModelError, explain
from jetrl_patch.models.hub import local_folder
from jetrl_patch.models.structure import (
    UNQUANTIZED_WEIGHTS,
    check_code,
    check_structure,
    expert_sizes,
    is_vision_language,
)
from jetrl_patch.trainer.rules import raised

logger = logging.getLogger(__name__)


def checkpoint_problems(
    path: Any, config: Config, rollout_tp: int, rollout_ep: int = 1, *, trust_remote_code: bool = False
) -> Generator[JetrlError, None, Any]:
    """Yield all errors that ``check_checkpoint`` would raise, one by one. Without errors, return what it returns."""
    try:
        hf_config = read_config(path, config, trust_remote_code)
    except JetrlError as error:
        yield error
        return None
    found = [] if hf_config is None else list(model_problems(hf_config, config, rollout_tp, rollout_ep))
    yield from found
    return None if found else hf_config


def check_checkpoint(path: Any, config: Config, rollout_tp: int, rollout_ep: int = 1, *, trust_remote_code: bool = False) -> Any:
    """Check a model's folder and return its config, or None if it was not checked (see ``read_config``).

    Raises as ``read_config``, and the first of ``model_problems``.
    """
    hf_config = read_config(path, config, trust_remote_code)
    for problem in () if hf_config is None else model_problems(hf_config, config, rollout_tp, rollout_ep):
        raise problem
    return hf_config


def read_config(path: Any, config: Config, trust_remote_code: bool = False) -> Any:
    """Read the config of a local folder, or of one in the hub's cache. The folder's own code never runs.

    Returns None if nothing is quantized, or if the path is remote (the workers check the model once they have it).

    Raises ModelError if transformers cannot read the folder, or if the trainer would run the folder's own code.
    """
    folder = local_folder(path) if config.quantized_rollout else ""
    return _read(folder, trust_remote_code) if folder else None


def needed_ep(path: Any, config: Config, rollout_tp: int, *, trust_remote_code: bool = False) -> int:
    """The expert parallel size that keeps experts whole if ``rollout_tp`` ranks would cut a block of them; else 1.

    Also 1 for a remote model, and for one that ``check_checkpoint`` rejects.
    """
    from jetrl_patch.fp8.mixture import ExpertSplit

    if rollout_tp == 1 or not config.fp8_rollout or config.channelwise:
        return 1
    try:
        hf_config = read_config(path, config, trust_remote_code)
    except JetrlError:
        return 1
    sizes = None if hf_config is None else expert_sizes(hf_config)
    whole = sizes is not None and ExpertSplit.chosen(rollout_tp, *sizes).by == "experts"
    return rollout_tp if whole else 1


def cut_note(path: Any, config: Config, rollout_tp: int, rollout_ep: int = 1) -> list[str]:
    """A line with the layers that ``on_cut="bf16"`` keeps in BF16; nothing if there are none or the model is remote."""
    if config.on_cut == "refuse" or rollout_tp == 1:
        return []
    from jetrl_patch.models.layers import cut_words

    _, _, cut = _split(path, config, rollout_tp, rollout_ep) or (None, [], [])
    return [f"on_cut={config.on_cut!r}: {cut_words(cut, rollout_tp, config.scales)}"] if cut else []


@functools.cache
def say_share(path: Any, config: Config, rollout_tp: int, rollout_ep: int = 1) -> None:
    """Log, once per process, how much of a local model is FP8."""
    from jetrl_patch.fp8.convert import share_of

    split = _split(path, config, rollout_tp, rollout_ep) if config.fp8_rollout else None
    if split is not None:
        model, quantized, _ = split
        logger.info("jetrl_patch: %s", share_of(model, quantized))


def built(path: Any, config: Config, rollout_tp: int, rollout_ep: int = 1) -> tuple[Any, list[str], list[str]] | None:
    """The model on the meta device, its quantized layers, and those that ``on_cut`` leaves in BF16. None if the model is remote.

    Raises ModelError as ``read_config`` and ``split_layers`` do.
    """
    from jetrl_patch.fp8.convert import split_layers

    folder = local_folder(path)
    if not folder:
        return None
    model = _on_meta(_read(folder, trust_remote_code=True))
    return (model, *split_layers(model, config, rollout_tp, rollout_ep)) if config.quantized_rollout else (model, [], [])


def _split(path: Any, config: Config, rollout_tp: int, rollout_ep: int) -> tuple[Any, list[str], list[str]] | None:
    """``built``, or None if ``check_checkpoint`` rejects the model."""
    try:
        return built(path, config, rollout_tp, rollout_ep) if config.quantized_rollout else None
    except JetrlError:
        return None


def _on_meta(hf_config: Any) -> Any:
    import torch

    try:
        with torch.device("meta"):
            return auto_class(hf_config).from_config(hf_config)
    except Exception as error:  # a value that transformers does not know, such as another rope type, is a KeyError
        required = "a causal language model that transformers can build"
        raise _unreadable(f"model_type={hf_config.model_type!r}", required, error) from error


def auto_class(hf_config: Any) -> Any:
    """The class of transformers that loads a whole model, with its vision tower if it has one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if is_vision_language(hf_config) else AutoModelForCausalLM


def _read(folder: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        if trust_remote_code:
            with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
                check_code(json.load(file), folder)
        found = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        _check_sidecar(os.path.join(folder, _SIDECAR))
        return found
    except JetrlError:
        raise
    except Exception as error:  # each library below transformers raises its own
        raise _unreadable(f"config.json in {folder}", "a configuration that transformers knows", error) from error


#: where ModelOpt says how it quantized a checkpoint; vLLM reads it, transformers does not
_SIDECAR = "hf_quant_config.json"


def _check_sidecar(path: str) -> None:
    """Raise ModelError for a checkpoint that ModelOpt has quantized."""
    if not os.path.isfile(path):
        return
    with open(path, encoding="utf-8") as file:
        said = json.load(file).get("quantization") or {}
    found = ", ".join(f"{key}={value!r}" for key, value in said.items() if key.endswith("quant_algo")) or "a quantization"
    raise ModelError(explain(path, required=UNQUANTIZED_WEIGHTS, found=found, fix=f"use a BF16 checkpoint, or use {UNQUANTIZED}"))


def model_problems(hf_config: Any, config: Config, rollout_tp: int, rollout_ep: int = 1) -> Iterator[JetrlError]:
    """Check structure, family, quantized layers and norms of a model, and the rollout's tensor and expert parallelism.

    Args:
        hf_config: the Hugging Face config; the model is built on the meta device.

    Yields:
        ModelError: the structure is not supported; exact mode, smoothing or ``invariant_scale`` does not cover the family;
            there is nothing to quantize; a split cuts a block or is uneven; vLLM would not know which model to build.
        ConfigError: the checkpoint was scaled by another ``invariant_scale``; a guard with tensor parallelism.
    """
    from jetrl_patch.fp8.convert import split_layers
    from jetrl_patch.fp8.scaling import check_record, groups_of
    from jetrl_patch.measure.monitor import check_guard

    structure = list(raised(lambda: check_structure(hf_config, config)))
    yield from structure
    yield from raised(lambda: check_guard(config, rollout_tp))
    if structure:  # exact mode would refuse the same again, and the other checks would not find the layers that they look for
        return
    if config.exact:
        from jetrl_patch.exact.latent import check_latent
        from jetrl_patch.exact.modules import check_family

        yield from raised(lambda: check_family(hf_config))
        yield from raised(lambda: check_latent(hf_config, config.kv_cache))
    yield from raised(lambda: split_layers(_on_meta(hf_config), config, rollout_tp, rollout_ep))
    scalings = {"smoothing": config.resolved_smoothing, "invariant_scale": config.invariant_scale}
    for name, value in scalings.items():
        if value:
            yield from raised(lambda: groups_of((), hf_config.model_type, f"{name}={value:g}"))  # noqa: B023
    scale = config.invariant_scale
    if scale is not None:
        yield from raised(lambda: check_record(hf_config, scale))
    if not hf_config.architectures:
        required, fix = "the name of its class in config.json (vLLM builds the model by it)", "add it to config.json"
        yield ModelError(explain("architectures", required=required, found=str(hf_config.architectures), fix=fix))


def _unreadable(what: str, required: str, error: Exception) -> ModelError:
    """An error of transformers, which may fill a page, in one line."""
    words = " ".join(str(error).split())
    found = f"{type(error).__name__}: {words if len(words) < 120 else words[:117] + '...'}"
    return ModelError(explain(what, required=required, found=found, fix=f"check the folder, or use {UNQUANTIZED}"))
