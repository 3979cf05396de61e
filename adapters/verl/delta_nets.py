"""Gated delta nets in verl: a token's output depends on a state that the tokens before it have left.

So a packed row needs its boundaries, or a sequence begins with the state of the one before it, and no error says so. verl passes
them to its own forward of models that see, which splits a row for a delta rule that does not know them. To find out it asks
whether the rule takes an argument of that name; transformers' own rule, which stands in where flash-linear-attention is not
installed, takes any name, and drops it. Models of text with delta nets get no boundaries from verl at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

from jetrl_patch.adapters.verl.paths import MODEL, named
from jetrl_patch.errors import JetrlError, ModelError, explain
from jetrl_patch.gate import while_active
from jetrl_patch.structure import has_delta_nets, sees
from jetrl_patch.trainer.rules import raised

__all__ = ["accepts", "check_packing", "problems"]

_REMOVE = f"{MODEL}.use_remove_padding"


def problems(select: Callable[[str], Any], hf_config: Any) -> Iterator[JetrlError]:
    """Yield an error for packed rows whose boundaries the model would not see."""
    yield from raised(lambda: check_packing(hf_config, bool(select(_REMOVE)), named(_REMOVE)))


def check_packing(hf_config: Any, packed: bool, what: str = "use_remove_padding") -> None:
    """Raise ModelError for a model with delta nets to which verl passes no boundaries, if its rows are packed."""
    if packed and has_delta_nets(hf_config) and not sees(hf_config):
        required = "one sequence in a row (in a packed one each delta net would begin with the state of the sequence before)"
        found = f"True, with model_type={hf_config.model_type!r}"
        raise ModelError(explain(what, required=required, found=found, fix="set it to false"))


@while_active
def accepts(original: Callable[..., bool]) -> Callable[..., bool]:
    """Replace ``_call_accepts_kwarg``: whether a function names this parameter. One that it would only swallow has no effect."""

    def _call_accepts_kwarg(fn: Any, name: str) -> bool:
        return name in signature(fn).parameters

    return _call_accepts_kwarg
