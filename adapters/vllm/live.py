"""BF16 linears of vLLM on CPU that stay open to weight updates.

After loading, vLLM on CPU packs a BF16 weight into the layout of its kernel and, except for ``lm_head``, throws the
weight itself away. A later update then fails, or lands where nobody looks. Here the weight is kept, and whoever
writes it through its loader makes the layer pack again at its next use: the same kernel and the same bits as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["keep_live_weight"]


def keep_live_weight(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``dispatch_cpu_unquantized_gemm``. Costs the memory of the packed copy beside the weight.

    Not covered: writes past the parameter's ``weight_loader``, straight into its storage.
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
