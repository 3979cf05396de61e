"""FP8 layers of a running trainer that become BF16 layers, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact import modules
from jetrl_patch.fp8.gather import Fp8Gathered, Fp8Shard
from jetrl_patch.fp8.linear import Fp8Linear


def to_bf16(layers: Mapping[str, Any], exact: bool) -> None:
    """Make these layers what ``exclude`` would have made them: all of them, or none and an error.

    Parameters stay what they are, so that FSDP, ZeRO and the optimizer notice nothing. What the layer knew about FP8
    stays on it: a fused activation before it may go on asking.

    Args:
        layers: ``Fp8Linear`` by name.
        exact: whether they get the row-invariant product of exact mode, with their ranges of K, or ``nn.Linear``'s.

    Raises:
        ModelError: one of them is another kind of layer, or its weight is gathered in FP8 and has no BF16 value.
    """
    for name, layer in layers.items():
        _check(name, layer)
    for layer in layers.values():
        splits = layer.fp8.splits
        layer.__class__ = nn.Linear
        if exact:
            modules.swap(layer, modules.ExactLinear)
            layer.jetrl_splits = splits


def _check(name: str, layer: Any) -> None:
    if type(layer) is not Fp8Linear:
        raise ModelError(f"{name} is a {type(layer).__name__}, and only an Fp8Linear can be taken out of FP8")
    weight = getattr(layer.weight, "_local_tensor", layer.weight)
    if isinstance(weight, (Fp8Shard, Fp8Gathered)):
        raise ModelError(
            explain(
                f"taking {name} out of FP8",
                required="a weight that FSDP2 gathers in BF16",
                found="one that it gathers as FP8 bytes",
                fix="gather in BF16 where guard_sqnr is set",
            )
        )
