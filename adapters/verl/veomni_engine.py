"""VeOmni's model in a training worker: convert it before it is sharded, and check it where verl's engine would be silent.

``VeOmniEngine._build_model_optimizer`` → ``build_parallelize_model`` (here the model has no memory yet; VeOmni shards it and then
loads the checkpoint) → ``get_per_tensor_param`` (whole tensors under Hugging Face's names) → the same sync as with FSDP.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jetrl_patch import session
from jetrl_patch.adapters.verl import model
from jetrl_patch.adapters.verl.state import WORKER
from jetrl_patch.adapters.verl.veomni import check_model
from jetrl_patch.errors import ModelError, explain

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.fp8.experts import Experts

__all__ = ["build_model_optimizer", "build_parallelize_model"]

#: the engine whose model is being built in this thread
_building: ContextVar[Any] = ContextVar("jetrl_veomni_engine", default=None)
#: verl's tables of placeholder tokens: key of the Hugging Face config -> key of the table
_PLACES = {"image_token_id": "IMAGE_INPUT_INDEX", "video_token_id": "VIDEO_INPUT_INDEX"}


def build_model_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``VeOmniEngine._build_model_optimizer``: note whose model ``build_parallelize_model`` gets."""

    def _build_model_optimizer(self: Any) -> Any:
        token = _building.set(self)
        try:
            return original(self)
        finally:
            _building.reset(token)

    return _build_model_optimizer


def build_parallelize_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap VeOmni's ``build_parallelize_model`` in verl's engine. Critics (value models) stay unchanged."""

    def build_parallelize_model(module: Any, *args: Any, **kwargs: Any) -> Any:
        engine = _building.get()
        if engine is not None and engine.model_config.model_type == "language_model":
            prepare(engine, module)
        return original(module, *args, **kwargs)

    return build_parallelize_model


def prepare(engine: Any, module: Any) -> None:
    """Convert the model of an engine in place, and leave on the engine what the weight sync needs to know about it.

    Raises:
        ModelError: the family is not covered, the model is not VeOmni's own, or verl would not see its images.
    """
    config = session.active_config()
    if config.quantized_rollout:
        check_model(module.config)
        _check_modelling(module)
        _check_places(module.config)
    engine._jetrl = model.prepare(module, config, engine)
    if config.fp8_train:
        _use_fp8_experts(engine._jetrl.experts)
    if engine.engine_config.forward_only:
        WORKER.followers.add(engine._jetrl)


class Fp8Experts:
    """Experts that compute as they were prepared, instead of in VeOmni's kernels: its class bypasses transformers' registry."""

    jetrl_experts: Experts
    gate_up_proj: Tensor
    down_proj: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens [T, H], experts and weights [T, k] -> BF16 [T, H]."""
        from jetrl_patch.fp8.experts import experts_forward

        weights = (self.gate_up_proj, self.down_proj)
        return experts_forward(hidden_states, *weights, top_k_weights, top_k_index, self.jetrl_experts)


def _use_fp8_experts(experts: Any) -> None:
    """Swap the class of each module of experts. It keeps its name, by which they are recognized."""
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
    """Check a vision-language model: verl marks its images by numbers in its code, and would not see others."""
    from verl.workers.engine.veomni.utils import VL_TYPE2INDEX

    table = VL_TYPE2INDEX.get(hf_config.model_type, {})
    wrong = {key: getattr(hf_config, key) for key, name in _PLACES.items() if table and getattr(hf_config, key) != table[name]}
    if wrong:
        required = " and ".join(f"{key}={table[_PLACES[key]]}" for key in wrong)
        found = " and ".join(f"{key}={value}" for key, value in wrong.items())
        what = f"placeholders of model_type={hf_config.model_type!r} in verl's VeOmni engine"
        raise ModelError(explain(what, required=required, found=found, fix="set strategy=fsdp2"))
