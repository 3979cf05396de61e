"""Keep the BF16 linears and experts of vLLM on CPU open to weight updates.

After loading, vLLM on CPU packs a BF16 weight into its kernel's layout and, except for ``lm_head``, frees the original.
A later update then fails or has no effect. Here the weight is kept, and a write through its loader makes the layer pack
again at its next use: same kernel, same bits.

Experts keep their weight, but vLLM packs it once. When it processes the weights of a later load, as verl has it do after each
sync, it leaves them as they were loaded, and the kernel takes them for packed ones (seen in 0.30: every log-prob is wrong,
without an error).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["keep_live_experts", "keep_live_weight"]


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


def keep_live_experts(model: Any) -> None:
    """Let the BF16 experts of a loaded model be packed again whenever vLLM processes new weights; nothing to do off the CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if hasattr(kernel, "process_weights_after_loading") and hasattr(method, "_setup_kernel"):
            method._setup_kernel = _packing(method._setup_kernel, kernel)


def _packing(original: Callable[..., None], kernel: Any) -> Callable[..., None]:
    def _setup_kernel(layer: Any, w13: Any, w2: Any) -> None:
        original(layer, w13, w2)
        kernel.process_weights_after_loading(layer)

    return _setup_kernel
