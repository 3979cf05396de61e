"""Convert a Hugging Face model in place: linear layers, experts, weights that FSDP2 gathers in FP8. Count its share of FP8."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jetrl_patch.backends.transformer_engine import is_te_linear, left_alone
from jetrl_patch.config.formats import FORMATS, ScaleFormat
from jetrl_patch.errors import UNQUANTIZED, ModelError, explain
from jetrl_patch.fp8.experts import Experts, Matrix
from jetrl_patch.fp8.gather import Fp8Shard
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State, LastInput, keep_gathered_out_of_graphs
from jetrl_patch.fp8.mixture import WHOLE, ExpertSplit, PlainProducts
from jetrl_patch.kernels.formats import BLOCK
from jetrl_patch.models.families import FAMILIES
from jetrl_patch.models.layers import check_splits, experts_quantized, is_cut, is_quantized, is_row_parallel
from jetrl_patch.models.structure import PROJECTIONS, matrices_of, units

if TYPE_CHECKING:
    from jetrl_patch.config import Config


# ---- Convert the linear layers of a Hugging Face model to ``Fp8Linear``, in place ----------------

def select_layers(model: nn.Module, exclude: Sequence[str] = ()) -> list[str]:
    """Names of the FP8 layers in model order: those to convert, those of experts, and TransformerEngine's own.

    Raises:
        ModelError: there is nothing to quantize; a pattern of ``exclude`` matches nothing, or only some experts of a block; a
            layer is neither a plain ``nn.Linear`` nor TransformerEngine's (another quantization, LoRA); or a block holds stacked
            matrices that are not experts.
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
            f"transformer block (`layers.N.`) and not excluded by exclude={list(exclude)}. "
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
        kinds = ", ".join(sorted({type(linears[name]).__name__ for name in foreign}))
        found = f"{len(foreign)} of type {kinds} (first: {foreign[0]})"
        fix = "switch off the other quantization or LoRA, or exclude these layers with exclude="
        raise ModelError(explain("FP8 layers", required="plain nn.Linear", found=found, fix=fix))
    return chosen


def _refuse_stacks(model: nn.Module, experts: Collection[str]) -> None:
    """Raise ModelError for a 3-D parameter of a block that does not hold experts, because its matrices would stay in BF16."""
    for owner, module in model.named_modules():
        if owner in experts or isinstance(module, nn.modules.conv._ConvNd) or is_te_linear(module):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            shape = whole_shape(parameter)
            if len(shape) == 3 and is_quantized(owner, ()):
                required = "every matrix of a transformer block in a linear layer (these experts are not supported)"
                what, found = f"FP8 layers of {type(model).__name__}", f"{owner}.{name} of shape {list(shape)}"
                raise ModelError(explain(what, required=required, found=found, fix=f"use a dense model, or {UNQUANTIZED}"))


