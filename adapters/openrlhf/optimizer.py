"""Optimizer states in OpenRLHF: pass DeepSpeed an optimizer where OpenRLHF passes it a name.

ZeRO flattens parameters before the optimizer sees them and keeps no state itself. Stages 1 to 3 therefore work: the
optimizer keeps states of the flat partition that a rank owns. Stage 0 trains, but cannot load its own checkpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.gate import while_active
from jetrl_patch.optim.settings import CLASSES, MODULE
from jetrl_patch.trainer.rules import Rule, is_set, other_than

__all__ = ["RULES", "initialize"]

_STATES = "adam, whose states optimizer_states selects"

#: OpenRLHF's AdamW options; the others ("torch_adam") select one of DeepSpeed's classes
_OPTIONS = ("lr", "betas", "eps", "weight_decay")

#: arguments that ``optimizer_states`` other than 'fp32' exclude
RULES: tuple[Rule, ...] = (
    Rule("actor.optim", other_than("adam"), _STATES, "set it to adam, or leave optimizer_states at 'fp32'", "all"),
    Rule("critic.optim", other_than("adam"), _STATES, "set it to adam, or leave optimizer_states at 'fp32'", "all"),
    Rule("ds.zero_stage", other_than(1, 2, 3), "1, 2 or 3 (at 0 DeepSpeed cannot load these states)", "set it to 2", "all"),
    Rule("ds.adam_offload", is_set, "optimizer states on the device", "remove the flag", "all"),
    Rule("ds.use_universal_ckpt", is_set, "DeepSpeed's own checkpoint format", "remove the flag", "all"),
)


@while_active
def initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``deepspeed.initialize``: replace the AdamW in the configuration by the plugin's, with the same options.

    Engines without an optimizer (reference model) and those with their own stay unchanged.
    """
    signature = inspect.signature(original)

    def initialize(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        config = bound.arguments.get("config")
        named = config.get("optimizer") if isinstance(config, dict) else None
        given = bound.arguments.get("optimizer")
        states = runtime.active_config().optimizer_states
        wanted = states != "fp32" and named and named.get("type") == "AdamW" and given is None
        if not wanted or named is None or config is None:
            return original(*args, **kwargs)
        options = {name: value for name, value in named["params"].items() if name in _OPTIONS}
        bound.arguments["optimizer"] = _maker(states, options)
        rest = {name: value for name, value in config.items() if name != "optimizer"}
        bound.arguments["config"] = rest | {"zero_allow_untested_optimizer": True}
        return original(*bound.args, **bound.kwargs)

    return initialize


def _maker(states: str, options: dict[str, Any]) -> Callable[[Any], Any]:
    """Return a factory that DeepSpeed calls with the grouped parameters."""

    def make(parameters: Any) -> Any:
        import importlib

        return getattr(importlib.import_module(MODULE), CLASSES[states])(parameters, **options)

    return make
