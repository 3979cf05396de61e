"""peft's LoRA in a trainer: check what was built, make its layers compute with merged weights, and merge for the sync.

peft is recognized by the module of its classes and never imported: a model without adapters does not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.exact.modules import swap
from jetrl_patch.fp8.layers import in_tower, is_quantized
from jetrl_patch.fp8.linear import Fp8Linear
from jetrl_patch.fp8.lora import Fp8LoraLinear, MergedLora, Whole, merged_weight

__all__ = ["adopt", "merged_tensors"]

#: peft's classes around the model; a layer is of class ``Linear``, and everything else of peft's is refused
_AROUND = ("PeftModel", "PeftModelForCausalLM", "LoraModel")
_BASE = ".base_layer.weight"


def adopt(model: nn.Module, merge: bool) -> dict[str, float]:
    """Check every adapter of a model that peft has wrapped, and with ``merge`` make them compute with W'.

    All checks run before any change. Parameters keep their names and identity. Call it before the model is sharded. Layers of a
    vision tower compute with W' in BF16, as those that ``exclude`` names.

    Returns:
        Name of each LoRA layer in the model -> scaling.

    Raises:
        ConfigError: something of peft's other than plain LoRA on linear layers of transformer blocks and of a vision tower.
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
    """Raise ConfigError for an adapter whose merged weight is not bf16(W + scaling * B A), or that has none."""
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
    raise ConfigError(
        explain(f"LoRA in {name}", required="plain LoRA on linear layers of transformer blocks", found=found, fix=fix)
    )


def merged_tensors(
    tensors: Mapping[str, Any], names: Mapping[str, str], scaling: Mapping[str, float], full: Callable[[Any], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain model's tensors under the names it has without adapters, each LoRA layer's weight as W'.

    Args:
        tensors: the state dict of the model with its adapters, whole or sharded.
        names: name without adapters -> name in ``tensors``.
        scaling: as returned by ``adopt``.
        full: gathers a tensor of ``tensors``, on every rank.
    """
    for plain, name in names.items():
        layer = name.removesuffix(_BASE)
        if layer not in scaling:
            yield plain, full(tensors[name])
            continue
        a_RK, b_NR = (full(_only(tensors, f"{layer}.{factor}.")) for factor in ("lora_A", "lora_B"))
        yield plain, merged_weight(full(tensors[name]), a_RK, b_NR, scaling[layer])


def _only(tensors: Mapping[str, Any], prefix: str) -> Any:
    (found,) = (tensor for name, tensor in tensors.items() if name.startswith(prefix))
    return found