def split_layers(model: nn.Module, config: Config, rollout_tp: int, rollout_ep: int = 1) -> tuple[list[str], list[str]]:
    """Names of the quantized layers, and of those that ``on_cut="bf16"`` leaves in BF16, in model order.

    Args:
        rollout_tp: the rollout's tensor-parallel size. rollout_ep: its expert-parallel size.

    Raises:
        ModelError: as ``select_layers`` and ``check_experts``; or a split cuts a block, and ``on_cut`` is "refuse" or the layer
            is TransformerEngine's, which stays in FP8.
        ConfigError: as ``ExpertSplit.of``.
    """
    names, modules = select_layers(model, config.exclude), dict(model.named_modules())
    check_experts(model, (), ExpertSplit.of(rollout_tp, rollout_ep))
    if config.channelwise:
        return names, []  # one scale per row: no split cuts a block
    widths = {name: getattr(modules[name], "in_features", 0) for name in names if name in modules}
    if config.on_cut == "refuse":
        check_splits(widths.items(), rollout_tp, config.scales)
    cut = [name for name, k in widths.items() if is_cut(name, k, rollout_tp, config.scales)]
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

    Reads no weight, so it works on meta tensors and on ZeRO-3's emptied parameters. TransformerEngine's layers already compute in
    this format and stay as they are, or are refused. Returns the names of the FP8 modules.

    Args:
        backend: a resolved name from ``backends``, not "auto".
        k_splits: the rollout's tensor-parallel size, which must not cut a block.
        names: the layers to convert; by default those of ``select_layers``.
        rollout_ep: the rollout's expert-parallel size.
        exact: form the FP32 sums that the rollout's ranks add in rank order, and give experts in BF16 products with independent
            rows.

    Raises ModelError as ``select_layers`` and ``transformer_engine.left_alone``, or ``k_splits`` cuts a block.
    """
    names = select_layers(model, exclude) if names is None else list(names)
    wanted = set(names)
    modules = {name: module for name, module in model.named_modules() if name in wanted}
    widths = ((name, getattr(module, "in_features", 0)) for name, module in modules.items())
    check_splits(widths, k_splits, FORMATS[scale_format])
    if left_alone(modules, scale_format, backend):
        return names
    split = ExpertSplit.of(k_splits, rollout_ep)
    in_fp8 = units(names)
    for name, module in expert_modules(model).items():
        count, plain = whole_shape(module.gate_up_proj)[0], None if name in in_fp8 else PlainProducts(exact)
        setattr(module, ATTRIBUTE, Experts(count, scale_format, backend, split if exact else WHOLE, plain))
    inputs: defaultdict[str, LastInput] = defaultdict(LastInput)
    for name, module in modules.items():
        module.__class__ = Fp8Linear
        splits = k_splits if exact and is_row_parallel(name) else 1
        module.fp8 = Fp8State(scale_format, backend, splits, inputs[name.rpartition(".")[0]])
    return names


# ---- Find the experts of a Hugging Face model, and give them their FP8 state ---------------------
# transformers keeps the experts of a block in one module with two parameters, ``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H,
# I]``. Everywhere else (checkpoints, exclude patterns, the weight sync) an expert is three layers: ``….experts.3.gate_proj``,
# ``up_proj`` and ``down_proj``.

#: attribute of a module of experts for its ``Experts``
ATTRIBUTE = "jetrl_experts"


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold the experts of a block, by name. Recognized by class, so part of a model is enough."""
    kinds = {name for family in FAMILIES.values() for name in family.experts}
    return {name: module for name, module in model.named_modules() if type(module).__name__ in kinds}


def experts_of(module: Any) -> Experts | None:
    """The ``Experts`` that ``swap_linears`` gave a module, or None."""
    return getattr(module, ATTRIBUTE, None)


def layers_of(name: str, module: Any) -> list[str]:
    """The names of the layers in a module of experts."""
    return matrices_of(name, whole_shape(module.gate_up_proj)[0])


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """The shape of a parameter; under ZeRO-3, that of the whole parameter. Empty for None."""
    return () if parameter is None else tuple(getattr(parameter, "ds_shape", parameter.shape))


def check_experts(model: nn.Module, exclude: Iterable[str], split: ExpertSplit = WHOLE) -> None:
    """Raise ModelError if ``exclude`` names only some experts of a block, or the rollout cannot split them like this."""
    for name, module in expert_modules(model).items():
        experts, _, width = whole_shape(module.down_proj)
        experts_quantized(name, experts, tuple(exclude))
        split.check(f"the experts of {type(model).__name__}", experts, width)


