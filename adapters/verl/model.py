"""The trainer's model: converted after it is loaded, before verl wraps it for LoRA, QAT or FSDP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jetrl_patch import runtime
from jetrl_patch.adapters.verl.state import WORKER
from jetrl_patch.config import Config
from jetrl_patch.sync.manifest import Terms

if TYPE_CHECKING:
    import torch


@dataclass
class Prepared:
    """What is known about an engine's model from before it was sharded.

    Attributes:
        layers: Hugging Face names of the FP8 layers (of the rollout alone, in ``fp8-rollout``).
        modules: the converted layers themselves; sharding keeps the objects.
        shapes: name -> shape of every tensor that a weight sync sends.
        terms: how this side computes.
        vocabulary: how many tokens the tokenizer has; verl's rollout never samples what lies beyond.
    """

    layers: list[str]
    modules: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    terms: Terms
    vocabulary: int | None = None
    banned: list[int] = field(default_factory=list)

    def quantize(self, layer: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes and scales this layer computes with: (q [N, K], scales [ceil(N/128), ceil(K/128)])."""
        own = self.modules[layer].fp8.quantized(weight)
        return own.q, own.s_blocks


def build_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces ``FSDPEngine._build_module``. Critics (value models) stay what they are."""

    def _build_module(self: Any) -> Any:
        module = original(self)
        if runtime.is_active() and self.model_config.model_type == "language_model":
            self._jetrl = prepare(module, runtime.active_config(), self.model_config)
        return module

    return _build_module


def prepare(module: Any, config: Config, model_config: Any) -> Prepared:
    """Convert a loaded model in place and note what the weight sync needs to know about it."""
    from verl.utils.device import get_device_name
    from verl.utils.model import convert_weight_keys

    from jetrl_patch.fp8.backends import choose_backend

    device_type = get_device_name()
    sent = convert_weight_keys(module.state_dict(), module)
    shapes = {name: tuple(tensor.shape) for name, tensor in sent.items()}
    convert = runtime.reach("transformers", "prepare:prepare_model")
    layers: list[str] = convert(module, config, rollout_tp=WORKER.rollout_tp, device_type=device_type)
    runtime.register_layers(layers)
    backend = choose_backend(config.backend, device_type) if config.fp8_train else ""
    if backend:
        runtime.register_backend(backend)
    modules = dict(module.named_modules())
    terms = Terms(
        precision=config.precision, align=config.resolved_align, scale_format=config.scale_format, backend=backend
    )
    return Prepared(
        layers=layers,
        modules={name: modules[name] for name in layers} if config.fp8_train else {},
        shapes=shapes,
        terms=terms,
        vocabulary=_vocabulary(model_config),
        banned=_banned(model_config),
    )


def _vocabulary(model_config: Any) -> int | None:
    tokenizer = getattr(model_config, "tokenizer", None)
    return None if tokenizer is None else len(tokenizer)


def _banned(model_config: Any) -> list[int]:
    """Tokens that verl's rollout never samples: vision placeholders."""
    from verl.workers.rollout.utils import get_vision_placeholder_token_ids

    return list(get_vision_placeholder_token_ids(getattr(model_config, "processor", None)))
