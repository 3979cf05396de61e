"""Keep the BF16 linears of vLLM on CPU open to weight updates.

After loading, vLLM on CPU packs a BF16 weight into its kernel's layout and, except for ``lm_head``, frees the original.
A later update then fails or has no effect. Here the weight is kept, and a write through its loader makes the layer pack
again at its next use: same kernel, same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["keep_live_weight"]


def keep_live_weight(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``dispatch_cpu_unquantized_gemm``. The packed copy takes memory in addition to the weight.

    Not covered: writes that bypass the parameter's ``weight_loader``.
    """

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.ndim != 2 or weight.is_meta:
            original(layer, remove_weight)
            return
        original(layer, False)
        if getattr(layer, "jetrl_live", None) is not weight:
            layer.__dict__["jetrl_live"] = weight  # not a second registration of the parameter
            _watch(layer, weight, original)

    return dispatch_cpu_unquantized_gemm


def _watch(layer: Any, weight: Any, pack: Callable[..., None]) -> None:
    load = weight.weight_loader

    def load_and_mark(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        layer.cpu_linear = pack_first
        return result

    def pack_first(x: Any, live: Any, bias: Any) -> Any:
        pack(layer, False)
        return layer.cpu_linear(x, live, bias)

    weight.weight_loader = load_and_mark