def _attached(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    for name, module in model.named_modules():
        own = experts_of(module)
        if own is not None:
            yield name, own


def expert_matrices(model: nn.Module) -> dict[str, Matrix]:
    """The matrices of all experts in FP8 that ``swap_linears`` has seen, by layer name."""
    return {f"{name}.{leaf}": matrix for name, own in _attached(model) for leaf, matrix in own.matrices()}


def expert_states(model: nn.Module) -> Iterator[tuple[str, Fp8State]]:
    """Yield each state that may hold quantized weights of experts, with the name of their module."""
    return ((name, state) for name, own in _attached(model) for state in own.states())


def stored_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The floating-point buffers in a checkpoint (a router's correction bias, FP32): name -> module and attribute."""
    found = {}
    for name, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set and buffer.is_floating_point():
                found[f"{name}.{leaf}"] = (module, leaf)
    return found


def per_expert(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the single experts in a parameter ``….experts.gate_up_proj`` or ``….experts.down_proj``.

    Args:
        name: of the parameter. Any other tensor is yielded as it is.
        weight: [E, 2I, H] or [E, H, I].
    """
    stem, _, leaf = name.rpartition(".")
    if weight.dim() != 3 or not stem.endswith(".experts") or leaf not in ("gate_up_proj", "down_proj"):
        yield name, weight
        return
    parts = PROJECTIONS[:2] if leaf == "gate_up_proj" else PROJECTIONS[2:]
    for expert in range(weight.shape[0]):
        for part, matrix in zip(parts, weight[expert].chunk(len(parts), 0), strict=True):
            yield f"{stem}.{expert}.{part}.weight", matrix


def shapes_per_expert(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """``per_expert`` for shapes instead of tensors."""
    return {
        own: tuple(part.shape)
        for name, shape in shapes.items()
        for own, part in per_expert(name, torch.empty(shape, device="meta"))
    }


# ---- Select the layers whose weights FSDP2 gathers in FP8 (``gather.py``) ------------------------

logger = logging.getLogger(__name__)


def gather_in_fp8(model: nn.Module, names: Sequence[str], shards: int) -> list[str]:
    """Make FSDP2 gather the weights of these ``Fp8Linear`` layers in FP8, and return their names. Call it before ``fully_shard``.

    A layer whose rows do not divide into ``shards`` equal parts of whole blocks, one for each rank, is still gathered in BF16,
    and every rank quantizes it; one log line names these layers. With one shard there is no all-gather, so this does nothing.

    Raises ModelError if experts are among the layers, which FSDP gathers in one parameter per block.
    """
    if shards == 1:
        return []
    modules = dict(model.named_modules())
    stacked = [name for name in names if name not in modules]
    if stacked:
        fix = "set fp8_all_gather=False"
        raise ModelError(explain("fp8_all_gather", required="FP8 layers that are modules", found=stacked[0], fix=fix))
    keep_gathered_out_of_graphs()
    done, left = [], []
    for name in names:
        module: Any = modules[name]
        if module.out_features % (shards * BLOCK):
            left.append(name)
            continue
        weight, state = module.weight, module.fp8
        shard = Fp8Shard(weight.detach(), state.scale_format, state.backend_name)
        module.weight = nn.Parameter(shard, requires_grad=weight.requires_grad)
        done.append(name)
    if left and not (dist.is_initialized() and dist.get_rank()):
        logger.warning(
            "jetrl_patch: %d of %d FP8 layers are gathered in BF16, because %d equal shards of their rows would cut "
            "a block of %d: %s",
            len(left), len(left) + len(done), shards, BLOCK, ", ".join(left),
        )  # fmt: skip
    return done


# ---- How much of a model is FP8: of its parameters, and of the forward FLOPs of a token ----------

class Share(NamedTuple):
    """Shares from 0 to 1.

    Attributes:
        parameters: of all parameters.
        flops: of a token's forward FLOPs in products with weights. Attention's own products, whose number depends on the context,
            do not count.
        inside: the same without ``lm_head``.
    """

    parameters: float
    flops: float
    inside: float

    def __str__(self) -> str:
        return (
            f"FP8: {self.parameters:.1%} of the parameters, {self.flops:.1%} of a token's forward FLOPs in products with "
            f"weights ({self.inside:.1%} without lm_head)"
        )


def share_of(model: Any, names: Collection[str]) -> Share:
    """Count a Hugging Face model, which may be on the meta device. ``names`` are its FP8 layers (``select_layers``)."""
    chosen, experts, head = set(names), expert_modules(model), model.get_output_embeddings()
    fp8_parameters = fp8_flops = flops = outside = 0.0
    for name, module in model.named_modules():
        if name in experts:
            size = _size(module.gate_up_proj) + _size(module.down_proj)
            used = 2.0 * size * model.config.get_text_config().num_experts_per_tok / whole_shape(module.gate_up_proj)[0]
            quantized = layers_of(name, module)[0] in chosen
        elif not isinstance(module, nn.Embedding) and len(whole_shape(getattr(module, "weight", None))) == 2:
            size = _size(module.weight)
            used, quantized = 2.0 * size, name in chosen
        else:
            continue
        flops += used
        outside += used if module is head else 0.0
        if quantized:
            fp8_parameters += size
            fp8_flops += used
    total = sum(_size(parameter) for parameter in model.parameters())
    return Share(fp8_parameters / total, fp8_flops / flops, fp8_flops / (flops - outside))


def _size(parameter: Any) -> int:
    return math.prod(whole_shape(parameter))
