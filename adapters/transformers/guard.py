"""Move FP8 layers of a running trainer to BF16, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact import modules
from jetrl_patch.fp8.expert_layers import experts_of
from jetrl_patch.fp8.gather import Fp8Gathered, Fp8Shard
from jetrl_patch.fp8.linear import Fp8Linear
from jetrl_patch.fp8.lora import Fp8LoraLinear


def to_bf16(layers: Mapping[str, Any], exact: bool) -> None:
    """Move layers to BF16, as ``exclude`` would have: all of them, or none and raise.

    Parameters keep their identity, so FSDP, ZeRO and the optimizer are unaffected. The layer keeps its FP8 state, which a
    fused activation before it may still read.

    Args:
        layers: ``Fp8Linear`` by name, and modules of experts.
        exact: whether they get the batch-invariant GEMM of exact mode, with their splits of K, or ``nn.Linear``'s.

    Raises:
        ModelError: a layer is neither, or its weight is gathered in FP8 and has no BF16 value.
    """
    for name, layer in layers.items():
        if experts_of(layer) is None:
            _check(name, layer)
    for layer in layers.values():
        experts = experts_of(layer)
        if experts is not None:
            experts.to_bf16(exact)
            continue
        splits = layer.fp8.splits
        layer.__class__ = nn.Linear
        if exact:
            modules.swap(layer, modules.ExactLinear)
            layer.jetrl_splits = splits


def _check(name: str, layer: Any) -> None:
    if type(layer) not in (Fp8Linear, Fp8LoraLinear):
        raise ModelError(f"{name} is a {type(layer).__name__}, and only an Fp8Linear can be taken out of FP8")
    weight = getattr(layer.weight, "_local_tensor", layer.weight)
    if isinstance(weight, (Fp8Shard, Fp8Gathered)):
        raise ModelError(
            explain(
                f"taking {name} out of FP8",
                required="a weight that FSDP2 gathers in BF16",
                found="one that FSDP2 gathers as FP8 bytes",
                fix="turn fp8_all_gather off, or leave guard_sqnr unset",
            )
        )
