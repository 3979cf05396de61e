"""Convert the linear layers of a Hugging Face model to ``Fp8Linear``, in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch import nn

from jetrl_patch.errors import UNQUANTIZED, ModelError, explain
from jetrl_patch.fp8.expert_layers import attach_experts, check_experts, expert_modules, layers_of, whole_shape
from jetrl_patch.fp8.formats import ScaleFormat
from jetrl_patch.fp8.layers import check_splits, is_cut, is_quantized, is_row_parallel
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.fp8.ranks import WHOLE, ExpertSplit
from jetrl_patch.fp8.transformer_engine import is_te_linear, left_alone

if TYPE_CHECKING:
    from jetrl_patch.config import Config


def select_layers(model: nn.Module, exclude: Sequence[str] = ()) -> list[str]:
    """Names of the FP8 layers in model order: those to convert, those of experts, and TransformerEngine's own.

    Raises:
        ModelError: there is nothing to quantize, a pattern of ``exclude`` matches nothing, a layer is neither a plain
            ``nn.Linear`` nor TransformerEngine's (another quantization, LoRA), or a block holds stacked matrices that are no
            experts, or experts of which ``exclude`` takes out some.
    """
    experts = expert_modules(model)
    _refuse_stacks(model, experts)
    linears: dict[str, nn.Module | None] = {}
    for name, module in model.named_modules():
        if name in experts:
            linears |= dict.fromkeys(layers_of(name, module))
        elif isinstance(module, nn.Linear) or is_te_linear(module):
            linears[name] = module
    check_experts(model, exclude)
    chosen = [name for name in linears if is_quantized(name, exclude)]
    if not chosen:
        raise ModelError(
            f"{type(model).__name__} has no nn.Linear to quantize: none of its {len(linears)} linear layers is in a "
            f"transformer block (`layers.N.`) and left over by exclude={list(exclude)}. "
            "Exclude fewer layers, or check that the model is a decoder."
        )
    for pattern in exclude:
        if not any(not is_quantized(name, (pattern,)) and is_quantized(name, ()) for name in linears):
            raise ModelError(
                f"exclude pattern {pattern!r} matches no FP8 layer. "
                f"Drop it, or write whole parts of a module name such as {chosen[0]!r}."
            )
    plain = (nn.Linear, Fp8Linear, type(None))
    foreign = [n for n in chosen if type(linears[n]) not in plain and not is_te_linear(linears[n])]
    if foreign:
        kinds = sorted({type(linears[name]).__name__ for name in foreign})
        raise ModelError(
            explain(
                "FP8 layers",
                required="plain nn.Linear",
                found=f"{len(foreign)} of type {', '.join(kinds)} (first: {foreign[0]})",
                fix="switch off the other quantization or LoRA, or exclude these layers with exclude=",
            )
        )
    return chosen


def _refuse_stacks(model: nn.Module, experts: Collection[str]) -> None:
    """Raise ModelError for matrices that a block keeps in one 3-D parameter and that are no experts: they would stay in BF16."""
    for owner, module in model.named_modules():
        if owner in experts or isinstance(module, nn.modules.conv._ConvNd) or is_te_linear(module):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            shape = whole_shape(parameter)
            if len(shape) == 3 and is_quantized(owner, ()):
                raise ModelError(
                    explain(
                        f"FP8 layers of {type(model).__name__}",
                        required="every matrix of a transformer block in a linear layer (these experts are not supported)",
                        found=f"{owner}.{name} of shape {list(shape)}",
                        fix=f"use a dense model, or {UNQUANTIZED}",
                    )
                )


def split_layers(model: nn.Module, config: Config, rollout_tp: int, rollout_ep: int = 1) -> tuple[list[str], list[str]]:
    """Names of the layers that are quantized, and of those that ``on_cut="bf16"`` leaves in BF16, in model order.

    Args:
        rollout_tp: the rollout's tensor-parallel size. rollout_ep: its expert-parallel size.

    Raises:
        ModelError: as ``select_layers`` and ``check_experts``; a split cuts a block and ``on_cut`` is "refuse"; or such a layer
            is TransformerEngine's, which stays in FP8.
        ConfigError: as ``ExpertSplit.of``.
    """
    names, modules = select_layers(model, config.exclude), dict(model.named_modules())
    check_experts(model, (), ExpertSplit.of(rollout_tp, rollout_ep))
    if config.channelwise:
        return names, []  # one scale per row: no split cuts a block
    widths = {name: getattr(modules[name], "in_features", 0) for name in names if name in modules}
    if config.on_cut == "refuse":
        check_splits(widths.items(), rollout_tp)
    cut = [name for name, k in widths.items() if is_cut(name, k, rollout_tp)]
    theirs = [name for name in cut if is_te_linear(modules[name])]
    if theirs:
        found, fix = f"TransformerEngine's {theirs[0]}", "use another tensor-parallel size"
        raise ModelError(explain("on_cut='bf16'", required="layers that can stay in BF16", found=found, fix=fix))
    return [name for name in names if name not in cut], cut


def swap_linears(
    model: nn.Module,
    exclude: Sequence[str] = (),
    scale_format: ScaleFormat = "pow2",
    backend: str = "torch",
    k_splits: int = 1,
    names: Sequence[str] | None = None,
    rollout_ep: int = 1,
    exact: bool = False,
) -> list[str]:
    """Turn every selected layer into an ``Fp8Linear``, and give experts their state. Parameters and names do not change.

    TransformerEngine's layers are left as they are: they already compute in this format, or are refused.

    Works on meta tensors and on ZeRO-3's emptied parameters, because it reads no weight.

    Args:
        backend: a resolved name from ``fp8.backends``, not "auto".
        k_splits: the rollout's tensor-parallel size, which must not cut a block.
        names: the layers to turn; by default those that ``select_layers`` chooses.
        rollout_ep: the rollout's expert-parallel size.
        exact: whether the rollout's ranks add FP32 sums in rank order, which the trainer's layers and experts then form too, and
            whether experts that stay in BF16 have products with independent rows.

    Returns:
        The names of the FP8 modules.

    Raises:
        ModelError: as ``select_layers`` and ``transformer_engine.left_alone``, or ``k_splits`` cuts a block.
    """
    names = select_layers(model, exclude) if names is None else list(names)
    wanted = set(names)
    modules = {name: module for name, module in model.named_modules() if name in wanted}
    check_splits(((name, getattr(module, "in_features", 0)) for name, module in modules.items()), k_splits)
    if left_alone(modules, scale_format, backend):
        return names
    split = ExpertSplit.of(k_splits, rollout_ep)
    attach_experts(model, names, scale_format, backend, split if exact else WHOLE, exact)
    for name, module in modules.items():
        module.__class__ = Fp8Linear
        module.fp8 = Fp8State(scale_format, backend, k_splits if exact and is_row_parallel(name) else 1)
    return names
