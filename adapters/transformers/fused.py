"""Fuse the norms and activations that feed FP8 layers with the quantization, for the trainer's speed on a GPU.

With ``align="linear"`` both are fused. With ``align="exact"`` only the activation (``fuse_exact``): each of its values depends on
one gate and one up, and equals the rollout's bit for bit. A fused norm may sum its squares in another order than the rollout's
kernel, so exact norms are left alone. A fused module keeps its parameters and its name. If its kernel does not support an input
(FP32 masters under autocast), the original forward runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from jetrl_patch.exact import ops, residual
from jetrl_patch.exact.modules import ExactMLP, swap
from jetrl_patch.families import covering
from jetrl_patch.fp8 import producers
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State


class FusedNorm:
    """RMSNorm whose output is quantized for the layers that read it."""

    weight: Tensor
    variance_epsilon: float
    jetrl_fp8: Fp8State
    #: whether the block takes its residual from here (``residual``)
    jetrl_passes: bool = False

    def forward(self, hidden_states: Tensor) -> Any:
        made = producers.rms_norm(hidden_states, self.weight, self.variance_epsilon, self.jetrl_fp8)
        if made is None:
            return super().forward(hidden_states)  # type: ignore[misc]
        return residual.passing(*made) if self.jetrl_passes else made[0]


class FusedMLP:
    """Gated MLP whose product is quantized for ``down_proj``."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: Fp8Linear
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Any:
        gate, up, state = self.gate_proj(x), self.up_proj(x), self.down_proj.fp8
        straight = x.requires_grad and all(_has_both_gradients(layer, state) for layer in (self.gate_proj, self.up_proj))
        y = producers.silu_mul(gate, up, state, straight)
        return self.down_proj(self.multiply(gate, up) if y is None else y)

    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        """The activation where the kernel does not accept the inputs."""
        product: Tensor = self.act_fn(gate) * up
        return product


class FusedExactMLP(FusedMLP):
    """The same in exact mode."""

    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        """The rollout's activation."""
        return ops.silu_mul(gate, up)


def fuse(model: nn.Module, backend: str, device_type: str) -> list[str]:
    """Fuse modules of a model with FP8 layers, in place. Returns the names of the changed modules.

    Classes are recognized by name, so part of a model is enough. Per-head norms and the final norm feed no FP8 layer and
    are left alone.
    """
    if not producers.available(backend, device_type):
        return []
    changed = []
    families = covering("fused").values()
    norms, mlps = {family.norm: family for family in families}, {family.mlp for family in families}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parent, _, leaf = name.rpartition(".")
        kind = type(module).__name__
        if kind in norms:
            layers = (modules.get(f"{parent}.{reader}") for reader in norms[kind].readers.get(leaf, ()))
            first = next((layer for layer in layers if isinstance(layer, Fp8Linear)), None)
            if first is None:
                continue
            swap(module, FusedNorm)
            module.jetrl_fp8 = first.fp8
        elif kind in mlps and isinstance(module.down_proj, Fp8Linear) and _is_silu(module.act_fn):
            swap(module, FusedMLP)
        else:
            continue
        changed.append(name)
    return changed


def fuse_exact(model: nn.Module, backend: str, device_type: str) -> list[str]:
    """Fuse the exact activations that feed FP8 layers, in place. Returns the names of the changed modules."""
    if not producers.available(backend, device_type):
        return []
    mlps = {name: module for name, module in model.named_modules() if isinstance(module, ExactMLP)}
    changed = [name for name, module in mlps.items() if isinstance(module.down_proj, Fp8Linear)]
    for name in changed:
        swap(model.get_submodule(name), FusedExactMLP)
    return changed


def _has_both_gradients(layer: nn.Module, state: Fp8State) -> bool:
    """Whether a layer's backward reads its output gradient in both layouts, quantized as ``state`` says."""
    if not isinstance(layer, Fp8Linear) or not layer.weight.requires_grad:
        return False
    return (layer.fp8.backend_name, layer.fp8.scale_format) == (state.backend_name, state.scale_format)


def _is_silu(activation: object) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
