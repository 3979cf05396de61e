"""Find the experts of a Hugging Face model, and give them their FP8 state.

transformers keeps the experts of a block in one module with two parameters, ``gate_up_proj [E, 2I, H]`` and
``down_proj [E, H, I]``. Everywhere else (checkpoints, exclude patterns, the weight sync) an expert is three layers:
``….experts.3.gate_proj``, ``up_proj`` and ``down_proj``, each with a weight of two dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.families import FAMILIES
from jetrl_patch.fp8.experts import Experts, Matrix
from jetrl_patch.fp8.formats import ScaleFormat
from jetrl_patch.fp8.layers import experts_quantized
from jetrl_patch.fp8.linear import Fp8State
from jetrl_patch.fp8.plain import PlainProducts
from jetrl_patch.fp8.ranks import WHOLE, ExpertSplit
from jetrl_patch.units import PARTS, matrices_of, units

__all__ = [
    "attach_experts",
    "check_experts",
    "expert_matrices",
    "expert_modules",
    "expert_states",
    "experts_of",
    "layers_of",
    "per_expert",
    "shapes_per_expert",
    "stored_buffers",
    "whole_shape",
]

#: where a module of experts keeps its ``Experts``
ATTRIBUTE = "jetrl_experts"


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold the experts of a block, by name. Recognised by class, so part of a model is enough."""
    kinds = {family.experts for family in FAMILIES.values() if family.mixture}
    return {name: module for name, module in model.named_modules() if type(module).__name__ in kinds}


def experts_of(module: Any) -> Experts | None:
    """What ``attach_experts`` gave a module; None for every other one."""
    return getattr(module, ATTRIBUTE, None)


def layers_of(name: str, module: Any) -> list[str]:
    """The names of the layers that a module of experts stands for."""
    return matrices_of(name, whole_shape(module.gate_up_proj)[0])


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """The shape of a parameter; under ZeRO-3 that of the whole."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def check_experts(model: nn.Module, exclude: Iterable[str], split: ExpertSplit = WHOLE) -> None:
    """Check the experts of all blocks.

    Raises:
        ModelError: ``exclude`` takes some experts of a block out of FP8 and not all, or the rollout cannot split them so over its
            ranks.
    """
    for name, module in expert_modules(model).items():
        experts, _, width = whole_shape(module.down_proj)
        experts_quantized(name, experts, tuple(exclude))
        split.check(f"the experts of {type(model).__name__}", experts, width)


def attach_experts(
    model: nn.Module,
    names: Iterable[str],
    scale_format: ScaleFormat,
    backend: str,
    split: ExpertSplit = WHOLE,
    exact: bool = False,
) -> None:
    """Give each module of experts its settings and its cache of quantized weights. Reads no weight.

    Args:
        names: the FP8 layers. Experts that are not among them get BF16 products, with independent rows if ``exact``.
    """
    fp8 = units(names)
    for name, module in expert_modules(model).items():
        count = whole_shape(module.gate_up_proj)[0]
        plain = None if name in fp8 else PlainProducts(exact)
        setattr(module, ATTRIBUTE, Experts(count, scale_format, backend, split, plain))


def expert_matrices(model: nn.Module) -> dict[str, Matrix]:
    """The matrices of all experts in FP8 that ``attach_experts`` has seen, by layer name."""
    found: dict[str, Matrix] = {}
    for name, module in expert_modules(model).items():
        own = experts_of(module)
        if own is not None:
            found.update((f"{name}.{leaf}", matrix) for leaf, matrix in own.matrices())
    return found


def expert_states(model: nn.Module) -> Iterator[tuple[str, Fp8State]]:
    """Yield what may hold quantized weights of the experts that ``attach_experts`` has seen, each with its module's name."""
    for name, module in expert_modules(model).items():
        own = experts_of(module)
        if own is not None:
            yield from ((name, state) for state in own.states())


def stored_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The floating buffers that a checkpoint holds, as module and attribute, by name: a router's correction bias, in FP32."""
    found = {}
    for name, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set and buffer.is_floating_point():
                found[f"{name}.{leaf}"] = (module, leaf)
    return found


def per_expert(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of single experts that a parameter ``….experts.gate_up_proj`` or ``….experts.down_proj`` holds.

    Args:
        name: of the parameter; any other tensor is yielded as it is.
        weight: [E, 2I, H] or [E, H, I].
    """
    stem, _, leaf = name.rpartition(".")
    if weight.dim() != 3 or not stem.endswith(".experts") or leaf not in ("gate_up_proj", "down_proj"):
        yield name, weight
        return
    parts = PARTS[:2] if leaf == "gate_up_proj" else PARTS[2:]
    for expert in range(weight.shape[0]):
        for part, matrix in zip(parts, weight[expert].chunk(len(parts), 0), strict=True):
            yield f"{stem}.{expert}.{part}.weight", matrix


def shapes_per_expert(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that ``per_expert`` makes of tensors of these shapes, by name."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        found.update((own, tuple(part.shape)) for own, part in per_expert(name, torch.empty(shape, device="meta")))
    return found
