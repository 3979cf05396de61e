"""The model of a training worker: convert it before verl's FSDP or VeOmni engine shards it."""

from __future__ import annotations

import contextlib
import json
import os
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jetrl_patch import session
from jetrl_patch.adapters.verl import logprob, routes, ulysses, veomni, vision
from jetrl_patch.adapters.verl.lora import mark_layers
from jetrl_patch.adapters.verl.state import RECORD, WORKER, Prepared
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.fp8 import scaling
from jetrl_patch.patching.patch import replacement
from jetrl_patch.sync.send import check_fits
from jetrl_patch.trainer.precision import scales_loss
from jetrl_patch.trainer.source import convert

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.fp8.experts import Experts


# ---- FSDP1 and FSDP2: convert after loading, before verl wraps the model for LoRA, QAT or FSDP ----

@replacement
def build_module(original: Any, self: Any) -> Any:
    """Wrap ``FSDPEngine._build_module``. Critics (value models) are not converted."""
    module, config = original(self), session.active_config()
    if self.model_config.model_type == "language_model":
        if scales_loss():  # meta tensors are checked on the rank that has loaded them
            check_fits(module.named_parameters(), f"the checkpoint of {type(module).__name__}")
        recorder, replay = routes.observers(self, module)
        prepared = prepare(module, config, self)
        prepared.recorder, prepared.replay = recorder, replay
        RECORD.set(self, prepared)
        logprob.attach(self, module, prepared)
        mark_layers(self, module, prepared.layers, config)
        if self.engine_config.forward_only:
            WORKER.followers.add(prepared)
    if config.exact:
        ulysses.share(module, self)
    return module


def prepare(module: Any, config: Config, engine: Any) -> Prepared:
    """Convert the loaded model of verl's ``engine`` in place, and return what the weight sync needs to know about it."""
    from verl.utils.device import get_device_name
    from verl.utils.model import convert_weight_keys
    from verl.workers.rollout.utils import get_vision_placeholder_token_ids

    if config.quantized_rollout:
        vision.check_worker(module.config, engine, config.exact)  # for a model whose folder the driver could not read
    sent = convert_weight_keys(module.state_dict(), module)
    shapes = {name: tuple(tensor.shape) for name, tensor in sent.items()}
    sizes: dict[str, Any] = {"rollout_tp": WORKER.rollout_tp, "rollout_ep": WORKER.rollout_ep}
    reference = bool(engine.engine_config.forward_only)
    source = convert(module, config, shapes, reference=reference, device_type=get_device_name(), **sizes)
    tokenizer, processor = (getattr(engine.model_config, name, None) for name in ("tokenizer", "processor"))
    vocabulary = None if tokenizer is None else len(tokenizer)
    return Prepared(**vars(source), vocabulary=vocabulary, banned=list(get_vision_placeholder_token_ids(processor)))


#: why an engine's ``forward_backward_batch`` is patched, and until when
QUANTIZED_AGAIN = "a GPU has no cheap way to see that a weight is unchanged: every forward and backward would quantize it again"
FIRST_PASS = "verl's forward_backward_batch passes the layers a flag like TransformerEngine's is_first_microbatch"


