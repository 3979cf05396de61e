"""Compare the ``invariant_scale`` of a checkpoint with that of the model before a run resumes.

DeepSpeed's checkpoints hold no configuration, so the factor is stored in the client state that OpenRLHF saves with them.
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
    """Wrap ``DeepspeedStrategy.save_ckpt``: record the model's factor."""
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
    """Wrap ``DeepspeedStrategy.load_ckpt``: compare the factors. Critics are never scaled and have no record."""

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
