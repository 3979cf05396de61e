"""The norms, linear layers and activation of a block in a decoding step of vLLM, before and after producers quantize.

The code is that of ``adapters/vllm``: its norms, activations and linear methods. vLLM's own norm and activation, which ``linear``
launched before, read and write what their kernels do (``csrc/layernorm_kernels.cu``, ``csrc/activation_kernels.cu``).
Attention, with its rotary embedding and its cache, is left out: the producers do not touch it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.counted.counter import Counter, Launch, record, size
from benchmarks.counted.decode import ROWS
from benchmarks.counted.hopper import DEVICE, hopper
from benchmarks.gpu.shapes import Linear, Model
from jetrl_patch.backends import get_backend
from jetrl_patch.config import Config
from jetrl_patch.kernels.formats import FP8, groups

#: models whose q, k and v have a bias
BIASED = ("Qwen2.5-7B",)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def _layer(linear: Linear, config: Config) -> Any:
    """One of vLLM's linear layers, as its method knows it."""
    from jetrl_patch.adapters.vllm.formats import BLOCKS
    from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod

    G = groups(linear.K)
    rows, blocks = (_empty(height, G, dtype=torch.float32) for height in (linear.N, groups(linear.N)))
    method = QuantizedLinearMethod(config, linear.name, packed={}, cut=[])
    weight = _empty(linear.N, linear.K, dtype=FP8)
    return SimpleNamespace(weight=weight, weight_scale_inv=rows, quant_method=method, **{BLOCKS: blocks})


def _vllm_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    record("fused_add_rms_norm", (x, residual, weight, x, residual))  # writes both in place
    return x, residual


def _vllm_silu(both: Tensor) -> Tensor:
    y = _empty(both.shape[0], both.shape[1] // 2)
    record("silu_and_mul", (both, y))
    return y


def count_step(model: Model, mode: str, fused: bool, best: str = "deep_gemm") -> tuple[tuple[Launch, ...], int]:
    """The launches, and the bytes of weights and their scales among what they read."""
    from jetrl_patch.adapters.vllm.ops import ExactRMSNorm, ExactSiluAndMul, FusedNorm, FusedSiluAndMul

    config = Config(precision="fp8-unified", align=mode).resolved()
    with hopper(best), torch.no_grad(), Counter() as counted:
        qkv, o, gate_up, down = (_layer(linear, config) for linear in model.linears)

        def module(kind: type, layer: Any, **own: Any) -> Any:
            made = kind() if fused else SimpleNamespace()
            made.__dict__.update(jetrl_reader=layer, jetrl_backend=get_backend(best), **own)
            return made

        def norm(x: Tensor, residual: Tensor, layer: Any) -> Any:
            weight = _empty(model.hidden)
            if not fused and mode == "linear":
                return _vllm_norm(x, residual, weight)
            given = {"weight": weight, "variance_epsilon": 1e-6, "variance_size_override": None, "has_weight": True}
            own = module(FusedNorm, layer, **given)
            return own.forward(x, residual) if fused else ExactRMSNorm.forward(own, x, residual)

        def silu(both: Tensor) -> Any:
            if not fused and mode == "linear":
                return _vllm_silu(both)
            own = module(FusedSiluAndMul, down)
            return own.forward(both) if fused else ExactSiluAndMul.forward(own, both)

        def times(layer: Any, x: Any, bias: Tensor | None = None) -> Tensor:
            product: Tensor = layer.quant_method.apply(layer, x, bias)
            return product

        x, residual = norm(_empty(ROWS, model.hidden), _empty(ROWS, model.hidden), qkv)
        times(qkv, x, _empty(qkv.weight.shape[0]) if model.name in BIASED else None)
        x = times(o, _empty(ROWS, model.heads * model.head_dim))
        x, residual = norm(x, residual, gate_up)
        times(down, silu(times(gate_up, x)))
    held = sum(size(layer.weight) + size(layer.weight_scale_blocks) for layer in (qkv, o, gate_up, down))
    return tuple(counted.launches), held


def rollout_tables(models: tuple[Model, ...], seconds: Any) -> dict[str, list[dict[str, Any]]]:
    """Title -> rows.

    Args:
        seconds: of a launch.
    """
    rows = []
    for model in models:
        for mode in ("linear", "exact"):
            for fused in (False, True):
                launches, held = count_step(model, mode, fused)
                rows.append(
                    {
                        "model": model.name, "mode": mode, "quantized by": "the norm or activation" if fused else "the linear",
                        "launches": len(launches), "MB without weights": (sum(x.bytes for x in launches) - held) / 1e6,
                        "µs": sum(map(seconds, launches)) * 1e6,
                    }
                )  # fmt: skip
    return {f"Norms, linear layers and activation of a block in a decoding step, M = {ROWS}": rows}