@replacement
def forward_backward_batch(original: Any, self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
    """Wrap ``FSDPEngine.forward_backward_batch``, which runs the micro-batches of an update: FP8 layers quantize a weight once.

    This does not apply to ranks that free gathered weights after each layer: keeping the bytes of all layers would use the memory
    that freeing saves. Such ranks quantize what they gather, or set ``fp8_all_gather``. With ``reshard_after_forward=False``
    ranks hold whole BF16 weights (2 bytes each) until the backward pass; the FP8 bytes add 2 more.
    """
    from jetrl_patch.fp8.unchanged import unchanged_weights

    if RECORD.get(self) is None:  # a model that the plugin did not convert, such as a critic's
        return original(self, data, loss_function, forward_only)
    whole = self.device_mesh.size(-1) == 1 or not self.engine_config.reshard_after_forward
    with unchanged_weights(self.module, gradients=not forward_only) if whole else contextlib.nullcontext():
        return original(self, data, loss_function, forward_only)


@replacement
def compare_scales(original: Any, self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``FSDPEngine.load_checkpoint``: compare ``invariant_scale`` with the config.json next to its shards.

    Does not cover a checkpoint that verl fetches from HDFS during the load.
    """
    file = os.path.join(str(local_path or ""), "huggingface", "config.json")
    if RECORD.get(self) is not None and os.path.isfile(file):
        with open(file) as text:
            recorded = json.load(text).get(scaling.RECORD)
        scaling.take_over(self.module.config, recorded, str(local_path))
    return original(self, local_path, *args, **kwargs)


# ---- VeOmni: convert before the model is sharded, and check what verl's engine does not ----
# ``VeOmniEngine._build_model_optimizer`` → ``build_parallelize_model`` (the model has no memory yet; VeOmni shards it, then loads
# the checkpoint) → ``get_per_tensor_param`` (whole tensors under Hugging Face names) → the same sync as with FSDP.

#: the engine whose model is being built in this thread: verl does not pass it to ``build_parallelize_model``
_building: ContextVar[Any] = ContextVar("jetrl_veomni_engine", default=None)
#: verl's tables of placeholder tokens: key of the Hugging Face config -> key of the table
_PLACES = {"image_token_id": "IMAGE_INPUT_INDEX", "video_token_id": "VIDEO_INPUT_INDEX"}


@replacement
def build_model_optimizer(original: Any, self: Any) -> Any:
    """Wrap ``VeOmniEngine._build_model_optimizer``: note whose model ``build_parallelize_model`` gets."""
    token = _building.set(self)
    try:
        return original(self)
    finally:
        _building.reset(token)


@replacement
def build_parallelize_model(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap VeOmni's ``build_parallelize_model`` in verl's engine. Critics (value models) are not converted.

    Raises ModelError if the family is not covered, the model is not of VeOmni's own class, or verl would not find its images.
    """
    engine, config = _building.get(), session.active_config()
    if engine is not None and engine.model_config.model_type == "language_model":
        if config.quantized_rollout:
            veomni.check_model(module.config)
            _check_modelling(module)
            _check_places(module.config)
        prepared = prepare(module, config, engine)
        RECORD.set(engine, prepared)
        if config.fp8_train:
            _use_fp8_experts(prepared.experts)
        if engine.engine_config.forward_only:
            WORKER.followers.add(prepared)
    return original(module, *args, **kwargs)


class Fp8Experts:
    """Experts that compute in FP8 instead of with VeOmni's kernels, which transformers' registry of kernels does not reach."""

    jetrl_experts: Experts
    gate_up_proj: Tensor
    down_proj: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens [T, H], experts and weights [T, k] -> BF16 [T, H]."""
        from jetrl_patch.fp8.experts import experts_forward

        weights = (self.gate_up_proj, self.down_proj)
        return experts_forward(hidden_states, *weights, top_k_weights, top_k_index, self.jetrl_experts)


def _use_fp8_experts(experts: Any) -> None:
    """Swap the class of each module of experts. The plugin recognizes experts by their class's name, so that stays."""
    for module in experts.values():
        own = type(module)
        module.__class__ = type(own.__name__, (Fp8Experts, own), {"__module__": own.__module__})


def _check_modelling(module: Any) -> None:
    kind = type(module)
    if not kind.__module__.startswith("veomni."):
        required, found = "VeOmni's own class", f"{kind.__module__}.{kind.__name__}"
        fix = "unset MODELING_BACKEND, or set strategy=fsdp2"
        raise ModelError(explain("the model of verl's VeOmni engine", required=required, found=found, fix=fix))


def _check_places(hf_config: Any) -> None:
    """Check the placeholder tokens of a vision-language model: verl hard-codes them and would not find others."""
    from verl.workers.engine.veomni.utils import VL_TYPE2INDEX

    table = VL_TYPE2INDEX.get(hf_config.model_type, {})
    wrong = {key: getattr(hf_config, key) for key, name in _PLACES.items() if table and getattr(hf_config, key) != table[name]}
    if wrong:
        required = " and ".join(f"{key}={table[_PLACES[key]]}" for key in wrong)
        found = " and ".join(f"{key}={value}" for key, value in wrong.items())
        what = f"placeholders of model_type={hf_config.model_type!r} in verl's VeOmni engine"
        raise ModelError(explain(what, required=required, found=found, fix="set strategy=fsdp2"))
