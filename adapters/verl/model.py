"""Convert the trainer's model after loading, before verl wraps it, and tell its layers when their weights change."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.verl import logprob, precision, routes, ulysses, vision
from jetrl_patch.adapters.verl.lora import mark_layers
from jetrl_patch.adapters.verl.state import WORKER, Prepared
from jetrl_patch.config import Config
from jetrl_patch.fp8.scaling import RECORD, take_over
from jetrl_patch.trainer.source import convert

__all__ = ["compare_scales", "recorded_in"]


# ---- Compare the ``invariant_scale`` of a checkpoint with that of the model before a run resumes -

def compare_scales(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPEngine.load_checkpoint``; verl writes the model's config.json beside its shards.

    Does not cover a checkpoint that verl fetches from HDFS during the load.
    """

    def load_checkpoint(self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "_jetrl", None) is not None:
            found, recorded = recorded_in(local_path)
            if found:
                take_over(self.module.config, recorded, str(local_path))
        return original(self, local_path, *args, **kwargs)

    return load_checkpoint


def recorded_in(local_path: Any) -> tuple[bool, float | None]:
    """Return whether the checkpoint has a config.json, and the factor recorded there."""
    file = os.path.join(str(local_path or ""), "huggingface", "config.json")
    if not os.path.isfile(file):
        return False, None
    with open(file) as text:
        return True, json.load(text).get(RECORD)


# ---- Convert the trainer's model after loading, before verl wraps it for LoRA, QAT or FSDP -------

def build_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPEngine._build_module``. Critics (value models) are not converted."""

    def _build_module(self: Any) -> Any:
        module = original(self)
        if self.model_config.model_type == "language_model":
            precision.check_model(module)
            routes.attach(self, module)
            self._jetrl = prepare(module, session.active_config(), self)
            logprob.attach(self, module, self._jetrl)
            mark_layers(self, module, self._jetrl.layers, session.active_config())
            if self.engine_config.forward_only:
                WORKER.followers.add(self._jetrl)
        if session.active_config().exact:
            ulysses.share(module, self)
        return module

    return _build_module


def prepare(module: Any, config: Config, engine: Any) -> Prepared:
    """Convert the loaded model of verl's ``engine`` in place and return what the weight sync needs to know about it."""
    from verl.utils.device import get_device_name
    from verl.utils.model import convert_weight_keys

    if config.quantized_rollout:
        vision.check_worker(module.config, engine)  # the driver has checked a local folder
    sent = convert_weight_keys(module.state_dict(), module)
    shapes = {name: tuple(tensor.shape) for name, tensor in sent.items()}
    sizes: dict[str, Any] = {"rollout_tp": WORKER.rollout_tp, "rollout_ep": WORKER.rollout_ep}
    only = bool(engine.engine_config.forward_only)
    source = convert(module, config, shapes, reference=only, device_type=get_device_name(), **sizes)
    return Prepared(**vars(source), vocabulary=_vocabulary(engine.model_config), banned=_banned(engine.model_config))


def _vocabulary(model_config: Any) -> int | None:
    tokenizer = getattr(model_config, "tokenizer", None)
    return None if tokenizer is None else len(tokenizer)


def _banned(model_config: Any) -> list[int]:
    """Return the tokens that verl's rollout never samples: vision placeholders."""
    from verl.workers.rollout.utils import get_vision_placeholder_token_ids

    return list(get_vision_placeholder_token_ids(getattr(model_config, "processor", None)))


# ---- Tell the FP8 layers of verl's FSDP engines that their weights stay as they are from one optimizer step to the next

def forward_backward_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPEngine.forward_backward_batch``, in which all micro-batches of an update pass and no weight is written.

    Ranks that share the weights free them after each layer: to hold the bytes of all layers would take what that saves. They
    quantize what they gather, or set ``fp8_all_gather``. With ``reshard_after_forward=False`` they hold whole BF16 weights, 2
    bytes each, until the backward pass, and the bytes are 2 more.
    """

    def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        from jetrl_patch.fp8.unchanged import unchanged_weights

        whole = self.device_mesh.size(-1) == 1 or not self.engine_config.reshard_after_forward
        with unchanged_weights(self.module, gradients=not forward_only) if whole else contextlib.nullcontext():
            return original(self, data, loss_function, forward_only)

    return forward_backward_batch
