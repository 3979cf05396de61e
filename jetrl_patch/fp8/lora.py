"""LoRA by its merged weight W' = W + scaling * B A, quantized once in every pass, and peft's layers in a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetrl_patch.backends.capability import check_triton
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.exact import ops
from jetrl_patch.exact.modules import ExactLinear, swap
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State, fprop
from jetrl_patch.models.layers import in_tower, is_quantized

# ---- LoRA by its merged weight: a layer computes with W' = W + scaling * B A, quantized once, in every pass
#     W'_NK = bf16( W + fl32( scaling * Σ_j B_j A_j ) )       j = 0 .. R-1 in this order, from BF16 values of W, A and B
#
# peft computes W x and adds B (A x). A rollout that holds one quantized weight cannot repeat that: FP8(W) x + B (A x) and
# FP8(W + B A) x differ in almost every bit. So the trainer computes what the rollout computes. ``merged_weight`` is the only
# place that makes W', for a layer's forward, its backward and the weight sync.
#
# The product of two BF16 values is exact in FP32, so each step of the sum rounds once, whether or not it is fused. Unlike a
# matrix product, W' is therefore the same on every device and for every number of threads.
#
#     Y = X W'^T             FProp, with the bytes of W'
#     dX = G W'              DGrad, with the same bytes
#     dW' = G^T X            WGrad, in FP32; then dB = scaling * dW' A^T and dA = scaling * B^T dW'
#
# W is frozen and gets no gradient; dW' [N, K] is dropped as soon as dA and dB are known. W' is not kept from forward to backward:
# a sharded model gathers W again, and W' is made from it again.
#
# The cost: an update that moves no value of W' across a rounding boundary of BF16 and then of FP8 has no effect on either side,
# just as with full weights.
#
# Shape legend: N output features, K input features, R rank, M tokens.

#: elements of an accumulator that stays in a core's cache during the sum over the rank
_TILE = 1 << 16


def merged_weight(w_NK: Tensor, a_RK: Tensor, b_NR: Tensor, scaling: float) -> Tensor:
    """W' in BF16 [N, K] (formula above), from tensors of any float dtype. No gradient."""
    w, a, b = (t.detach().to(torch.bfloat16) for t in (w_NK, a_RK, b_NR))
    if w.is_cuda and check_triton()[0]:
        from jetrl_patch.kernels import elementwise

        return elementwise.merged_weight(w, a, b, scaling)
    a_RK, b_RN = a.float(), b.t().float().contiguous()
    merged = torch.empty(w.shape, dtype=torch.bfloat16, device=w.device)
    rows = w.shape[0] if w.is_cuda else max(1, _TILE // w.shape[1])
    for n in range(0, w.shape[0], rows):
        part = slice(n, n + rows)
        sum_NK = torch.zeros(w[part].shape, dtype=torch.float32, device=w.device)
        for a_K, b_N in zip(a_RK, b_RN[:, part], strict=True):
            sum_NK.addcmul_(b_N[:, None], a_K[None, :])
        merged[part] = sum_NK.mul_(scaling).add_(w[part].float())
    return merged


@dataclass(frozen=True)
class LowRank:
    """A change of a weight: scaling * B A. Gradients flow to A [R, K] and B [N, R]."""

    a_RK: Tensor
    b_NR: Tensor
    scaling: float

    def merged(self, w_NK: Tensor) -> Tensor:
        """W' in BF16 [N, K], differentiable in A and B."""
        result: Tensor = _Merged.apply(w_NK, self.a_RK, self.b_NR, self.scaling)
        return result


def _factors(dw_NK: Tensor, a_RK: Tensor, b_NR: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """dA [R, K] and dB [N, R] from dW' [N, K], in FP32 (also under autocast) and rounded once."""
    with torch.autocast(dw_NK.device.type, enabled=False):
        dw = dw_NK.float()
        da, db = b_NR.float().t() @ dw, dw @ a_RK.float().t()
    return da.mul_(scaling).to(a_RK.dtype), db.mul_(scaling).to(b_NR.dtype)


class _Merged(torch.autograd.Function):
    """W' for a layer in BF16. Its product keeps W' for backward, as it would keep a BF16 parameter."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, a_RK: Tensor, b_NR: Tensor, scaling: float) -> Tensor:
        ctx.save_for_backward(a_RK, b_NR)
        ctx.scaling = scaling
        return merged_weight(weight, a_RK, b_NR, scaling)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, Tensor, Tensor, None]:
        a_RK, b_NR = ctx.saved_tensors
        return None, *_factors(grad_outputs[0], a_RK, b_NR, ctx.scaling), None


class _MergedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, a_RK: Tensor, b_NR: Tensor, bias: Tensor | None, scaling: float, state: Fp8State
    ) -> Tensor:
        y, quantized = fprop(x, state.quantized(merged_weight(weight, a_RK, b_NR, scaling)), bias, state)
        ctx.save_for_backward(*quantized, weight, a_RK, b_NR)
        ctx.shared = quantized.shared.add_reader(state) if quantized.shared else None
        ctx.state, ctx.scaling, ctx.x_dtype = state, scaling, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q_MK, s_MG, weight, a_RK, b_NR = ctx.saved_tensors
        state: Fp8State = ctx.state
        grad = grad_outputs[0]
        dy_MN = grad.reshape(-1, grad.shape[-1]).to(torch.bfloat16).contiguous()
        x = Quantized(q_MK, s_MG, "rows", state.scale_format, shared=ctx.shared)
        w = state.quantized(merged_weight(weight, a_RK, b_NR, ctx.scaling)) if ctx.needs_input_grad[0] else None
        dx, dw = state.backend.gradients(dy_MN, x, w, (ctx.x_dtype, torch.float32))
        if dx is not None:
            dx = dx.view(*grad.shape[:-1], dx.shape[1])
        assert dw is not None  # there is no main gradient
        return dx, None, *_factors(dw, a_RK, b_NR, ctx.scaling), None, None, None


class Fp8LoraLinear(Fp8Linear):
    """The ``Fp8Linear`` inside a LoRA layer. With a ``LowRank`` it computes with W', otherwise with W."""

    def forward(self, input: Tensor, change: LowRank | None = None) -> Tensor:
        if change is None:
            return super().forward(input)
        a_RK, b_NR = change.a_RK, change.b_NR
        y: Tensor = _MergedMatmul.apply(input, self.weight, a_RK, b_NR, self.bias, change.scaling, self.fp8)
        return y


class Whole:
    """A factor of LoRA, A or B. Its forward returns its weight, because calling the module gathers a sharded weight."""

    weight: Tensor

    def forward(self) -> Tensor:
        return self.weight.to(torch.bfloat16, copy=True)  # FSDP1 frees the gathered memory when this returns


class MergedLora:
    """peft's linear LoRA layer, computing with W'. With adapters disabled it is its base layer.

    The base layer is called as a module, so hooks on it see the same inputs and outputs as without LoRA.
    """

    base_layer: Any
    lora_A: Any
    lora_B: Any
    scaling: dict[str, float]
    active_adapters: list[str]
    disable_adapters: bool

    def enable_adapters(self, enabled: bool) -> None:
        """Compute with W', or with W. Unlike peft's method, it leaves ``requires_grad`` alone.

        FSDP2 chooses the dtype that it keeps parameters in during its first forward pass, by which of them have gradients then.
        That may be the pass of the reference model, with adapters disabled.
        """
        self._disable_adapters = not enabled

    @property
    def fp8(self) -> Fp8State:
        """The base layer's state, for the operation that quantizes its input."""
        state: Fp8State = self.base_layer.fp8
        return state

    def forward(self, x: Tensor) -> Any:
        base = self.base_layer
        if self.disable_adapters:
            return base(x)
        (name,) = self.active_adapters
        change = LowRank(self.lora_A[name](), self.lora_B[name](), self.scaling[name])
        if isinstance(base, Fp8Linear):
            return base(x, change)
        weight = change.merged(base.weight)
        if isinstance(base, ExactLinear):
            return ops.linear(x, weight, base.bias, base.jetrl_splits)
        return F.linear(x.to(torch.bfloat16), weight, None if base.bias is None else base.bias.to(torch.bfloat16))


# ---- peft's LoRA in a trainer: check what was built, make its layers compute with merged weights, and merge for the sync
# peft is recognized by the module of its classes and never imported, because a model without adapters does not need it.

#: peft's classes around the model. Its layers are of class ``Linear``, and everything else of peft's is refused
_AROUND = ("PeftModel", "PeftModelForCausalLM", "LoraModel")
_BASE = ".base_layer.weight"


def adopt(model: nn.Module, merge: bool) -> dict[str, float]:
    """Check every adapter of a model that peft has wrapped. With ``merge``, make them compute with W'.

    All checks run before any change. Parameters keep their names and identity. Call it before the model is sharded. Layers of a
    vision tower and layers that ``exclude`` names compute with W' in BF16.

    Returns:
        Name of each LoRA layer in the model -> scaling.

    Raises ConfigError if there is anything of peft's but plain LoRA on linear layers of transformer blocks and of a vision tower.
    """
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        if not type(module).__module__.startswith("peft."):
            continue
        kind = type(module).__name__
        if kind == "Linear" and hasattr(module, "lora_A"):
            _check(name, module)
            layers[name] = module
        elif kind not in _AROUND:
            _refuse(name, f"peft's {kind}", "drop modules_to_save, target_parameters and other kinds of adapters")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name.rpartition(".lora_")[0] not in layers:
            _refuse(name, "a parameter that is trained in full", "drop modules_to_save and bias=, which must be 'none'")
    scaling = {name: float(layer.scaling[_adapter(layer)]) for name, layer in layers.items()}
    if merge:
        for layer in layers.values():
            if type(layer.base_layer) is Fp8Linear:
                layer.base_layer.__class__ = Fp8LoraLinear
            for factor in (layer.lora_A, layer.lora_B):
                swap(factor[_adapter(layer)], Whole)
            swap(layer, MergedLora)
    return scaling


def _adapter(layer: Any) -> str:
    name: str = layer.active_adapters[0]
    return name


def _check(name: str, layer: Any) -> None:
    """Raise ConfigError for an adapter that has no merged weight bf16(W + scaling * B A)."""
    if not (is_quantized(name, ()) or in_tower(name)):
        _refuse(name, "a layer outside the transformer blocks", "name it in exclude_modules, or drop it from target_modules")
    if list(layer.lora_A) != list(layer.active_adapters) or len(layer.lora_A) != 1:
        _refuse(name, f"adapters {list(layer.lora_A)}", "use a single adapter")
    variant = layer.lora_variant.get(_adapter(layer))
    if variant is not None:
        _refuse(name, type(variant).__name__, "set use_dora and other variants to false")
    dropout = getattr(layer.lora_dropout[_adapter(layer)], "p", 0.0)
    if dropout:
        _refuse(name, f"lora_dropout={dropout}", "set it to 0: the rollout has none")
    if any(layer.lora_bias.values()) or layer.fan_in_fan_out or layer.merged_adapters:
        _refuse(name, "a bias of its own, fan_in_fan_out or merged adapters", "set lora_bias and fan_in_fan_out to false")


def _refuse(name: str, found: str, fix: str) -> None:
    required = "plain LoRA on linear layers of transformer blocks"
    raise ConfigError(explain(f"LoRA in {name}", required=required, found=found, fix=fix))


def plain_name(name: str) -> str:
    """The name that a parameter has in the model without adapters; the same for a model without any."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def merged_tensors(
    tensors: Mapping[str, Any],
    names: Mapping[str, str],
    scaling: Mapping[str, float],
    gathered: Callable[[list[Any]], AbstractContextManager[list[Tensor]]],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the model without adapters, under their names there. The weight of each LoRA layer is W'.

    Args:
        tensors: the state dict or the parameters of the model with adapters, whole or sharded.
        names: name without adapters -> name in ``tensors``.
        scaling: as returned by ``adopt``.
        gathered: makes whole tensors of some of ``tensors``, on every rank. They may be released when its block ends.
    """
    for plain, name in names.items():
        layer = name.removesuffix(_BASE)
        parts = [tensors[name]]
        if layer in scaling:
            for factor in ("lora_A", "lora_B"):
                parts += [tensor for own, tensor in tensors.items() if own.startswith(f"{layer}.{factor}.")]
        with gathered(parts) as (weight, *factors):
            if factors:
                a_RK, b_NR = factors
                weight = merged_weight(weight, a_RK, b_NR, scaling[layer])
            yield plain, weight


def merged_parameters(
    model: nn.Module, scaling: Mapping[str, float], gathered: Callable[[list[Any]], AbstractContextManager[list[Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's parameters as ``merged_tensors``; if ``scaling`` is empty, each under its own name."""
    parameters = dict(model.named_parameters())
    names = {plain_name(name): name for name in parameters if not (scaling and ".lora_" in name)}
    return merged_tensors(parameters, names, scaling, gathered)
