"""The precision guard moves FP8 layers of a running trainer to BF16, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact import modules
from jetrl_patch.fp8.convert import experts_of
from jetrl_patch.fp8.gather import Fp8Gathered, Fp8Shard
from jetrl_patch.fp8.linear import Fp8Linear
from jetrl_patch.fp8.lora import Fp8LoraLinear


def to_bf16(layers: Mapping[str, Any], exact: bool) -> None:
    """Move layers (``Fp8Linear`` and modules of experts, by name) to BF16, as if ``exclude`` had named them.

    Parameters stay the same objects, so FSDP, ZeRO and the optimizer notice nothing. The layer keeps its FP8 state, which a fused
    activation before it may still read. With ``exact`` it gets the batch-invariant GEMM of exact mode, with its splits of K,
    instead of ``nn.Linear``'s. Raises ModelError, before any change, for another layer, or one whose weight FSDP2 gathers in FP8
    and so has no BF16 value.
    """
    for name, layer in layers.items():
        if experts_of(layer) is not None:
            continue
        if type(layer) not in (Fp8Linear, Fp8LoraLinear):
            raise ModelError(f"{name} is a {type(layer).__name__}, and only an Fp8Linear can leave FP8. Unset guard_sqnr.")
        weight = getattr(layer.weight, "_local_tensor", layer.weight)
        if isinstance(weight, (Fp8Shard, Fp8Gathered)):
            required, found = "a weight that FSDP2 gathers in BF16", "one that FSDP2 gathers as FP8 bytes"
            fix = "turn fp8_all_gather off, or leave guard_sqnr unset"
            raise ModelError(explain(f"taking {name} out of FP8", required=required, found=found, fix=fix))
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
