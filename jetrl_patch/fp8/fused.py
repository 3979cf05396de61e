"""Fused kernels that make the trainer faster on a GPU: norms, activations and the rotary embedding."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.exact import ops
from jetrl_patch.exact.modules import ExactMLP, ExactNorm, swap
from jetrl_patch.fp8 import producers
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.models.families import covering

# ---- Copies of transformers' functions, with other globals. Transformers itself is not changed ----

def copied(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Copy a function and a snapshot of its globals, with ``names`` replaced or added."""
    found = {**function.__globals__, **names}
    copy = FunctionType(function.__code__, found, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__annotations__, copy.__doc__ = function.__kwdefaults__, function.__annotations__, function.__doc__
    return copy


# ---- Norms and activations that feed FP8 layers, fused with the quantization ---------------------
# With ``align="exact"`` they equal the rollout's bit for bit: an activation depends on one gate and one up, and a norm is the
# rollout's kernel, which adds its squares in the order of the norm alone. If a kernel does not support an input (FP32 masters
# under autocast), the original forward runs.

class FusedNorm:
    """RMSNorm whose output is quantized for the layers that read it."""

    weight: Tensor
    variance_epsilon: float
    jetrl_fp8: Fp8State

    def forward(self, hidden_states: Tensor) -> Any:
        y = producers.rms_norm(hidden_states, self.weight, self.variance_epsilon, self.jetrl_fp8)
        return super().forward(hidden_states) if y is None else y  # type: ignore[misc]


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
        """The activation, for inputs that the kernel does not support."""
        product: Tensor = self.act_fn(gate) * up
        return product


class FusedExactMLP(FusedMLP):
    """The same in exact mode."""

    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.silu_mul(gate, up)


def fuse(model: nn.Module, backend: str, device_type: str) -> list[str]:
    """Fuse modules of a model with FP8 layers, in place. Returns the names of the changed modules.

    It recognizes classes by name, or as those of exact mode, so a part of a model will do. Norms per head and the final norm feed
    no FP8 layer and stay.
    """
    if not producers.available(backend, device_type):
        return []
    changed = []
    families = covering("fused").values()
    norms, mlps = {family.norm: family for family in families}, {family.mlp for family in families}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parent, _, leaf = name.rpartition(".")
        kind = type(module)
        if isinstance(module, FusedNorm | FusedMLP):
            continue
        known = [k.__name__ for k in (kind.__mro__ if issubclass(kind, ExactNorm) else (kind,)) if k.__name__ in norms]
        if known:
            layers = (modules.get(f"{parent}.{reader}") for reader in norms[known[0]].readers.get(leaf, ()))
            first = next((layer for layer in layers if isinstance(layer, Fp8Linear)), None)
            if first is None:
                continue
            swap(module, FusedNorm)
            module.jetrl_fp8 = first.fp8
        elif isinstance(module, ExactMLP) and isinstance(module.down_proj, Fp8Linear):
            swap(module, FusedExactMLP)
        elif kind.__name__ in mlps and isinstance(module.down_proj, Fp8Linear) and _is_silu(module.act_fn):
            swap(module, FusedMLP)
        else:
            continue
        changed.append(name)
    return changed


def _has_both_gradients(layer: nn.Module, state: Fp8State) -> bool:
    """Whether a layer's backward reads its output gradient in both layouts, quantized in the format of ``state``."""
    if not isinstance(layer, Fp8Linear) or not layer.weight.requires_grad:
        return False
    return layer.fp8.format == state.format


def _is_silu(activation: object) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


# ---- Queries and keys rotated in one launch ------------------------------------------------------
# transformers' attention classes call ``apply_rotary_pos_emb`` of their module. Here a class gets a copy of its ``forward`` in
# which that name is ours; models that are not prepared rotate as before. There is no table of families: a function is replaced
# if, on a small input, it has the bits of Hugging Face's common expression. Interleaved halves, three-dimensional angles, vision
# towers and functions of other libraries (Liger) stay.

#: its name in transformers
_FUNCTION = "apply_rotary_pos_emb"


def rotate_together(model: nn.Module, backend: str, device_type: str) -> list[str]:
    """Rotate with one kernel in the attention modules of a model, in place. Returns the names of the changed modules."""
    if not producers.available(backend, device_type):
        return []
    changed = []
    for name, module in model.named_modules():
        kind: Any = type(module)
        if (behavior := _behavior(kind)) is not None:
            swap(module, behavior)
            changed.append(name)
    return changed


@functools.cache
def _behavior(kind: type) -> type | None:
    """The behavior of a class of attention for ``swap``; None for no change."""
    forward: Any = kind.__dict__.get("forward")
    calls = isinstance(forward, FunctionType) and _FUNCTION in forward.__code__.co_names
    own: Any = forward.__globals__.get(_FUNCTION) if calls else None
    if own is None or not _is_common(own):
        return None

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        found = None if more or named else ops.rotate_pair(q, k, cos, sin)
        return own(q, k, cos, sin, *more, **named) if found is None else found

    return type("RotatedTogether", (), {"forward": copied(forward, {_FUNCTION: rotate})})


@torch.no_grad()
def _is_common(function: Any) -> bool:
    """Whether a function has the bits of ``x cos + (-high, low) sin`` and leaves the rest of a wider head unchanged."""
    given = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=given, device="cpu").to(torch.bfloat16)  # noqa: E731
    q, k = random(2, 3, 5, 8), random(2, 1, 5, 8)
    for width in (8, 4):
        cos, sin = (random(1, 5, width // 2).repeat(1, 1, 2) for _ in range(2))
        try:
            found = function(q, k, cos, sin)
        except Exception:  # another library's function; or one without partial rotation, of a model that does not need it
            return width < 8
        if len(found) != 2 or not all(torch.equal(y, _common(x, cos, sin)) for x, y in zip((q, k), found)):
            return False
    return True


def _common(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = x.chunk(2, -1)
    return torch.cat((x * cos.unsqueeze(1) + torch.cat((-high, low), -1) * sin.unsqueeze(1), rest), -1)
