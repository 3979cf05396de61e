"""Convert the trainer's model after loading, before verl wraps it for LoRA, QAT or FSDP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.adapters.verl import fused, precision, routes, seeing, ulysses
from jetrl_patch.adapters.verl.gather import mark_layers
from jetrl_patch.adapters.verl.state import WORKER
from jetrl_patch.config import Config
from jetrl_patch.gate import while_active
from jetrl_patch.sync.source import Source, convert


@dataclass(kw_only=True)
class Prepared(Source):
    """An engine's model as it was before sharding, and the vocabulary of verl's rollout.

    Attributes:
        vocabulary: number of tokens in the tokenizer; verl's rollout samples no token beyond them.
        banned: tokens of the tokenizer that verl's rollout never samples.
        adapters: name of each LoRA layer in peft's model -> scaling; None without LoRA, or where verl serves adapters.
    """

    vocabulary: int | None = None
    banned: list[int] = field(default_factory=list)
    adapters: dict[str, float] | None = None


@while_active
def build_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPEngine._build_module``. Critics (value models) are not converted."""

    def _build_module(self: Any) -> Any:
        module = original(self)
        if self.model_config.model_type == "language_model":
            precision.check_model(module)
            routes.attach(self, module)
            self._jetrl = prepare(module, runtime.active_config(), self)
            fused.attach(self, module, self._jetrl)
            mark_layers(self, module, self._jetrl.layers, runtime.active_config())
            if self.engine_config.forward_only:
                WORKER.followers.add(self._jetrl)
        if runtime.active_config().exact:
            ulysses.share(module, self)
        return module

    return _build_module


def prepare(module: Any, config: Config, engine: Any) -> Prepared:
    """Convert the loaded model of verl's ``engine`` in place and return what the weight sync needs to know about it."""
    from verl.utils.device import get_device_name
    from verl.utils.model import convert_weight_keys

    if config.quantized_rollout:
        seeing.check_worker(module.config, engine)  # the driver has checked a local folder
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
