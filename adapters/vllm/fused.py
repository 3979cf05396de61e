"""Norms and activations of vLLM's models that quantize their result for the next FP8 linear, in one launch.

A norm qualifies if only one linear layer of vLLM reads it, by the family's record (``readers``); only ``down_proj`` reads SiLU *
up. In a loaded model such a module gets a class that returns a ``Quantized``. vLLM's model code passes it on unread, and
``QuantizedLinearMethod`` multiplies it. vLLM's own carrier for this (``QuantizedActivation``) exists since 0.30 and for its own
formats only.

The module falls back to its original code if the linear is not quantized (or no longer, after the precision guard), if the device
has no such kernels, or if they do not support the width or the tensor. In exact mode fusing changes no byte. With
``align="linear"`` the values are those of the trainer's fused kernels; vLLM's own kernels sometimes round them to a neighbor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod, quantized_modules
from jetrl_patch.adapters.vllm.shards import hf_name
from jetrl_patch.backends.gpu import GpuBackend
from jetrl_patch.exact.modules import swap, unswap
from jetrl_patch.fp8.producers import multiplied, normed
from jetrl_patch.kernels.formats import ScaleFormat
from jetrl_patch.models.families import Family

__all__ = ["FusedNorm", "FusedSiluAndMul", "fuse", "keep_equal"]

logger = logging.getLogger("vllm.jetrl_patch")  # vLLM shows information from loggers below its own

#: activation of a block -> the only linear that reads it
ACTIVATIONS = {"act_fn": ("down_proj",)}
#: numbers of rows to compare: one, some, and more than a tile
TRIED = (1, 7, 130)


class _Producer:
    """Has a link to the linear that reads it. The link is not a submodule, because the linear already is one elsewhere."""

    jetrl_reader: Any
    jetrl_backend: GpuBackend

    def scale_format(self) -> ScaleFormat | None:
        """Return the scale format of the linear's input; None if the linear is no longer quantized."""
        method = self.jetrl_reader.quant_method
        return method.format.config.scale_format if isinstance(method, QuantizedLinearMethod) else None


class FusedNorm(_Producer):
    """RMSNorm of the sum with the residual, quantized."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """``x [M, K]`` BF16, ``residual`` the same or None -> ``Quantized``, and the new residual if there was one."""
        form = self.scale_format()
        if form is None or not _plain(x) or not (residual is None or _plain(residual)):
            return super().forward(x, residual)  # type: ignore[misc]
        rows, total = normed(x, residual, self.weight.data, self.variance_epsilon, self.jetrl_backend, form)
        return rows if residual is None else (rows, total)


class FusedSiluAndMul(_Producer):
    """``silu(gate) * up``, quantized."""

    def forward(self, x: torch.Tensor) -> Any:
        """``x [M, 2K]`` BF16 -> ``Quantized``."""
        form = self.scale_format()
        if form is None or not _plain(x):
            return super().forward(x)  # type: ignore[misc]
        return multiplied(x, self.jetrl_backend, form)


def _plain(x: torch.Tensor) -> bool:
    return x.dim() == 2 and x.dtype == torch.bfloat16 and x.is_contiguous()


def fuse(model: torch.nn.Module, family: Family) -> list[str]:
    """Fuse modules of a loaded model of vLLM's own, in place. Returns their names. A second call changes nothing."""
    if not family.covers("fused") or family.rollout != "vllm" or family.tower:  # vLLM's code of the last has not run so
        return []
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    quantized = {name: layer for layer, method in quantized_modules(model) for name in method.names}
    changed = []
    for prefix, module in model.named_modules():
        parent, _, leaf = hf_name(prefix, mapper).rpartition(".")
        if isinstance(module, FusedNorm | FusedSiluAndMul):
            continue
        kind: type
        if isinstance(module, RMSNorm) and _whole(module):
            kind, readers = FusedNorm, family.readers.get(leaf, ())
        elif isinstance(module, SiluAndMul):
            kind, readers = FusedSiluAndMul, ACTIVATIONS.get(leaf, ())
        else:
            continue
        layer = _one(quantized, [f"{parent}.{reader}" for reader in readers])
        backend = None if layer is None else layer.quant_method.format.producers(layer)
        if backend is None:
            continue
        swap(module, kind)
        module.__dict__.update(jetrl_reader=layer, jetrl_backend=backend)  # not a second registration of the layer
        changed.append(prefix)
    return changed


def _whole(norm: RMSNorm) -> bool:
    """Whether it normalizes its whole width with a BF16 weight."""
    return norm.has_weight and norm.variance_size_override is None and norm.weight.dtype == torch.bfloat16


def _one(quantized: dict[str, Any], names: Sequence[str]) -> Any:
    """The quantized layer into which vLLM fuses exactly these linears; None if there is none."""
    found = [quantized.get(name) for name in names]
    return found[0] if found and all(layer is found[0] for layer in found) else None


@torch.no_grad()
def keep_equal(model: torch.nn.Module) -> list[str]:
    """Compare each kind of fused module with the two steps that it replaces, on this device, once per width.

    Modules of a kind whose bytes differ run in two steps again, with a warning: trainer and rollout would disagree.

    Returns:
        The names of these modules.
    """
    apart = []
    for names, modules in _kinds(model):
        if all(_equal(modules[0], M) for M in TRIED):
            continue
        for module in modules:
            unswap(module)
        apart += names
        words = "jetrl_patch: %s and %d more would give other bytes in one launch with their quantization here; they take two"
        logger.warning(words, names[0], len(names) - 1)
    return apart


def _kinds(model: torch.nn.Module) -> list[tuple[list[str], list[Any]]]:
    """Return names and modules of each kind and width."""
    found: dict[tuple[bool, int], tuple[list[str], list[Any]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedNorm | FusedSiluAndMul):
            names, modules = found.setdefault((isinstance(module, FusedNorm), module.jetrl_reader.weight.shape[1]), ([], []))
            names.append(name)
            modules.append(module)
    return list(found.values())


def _equal(module: Any, M: int) -> bool:
    expected, found = _both(module, M)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(expected, found, strict=True))


def _both(module: Any, M: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The results of the two steps, and of the fused module."""
    weight = module.jetrl_reader.weight
    norm = isinstance(module, FusedNorm)
    generator = torch.Generator(weight.device).manual_seed(M)
    shape = (2, M, weight.shape[1]) if norm else (1, M, 2 * weight.shape[1])
    given = torch.randn(*shape, generator=generator, device=weight.device).to(torch.bfloat16)
    fused = module.forward(*given)
    kind: Any = FusedNorm if norm else FusedSiluAndMul
    plain = super(kind, module).forward(*given.clone())
    (rows, *sums), (y, *totals) = (fused, plain) if norm else ((fused,), (plain,))
    expected = module.jetrl_backend.quantize_activation(y, module.scale_format())
    return [t.contiguous() for t in (*expected, *totals)], [t.contiguous() for t in (*rows, *sums)]
