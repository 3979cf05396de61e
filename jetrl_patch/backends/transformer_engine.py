"""TransformerEngine's linear layers and tensors: recognized by the modules of their classes, and used unchanged.

Only the functions that call its quantizer import TransformerEngine. With the recipe ``Float8BlockScaling``, its layers compute in
this project's format: e4m3, weights in 128x128 blocks, activations in 1x128 groups, all three GEMMs in FP8. A quantized weight
[N, K] holds ``rowwise_data`` uint8 [N, K] and ``rowwise_scale_inv`` FP32 [ceil(N/128), C]. C is ceil(K/128) rounded up to a
multiple of 4; the columns from ceil(K/128) on are padding.

Its formula is  scale = 448 / amax (1 where amax is 0);  q = e4m3(x * scale);  s = 1 / scale.  With "pow2", scale is rounded down
to a power of two, and bytes and scales equal those of ``quantize.py``, except for the scale of an all-zero block. With "fp32",
about one byte in a thousand differs by a rounding, so only TransformerEngine's own bytes are right.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.config.formats import FORMATS, ScaleFormat
from jetrl_patch.errors import ModelError, SyncError, explain
from jetrl_patch.kernels.formats import BLOCK, FP8, groups
from jetrl_patch.models.layers import is_quantized

PACKAGE = "transformer_engine"
#: its modules with GEMMs; Megatron's ``TEColumnParallelLinear`` and similar classes derive from them
LINEARS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
_E4M3 = "kFloat8E4M3"
_RECIPE = "Float8BlockScaling"


def _has_base(kind: type, *names: str) -> bool:
    """Whether the MRO has a TransformerEngine class with one of ``names``, or any of its classes if no name is given."""
    return any(c.__module__.split(".")[0] == PACKAGE and (not names or c.__name__ in names) for c in kind.__mro__)


def is_te_linear(module: nn.Module) -> bool:
    """Whether the module is a TransformerEngine layer with a GEMM. These are not ``nn.Linear``."""
    return _has_base(type(module), *LINEARS)


def is_te_tensor(tensor: object) -> bool:
    """Whether the tensor is a quantized tensor of TransformerEngine, of any recipe."""
    return _has_base(type(tensor))


def check_recipe(recipe: Any, scale_format: ScaleFormat, where: str) -> None:
    """Require the recipe ``Float8BlockScaling`` in this run's format.

    Args:
        recipe: an object of ``transformer_engine.common.recipe``, or None.
        where: the layer or place that the error names.

    Raises ModelError if there is no recipe, so the layer computes in BF16, or it is another one, with another format or block.
    """
    found = None
    if recipe is None:
        found = "no recipe, so it computes in BF16"
    elif not _has_base(type(recipe), _RECIPE):
        found = type(recipe).__name__
    else:
        wanted = {
            "fp8_format": "E4M3",
            "x_block_scaling_dim": 1,
            "w_block_scaling_dim": 2,
            "grad_block_scaling_dim": 1,
            "backward_override": None,
        }
        have = {name: getattr(recipe, name, None) for name in wanted}
        have["fp8_format"] = getattr(have["fp8_format"], "name", have["fp8_format"])
        for role in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            wanted |= {f"{role}.power_2_scale": FORMATS[scale_format].powers_of_two, f"{role}.amax_epsilon": 0.0}
            have |= {key: getattr(getattr(recipe, role), key.split(".")[1]) for key in wanted if key.startswith(role)}
        differs = [f"{name}={have[name]}" for name in wanted if have[name] != wanted[name]]
        found = f"{_RECIPE} with {', '.join(differs)}" if differs else None
    if found is not None:
        required = f"recipe {_RECIPE}, e4m3, 128x128 weight blocks, scale_format={scale_format!r}"
        variable = f"NVTE_FP8_BLOCK_SCALING_FP32_SCALES={int(not FORMATS[scale_format].powers_of_two)}"
        fix = f"use that recipe, and set {variable} before TransformerEngine is imported"
        raise ModelError(explain(f"TransformerEngine in {where}", required=required, found=found, fix=fix))


def left_alone(layers: Mapping[str, nn.Module], scale_format: ScaleFormat, backend: str) -> bool:
    """Whether the FP8 layers are TransformerEngine's and stay unchanged. False: all are plain ``nn.Linear``.

    Raises ModelError if the layers are of both kinds, the recipe is wrong, or ``backend`` does not compute this kind.
    """
    te = [name for name, module in layers.items() if is_te_linear(module)]
    plain = [name for name in layers if name not in set(te)]
    if te and plain:
        required = "all of TransformerEngine or all nn.Linear, because one backend computes them"
        found = f"{len(te)} of TransformerEngine (first: {te[0]}), {len(plain)} others (first: {plain[0]})"
        fix = "convert all of them, or keep the others in BF16 on both sides with exclude="
        raise ModelError(explain("FP8 layers", required=required, found=found, fix=fix))
    if bool(te) != (backend == "te"):
        asked = "nn.Linear layers" if te else "TransformerEngine's layers"
        found = f"TransformerEngine's layers (first: {te[0]})" if te else f"nn.Linear (first: {plain[0]})"
        fix = 'use backend="te"' if te else 'use another backend, such as "cublaslt", the same GEMM'
        raise ModelError(explain(f"backend={backend!r}", required=asked, found=found, fix=fix))
    for name in te:
        check_recipe(getattr(layers[name], "fp8_meta", {}).get("recipe"), scale_format, f"layer {name}")
    return bool(te)


def require_te_linears(model: nn.Module, expected: int) -> list[str]:
    """Names of TransformerEngine's layers in the transformer blocks.

    Raises ModelError if a block has another matrix, which would silently stay in BF16, or there are not ``expected`` layers.
    """
    te: list[str] = []
    others: list[str] = []
    for name, module in model.named_modules():
        if is_quantized(name, ()) and any(p.dim() > 1 for p in module.parameters(recurse=False)):
            (te if is_te_linear(module) else others).append(name)
    if others or len(te) != expected:
        required = f"{expected} layers of TransformerEngine in the transformer blocks and no other matrix"
        shown = f", and {len(others)} other layers with matrices (first: {others[0]})" if others else ""
        fix = "use Megatron's transformer_engine implementation for a dense model"
        raise ModelError(explain(f"layers of {type(model).__name__}", required=required, found=f"{len(te)}{shown}", fix=fix))
    return te


def take(layer: str, weight: Any, scale_format: ScaleFormat) -> Quantized:
    """The bytes and scales of a ``Float8BlockwiseQTensor``, unchanged but for the padding of the scales, which is cut off.

    Returns:
        Layout "blocks": e4m3fn [N, K] and FP32 [ceil(N/128), ceil(K/128)].

    Raises:
        SyncError: the tensor is of another class, block, dtype or orientation, it holds NaN or Inf, or a scale of format "pow2"
            is not a power of two. The message names the layer.
    """
    classes = ("Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage", "Float8BlockwiseQTensorBase")
    if not _has_base(type(weight), *classes):
        raise _cannot_take(layer, "a Float8BlockwiseQTensor", type(weight).__name__)
    have = weight.get_metadata()
    q, s = have["rowwise_data"], have["rowwise_scale_inv"]
    dtype = getattr(have["fp8_dtype"], "name", str(have["fp8_dtype"]))
    block = getattr(have["quantizer"], "block_len", BLOCK)
    if q is None or s is None:
        raise _cannot_take(layer, "row-wise data", "only column-wise data")
    if not have["is_2D_scaled"] or block != BLOCK or dtype != _E4M3:
        found = f"{dtype} in {f'{block}x{block} blocks' if have['is_2D_scaled'] else f'1x{block} groups'}"
        raise _cannot_take(layer, "e4m3 in 128x128 blocks", found)
    if q.dim() != 2 or q.dtype != torch.uint8 or tuple(q.shape) != tuple(weight.shape):
        raise _cannot_take(layer, f"uint8 {list(weight.shape)}", f"{q.dtype} {list(q.shape)}")
    N, K = q.shape
    G = groups(K)
    if s.dtype != torch.float32 or tuple(s.shape) not in ((groups(N), G), (groups(N), -(-G // 4) * 4)):
        asked = f"FP32 scales [{groups(N)}, {G}], with or without padding to a multiple of 4 columns"
        raise _cannot_take(layer, asked, f"{s.dtype} {list(s.shape)}")
    s_blocks = s[:, :G].contiguous()
    if bool(((q & 0x7F) == 0x7F).any()) or not bool(torch.isfinite(s_blocks).all()):
        raise SyncError(
            f"{layer} holds NaN or Inf, so no weight was synced. Check the loss and gradients of the last optimizer step."
        )
    if FORMATS[scale_format].powers_of_two and bool((s_blocks.view(torch.int32) & 0x7FFFFF).any()):
        raise _cannot_take(layer, 'power-of-two scales (scale_format="pow2")', "other scales")
    return Quantized(q.contiguous().view(FP8), s_blocks, "blocks", scale_format)


def quantize_weight(layer: str, weight_NK: Tensor, scale_format: ScaleFormat) -> Quantized:
    """Quantize a BF16 parameter as TransformerEngine's layer does, with its quantizer.

    Raises SyncError as ``take``.
    """
    return take(layer, _quantizer(scale_format, 2)(weight_NK.to(torch.bfloat16).contiguous()), scale_format)


def quantize_rows(x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
    """Quantize in 1x128 groups with TransformerEngine's quantizer, whose scales are [G, M padded to 4].

    Returns:
        Layout "rows": e4m3fn [M, K] and FP32 [M, G].

    Raises ModelError if the quantizer returns other shapes.
    """
    M, K = x_MK.shape
    have = _quantizer(scale_format, 1)(x_MK.contiguous()).get_metadata()
    q, s_GM = have["rowwise_data"], have["rowwise_scale_inv"]
    if tuple(q.shape) != (M, K) or s_GM.shape[0] != groups(K) or s_GM.shape[1] < M:
        what = f"TransformerEngine's 1x128 quantizer of [{M}, {K}]"
        required, found = f"[{M}, {K}] and [{groups(K)}, {M} or more]", f"{list(q.shape)} and {list(s_GM.shape)}"
        raise ModelError(explain(what, required=required, found=found, fix='use scale_format="pow2"'))
    return Quantized(q.view(FP8), s_GM[:, :M].t(), "rows", scale_format)


def _quantizer(scale_format: ScaleFormat, dims: int) -> Any:
    quantizers = importlib.import_module(f"{PACKAGE}.pytorch.tensor.float8_blockwise_tensor")
    return quantizers.Float8BlockQuantizer(
        getattr(importlib.import_module(f"{PACKAGE}_torch").DType, _E4M3),
        rowwise=True,
        columnwise=False,
        amax_epsilon=0.0,
        force_pow_2_scales=FORMATS[scale_format].powers_of_two,
        block_scaling_dim=dims,
    )


def _cannot_take(layer: str, asked: str, found: str) -> SyncError:
    fix = "use fp8_recipe=blockwise, or keep the parameters in BF16, which the sync then quantizes"
    return SyncError(explain(f"TransformerEngine's weight of {layer}", required=asked, found=found, fix=fix))
