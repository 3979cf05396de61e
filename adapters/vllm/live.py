"""Keep the BF16 linears and experts of vLLM on CPU open to weight updates.

After loading, vLLM on CPU packs a BF16 weight into its kernel's layout and, except for ``lm_head``, frees the original.
A later update then fails or has no effect. Here the weight is kept, and a write through its loader makes the layer pack
again at its next use: same kernel, same bits.

Experts keep their weight, but vLLM packs it once. When it processes the weights of a later load, as verl has it do after each
sync, it leaves them as they were loaded, and the kernel takes them for packed ones (seen in 0.30: every log-prob is wrong,
without an error).

The weight of a convolution (of gated delta nets) is packed in its place, so that a later update would write plain values where
the kernel reads packed ones. Here the plain weight is kept beside it; a write through its loader meets the plain one, which is
then packed.

With AMX, latent attention packs ``kv_b_proj`` and takes the weight away. Here the layer gets it back; ``latent`` has it packed
again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["keep_latent_weight", "keep_live_experts", "keep_live_weight", "unpacked"]

#: attribute of a layer that convolves: its parameter, which is packed, and the weight as it was loaded
_CONVOLVES = "jetrl_convolves"


def keep_live_weight(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``dispatch_cpu_unquantized_gemm``. The packed copy takes memory in addition to the weight.

    Not covered: writes that bypass the parameter's ``weight_loader``.
    """

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if getattr(layer, _CONVOLVES, (None,))[0] is weight:
            return  # its loader has packed it
        if weight.ndim == 3 and hasattr(weight, "weight_loader") and not weight.is_meta:
            loaded, place = weight.data.clone(), weight.data_ptr()
            original(layer, remove_weight)
            if layer.weight.data_ptr() != place:
                _watch_convolution(layer, weight, loaded, original)
            return
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


def _watch_convolution(layer: Any, weight: Any, loaded: Any, pack: Callable[..., None]) -> None:
    load = weight.weight_loader

    def load_and_pack(param: Any, *args: Any, **kwargs: Any) -> Any:
        param.data = loaded.clone()  # vLLM may keep what it packs
        result = load(param, *args, **kwargs)
        loaded.copy_(param.data)
        pack(layer, False)
        return result

    weight.weight_loader = load_and_pack
    layer.__dict__[_CONVOLVES] = (weight, loaded)  # not a second registration of the parameter


def unpacked(layer: Any) -> Any:
    """The weight of one of vLLM's linear layers as it was loaded: the plain one of a convolution that is packed."""
    weight = getattr(layer, "weight", None)
    held, loaded = getattr(layer, _CONVOLVES, (None, None))
    return loaded if held is not None and held is weight else weight


def keep_latent_weight(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``MLAAttention.process_weights_after_loading``. Off AMX it leaves the weight alone."""

    def process_weights_after_loading(self: Any, act_dtype: Any) -> None:
        weight = self.kv_b_proj.weight
        original(self, act_dtype)
        self.kv_b_proj.weight = weight

    return process_weights_after_loading


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
