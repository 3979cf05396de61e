"""Move FP8 layers of a running engine to BF16, in place, before the weights that follow."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    LinearMethodBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from jetrl_patch.adapters.vllm.experts import QuantizedExpertsMethod, expert_modules
from jetrl_patch.adapters.vllm.head import ExactLinearMethod
from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod, quantized_modules
from jetrl_patch.errors import AuditError

__all__ = ["guarded_modules", "to_bf16"]


@dataclass(frozen=True)
class _Change:
    """A layer, its new method and its new weight."""

    layer: LinearBase
    names: list[str]
    method: LinearMethodBase
    weight: torch.nn.Parameter

    def carry_out(self) -> None:
        layer = self.layer
        del layer.weight, layer.weight_scale_inv
        layer.weight = self.weight
        layer.quant_method = self.method
        layer.jetrl_guarded = self.names
        self.method.process_weights_after_loading(layer)  # where vLLM packs weights, later loads are packed again


@dataclass(frozen=True)
class _Experts:
    """Experts and the room for their BF16 weights. They keep their method."""

    layer: Any
    method: QuantizedExpertsMethod
    room: dict[str, torch.Tensor]

    def carry_out(self) -> None:
        self.method.to_bf16(self.layer, self.room)


def to_bf16(model: torch.nn.Module, wanted: Collection[str]) -> None:
    """Move FP8 linears and experts to BF16, as ``exclude`` would have. Their weights are uninitialized until loaded.

    Args:
        wanted: Hugging Face module names.

    Raises:
        AuditError: a name is not an FP8 layer here, or only part of a fused one, or of the experts of a block. Nothing has
            changed then.
    """
    missing = set(wanted)
    changes: list[_Change | _Experts] = []
    for layer, method in quantized_modules(model):
        if _takes(method.names, missing):
            changes.append(_prepare(layer, method))
    for experts, own in expert_modules(model):
        if own.plain is None and _takes(own.layers(), missing):
            changes.append(_Experts(experts, own, own.room_in_bf16(experts)))
    if missing:
        raise AuditError(
            f"the precision guard takes {', '.join(sorted(missing)[:3])} ({len(missing)} in total) out of FP8, but they are not "
            f"FP8 layers in this engine. Use the same model and JETRL_EXCLUDE on both sides."
        )
    for change in changes:
        change.carry_out()


def _takes(layers: list[str], missing: set[str]) -> bool:
    """Whether all of these layers are to change, and take them off the list. Raises AuditError if only some are."""
    inside = [name for name in layers if name in missing]
    missing -= set(inside)
    if inside and len(inside) != len(layers):
        raise AuditError(
            f"the precision guard takes {', '.join(inside[:3])} ({len(inside)} in total) out of FP8, but vLLM computes all of "
            f"{', '.join(layers[:3])} ({len(layers)} in total) in one layer: they must change together. Leave guard_sqnr unset, "
            f"or exclude all of them."
        )
    return bool(inside)


def guarded_modules(model: torch.nn.Module) -> list[tuple[LinearBase, list[str]]]:
    """Return the linears that ``to_bf16`` changed, with their Hugging Face names, in module order."""
    return [(m, m.jetrl_guarded) for m in model.modules() if isinstance(m, LinearBase) and hasattr(m, "jetrl_guarded")]


def _prepare(layer: RowParallelLinear | ColumnParallelLinear, method: QuantizedLinearMethod) -> _Change:
    made: Any = ExactLinearMethod() if method.exact else UnquantizedLinearMethod()
    old = layer.weight
    holder = torch.nn.Module()
    with torch.device(old.device):
        made.create_weights(
            holder, old.shape[1], [old.shape[0]], layer.input_size, layer.output_size, torch.bfloat16,
            weight_loader=layer.weight_loader_v2,
        )  # fmt: skip
    return _Change(layer, list(method.names), made, holder.weight)
