"""A run that is resumed: its checkpoint must be scaled (``invariant_scale``) as the model that it is loaded into.

DeepSpeed's checkpoints hold no configuration, so the factor goes with the states that OpenRLHF saves beside the weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jetrl_patch.gate import while_active
from jetrl_patch.scaling.invariant import RECORD, take_over

__all__ = ["load_ckpt", "save_ckpt"]


@while_active
def save_ckpt(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``DeepspeedStrategy.save_ckpt``."""
    signature = inspect.signature(original)

    def save_ckpt(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        recorded = _recorded(bound.arguments["model"])
        if recorded is not None:
            states = bound.arguments.get("client_state") or {}
            bound.arguments["client_state"] = {**states, RECORD: recorded}
        return original(*bound.args, **bound.kwargs)

    return save_ckpt


@while_active
def load_ckpt(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``DeepspeedStrategy.load_ckpt``; critics are never scaled and carry no record."""

    def load_ckpt(self: Any, model: Any, load_dir: Any, *args: Any, **kwargs: Any) -> Any:
        path, states = original(self, model, load_dir, *args, **kwargs)
        if path is not None:
            config = getattr(model.module, "config", None)
            if config is not None:
                take_over(config, states.pop(RECORD, None), str(load_dir))
        return path, states

    return load_ckpt


def _recorded(model: Any) -> Any:
    return getattr(getattr(model.module, "config", None), RECORD, None)
