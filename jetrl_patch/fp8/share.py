"""How much of a model is FP8: of its parameters, and of the forward FLOPs of a token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import nn

from jetrl_patch.fp8.expert_layers import expert_modules, layers_of, whole_shape

__all__ = ["Share", "share_of"]


class Share(NamedTuple):
    """Shares from 0 to 1.

    Attributes:
        parameters: of all parameters.
        flops: of the FLOPs that a token's forward pass spends in products with weights. Attention's own products, whose number
            depends on the context, are left out.
        inside: the same without ``lm_head``.
    """

    parameters: float
    flops: float
    inside: float

    def __str__(self) -> str:
        return (
            f"FP8: {self.parameters:.1%} of the parameters, {self.flops:.1%} of a token's forward FLOPs in products with "
            f"weights ({self.inside:.1%} without lm_head)"
        )


def share_of(model: Any, names: Collection[str]) -> Share:
    """Count a Hugging Face model, which may be on the meta device.

    Args:
        names: its FP8 layers, as ``select_layers`` returns them.
    """
    chosen, experts, head = set(names), expert_modules(model), model.get_output_embeddings()
    fp8_parameters = fp8_flops = flops = outside = 0.0
    for name, module in model.named_modules():
        if name in experts:
            size = _size(module.gate_up_proj) + _size(module.down_proj)
            used = 2.0 * size * model.config.get_text_config().num_experts_per_tok / whole_shape(module.gate_up_proj)[0]
            quantized = layers_of(name, module)[0] in chosen
        elif not isinstance(module, nn.Embedding) and _is_matrix(getattr(module, "weight", None)):
            size = _size(module.weight)
            used, quantized = 2.0 * size, name in chosen
        else:
            continue
        flops += used
        outside += used if module is head else 0.0
        if quantized:
            fp8_parameters += size
            fp8_flops += used
    total = sum(_size(parameter) for parameter in model.parameters())
    return Share(fp8_parameters / total, fp8_flops / flops, fp8_flops / (flops - outside))


def _is_matrix(weight: Any) -> bool:
    return weight is not None and len(whole_shape(weight)) == 2


def _size(parameter: Any) -> int:
    size = 1
    for length in whole_shape(parameter):
        size *= length
    return size
