"""Convert each tensor of a checkpoint to BF16, or to block FP8 as in DeepSeek's checkpoints.

Block FP8 is ``layer.weight`` e4m3 [N, K] and ``layer.weight_scale_inv`` FP32 [ceil(N/128), ceil(K/128)]. The trainer's own
quantizer makes them from the BF16 value, so the bytes are those that the trainer computed with. An expert is three such layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from jetrl_patch.errors import ConfigError, ModelError, explain
from jetrl_patch.families import FAMILIES, LLAMA_LIKE, MERGED
from jetrl_patch.fp8.convert import select_layers
from jetrl_patch.fp8.expert_layers import expert_modules, stored_buffers, whole_shape
from jetrl_patch.fp8.formats import BLOCK, ScaleFormat
from jetrl_patch.fp8.quantize import dequantize_weight, expand_weight_scale, quantize_weight
from jetrl_patch.units import units

__all__ = ["SCALE_SUFFIX", "Chosen", "Format", "check_error", "choose", "convert", "quantization_config"]

Format = Literal["bf16", "fp8"]
SCALE_SUFFIX = "_scale_inv"


class Chosen(NamedTuple):
    """What becomes of a model's tensors.

    Attributes:
        layers: names of the layers that become FP8, as the checkpoint has them.
        left: modules that stay in BF16 and that a loader would take for FP8, by every name that one knows them by.
        fp32: tensors that stay in FP32: the buffers of a mixture, as in its checkpoint.
    """

    layers: dict[str, None]
    left: list[str]
    fp32: frozenset[str]


def choose(model: Any, format: Format, exclude: Sequence[str]) -> Chosen:
    """Choose the layers that become FP8, so that stock vLLM and transformers can load the result.

    Raises:
        ModelError: as ``select_layers``.
        ConfigError: of the layers that vLLM merges, only some would be FP8, or one ends inside a block.
    """
    experts = expert_modules(model)
    family = FAMILIES.get(model.config.model_type, LLAMA_LIKE)
    fp32 = frozenset(family.to_stored(name) for name in stored_buffers(model)) if experts else frozenset()
    if format == "bf16":
        return Chosen({}, [], fp32)
    chosen = select_layers(model, exclude)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for merged in MERGED:  # all but the last must end on a block boundary
        for name in [name for name in linears if name.rsplit(".", 1)[-1] == merged[0]]:
            prefix = name.removesuffix(merged[0])
            group = [prefix + part for part in merged if prefix + part in linears]
            fp8 = [name for name in group if name in chosen]
            if fp8 and fp8 != group:
                _refuse(", ".join(group), "all or none of them in FP8", f"only {', '.join(fp8)}", merged)
            for layer in fp8[:-1]:
                rows = linears[layer].out_features
                if rows % BLOCK:
                    _refuse(layer, f"a multiple of {BLOCK} rows, as vLLM merges it", f"{rows} rows", merged)
    inside = units(chosen)
    for name, module in experts.items():
        width = whole_shape(module.down_proj)[2]
        if name in inside and width % BLOCK:
            _refuse(name, f"a multiple of {BLOCK} rows of gate and up, as vLLM merges them", f"{width} rows", ("experts",))
    # vLLM's routers are linear layers, and transformers' are not
    routers = [name for name, module in model.named_modules() if family.router and type(module).__name__ == family.router]
    left = [name for name in (*linears, *routers, *experts) if name not in inside]
    both = dict.fromkeys(name for ours in left for name in (ours, family.to_stored(ours)))
    return Chosen(dict.fromkeys(map(family.to_stored, chosen)), list(both), fp32)


def _refuse(what: str, required: str, found: str, merged: Sequence[str]) -> None:
    leave = " ".join(f"--exclude {part}" for part in merged)
    fix = f"keep the merged layers in BF16 with {leave}"
    raise ConfigError(explain(f"FP8 export of {what}", required=required, found=found, fix=fix))


def quantization_config(left: Sequence[str]) -> dict[str, Any]:
    """The entry of config.json that vLLM and transformers read."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(left),
    }


def convert(name: str, tensor: Tensor, chosen: Chosen, scale_format: ScaleFormat) -> list[tuple[str, Tensor]]:
    """Return the tensors written for one source tensor. Raises ModelError, with its name, for a NaN or Inf."""
    if not tensor.is_floating_point():
        return [(name, tensor)]
    value = tensor.float() if name in chosen.fp32 else tensor.to(torch.bfloat16)
    if not bool(torch.isfinite(value).all()):
        bad = int((~torch.isfinite(value)).sum())
        raise ModelError(
            explain(
                f"tensor {name}",
                required="finite values",
                found=f"{bad} NaN or Inf among {value.numel()} in {'FP32' if name in chosen.fp32 else 'BF16'}",
                fix="export an earlier checkpoint of the run",
            )
        )
    if name.removesuffix(".weight") not in chosen.layers:
        return [(name, value)]
    q, s_blocks = quantize_weight(value, scale_format)
    return [(name, q), (name + SCALE_SUFFIX, s_blocks)]


def check_error(name: str, tensor: Tensor, q: Tensor, s_blocks: Tensor) -> float:
    """Check that each value is within half an e4m3 step, and return the SQNR in dB (infinite if nothing is lost).

    A step is 2^-3 of the power of two at or below the value, and at least 2^-9 of the scale. Raises ModelError.
    """
    value = tensor.to(torch.bfloat16).double()
    error = (dequantize_weight(q, s_blocks, torch.float32).double() - value).abs()
    s_NK = expand_weight_scale(s_blocks, q.shape[0]).repeat_interleave(BLOCK, 1)[:, : q.shape[1]].double()
    allowed = torch.maximum(value.abs() * 2.0**-4, s_NK * 2.0**-10) * (1 + 1e-6)
    if not bool((error <= allowed).all()):
        worst = float((error / allowed).max())
        raise ModelError(
            explain(
                f"{name} on disk",
                required="an error within half a step of e4m3",
                found=f"{worst:.3g} times that",
                fix="report this as a bug of jetrl_patch",
            )
        )
    noise, signal = float(error.pow(2).sum()), float(value.pow(2).sum())
    return float("inf") if noise == 0 else 10 * float(torch.log10(torch.tensor(signal / noise)))
