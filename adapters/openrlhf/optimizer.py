"""The optimizer's states in OpenRLHF: DeepSpeed takes an optimizer of the client's, OpenRLHF hands it a name.

ZeRO flattens parameters before the optimizer sees them and keeps no state itself, so stages 1 to 3 work: a state is made
of the flat part that a rank owns. Stage 0 trains, and then cannot load its own checkpoint.
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

_STATES = "AdamW, whose states are kept as optimizer_states says"

#: what OpenRLHF says of AdamW; all else ("torch_adam") is about which of DeepSpeed's classes to take
_OPTIONS = ("lr", "betas", "eps", "weight_decay")

#: what cannot stand beside ``optimizer_states`` of 8 bits
RULES: tuple[Rule, ...] = (
    Rule("actor.optim", other_than("adam"), _STATES, "use adam, or leave optimizer_states at 'fp32'", "all"),
    Rule("critic.optim", other_than("adam"), _STATES, "use adam, or leave optimizer_states at 'fp32'", "all"),
    Rule("ds.zero_stage", other_than(1, 2, 3), "1, 2 or 3 (DeepSpeed cannot load such states at 0)", "use 2", "all"),
    Rule("ds.adam_offload", is_set, "states on the device (they are small)", "leave it out", "all"),
    Rule("ds.use_universal_ckpt", is_set, "DeepSpeed's own checkpoints", "leave it out", "all"),
)


@while_active
def initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``deepspeed.initialize``: the AdamW that the configuration names is made by us, from the same numbers.

    Not touched: engines without an optimizer (reference model), and those that bring their own.
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
    """DeepSpeed calls it with the parameters once it has grouped them."""

    def make(parameters: Any) -> Any:
        import importlib

        return getattr(importlib.import_module(MODULE), CLASSES[states])(parameters, **options)

    return make
