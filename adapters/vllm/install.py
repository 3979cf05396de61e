"""The engine's side of a weight sync: poison, load, check completeness, and digest what is in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from jetrl_patch import session
from jetrl_patch.adapters.vllm.experts import expert_modules
from jetrl_patch.adapters.vllm.fixes import unpacked
from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod, quantized_modules
from jetrl_patch.adapters.vllm.ops import ExactLinearMethod
from jetrl_patch.adapters.vllm.postload import absorb, made
from jetrl_patch.adapters.vllm.shards import Shard, hf_name, hf_names, shards_of
from jetrl_patch.errors import AuditError, SyncError, explain
from jetrl_patch.models.families import FAMILIES, LLAMA_LIKE
from jetrl_patch.patching.attached import Attached
from jetrl_patch.sync.digest import Pieces, Rect, as_2d
from jetrl_patch.sync.protocol import dtype_name

# ---- Digests of tensors that a sync sends unquantized: embeddings, ``lm_head``, norms, biases, routers, BF16 layers
# A parameter is compared if this rank holds it as it was sent: in the announced dtype or in FP32, and whole or as a rectangle
# that a ``Shard`` describes. The others (casts, transformed vision towers) are only checked for completeness.

#: shape and dtype of each tensor that a sync announced, by Hugging Face name
Sent = Mapping[str, tuple[tuple[int, ...], str]]

#: attributes that identify a gated delta net among vLLM's layers
_DELTA_NET = ("A_log", "dt_bias", "conv1d", "key_dim", "value_dim")


def add_plain(pieces: Pieces, model: torch.nn.Module, sent: Sent) -> None:
    """Add this rank's part of the tensors in ``sent``, under Hugging Face's names and coordinates."""
    mapper, packed = getattr(model, "hf_to_vllm_mapper", None), getattr(model, "packed_modules_mapping", {})
    names = {id(layer): method.names for layer, method in quantized_modules(model)}
    names |= {id(layer): guarded for layer, guarded in guarded_modules(model)}
    done = {f"{name}.weight" for held in names.values() for name in held}  # ``installed`` has them
    nets = {prefix for prefix, module in model.named_modules() if all(hasattr(module, key) for key in _DELTA_NET)}
    for prefix, module in model.named_modules():
        name = hf_name(prefix, mapper)
        if prefix in nets:
            found = _of_delta_net(module, name)
        elif prefix.removesuffix(".conv1d") in nets:
            continue  # its delta net has it
        elif isinstance(module, LinearBase):
            found = _of_linear(module, name, names.get(id(module)) or hf_names(name, packed), sent)
        elif isinstance(module, VocabParallelEmbedding):
            at = module.shard_indices
            rows = slice(at.org_vocab_start_index, at.org_vocab_end_index)
            found = iter([(f"{name}.weight", rows, slice(None), module.weight.data[: rows.stop - rows.start])])
        else:
            held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            found = ((f"{name}.{key}", slice(None), slice(None), tensor.data) for key, tensor in held)
        for tensor, rows, columns, data in found:
            if tensor in sent and tensor not in done:
                _add(pieces, tensor, sent[tensor], rows, columns, data)


_Piece = tuple[str, slice, slice, torch.Tensor]


def _of_delta_net(net: Any, name: str) -> Iterator[_Piece]:
    """Yield this rank's heads of a gated delta net: the decays (``A_log`` is FP32 in vLLM), and the convolution's q, k and v."""
    rank, ranks = net.tp_rank, net.tp_size
    for key in ("A_log", "dt_bias"):
        data = getattr(net, key).data
        yield f"{name}.{key}", slice(None), slice(rank * data.numel(), (rank + 1) * data.numel()), data
    weight, base, offset = unpacked(net.conv1d).data, 0, 0
    for size in (net.key_dim, net.key_dim, net.value_dim):
        local = size // ranks
        rows = slice(base + rank * local, base + (rank + 1) * local)
        yield f"{name}.conv1d.weight", rows, slice(None), weight[offset : offset + local]
        base, offset = base + size, offset + local


def _of_linear(layer: Any, prefix: str, names: list[str], sent: Sent) -> Iterator[_Piece]:
    """Yield the pieces of a linear layer's weight and bias, if one of them was sent, and its other parameters, whole."""
    for key, tensor in layer.named_parameters(recurse=False):
        if key not in ("weight", "bias"):  # a router's correction of scores
            yield f"{prefix}.{key}", slice(None), slice(None), tensor.data
    if not any(f"{name}.{key}" in sent for name in names for key in ("weight", "bias")):
        return
    weight, bias = (getattr(layer, key, None) for key in ("weight", "bias"))
    for shard, local in _rows(layer, names):
        rows, columns = slice(shard.row0, shard.row1), slice(shard.col0, shard.col1)
        if weight is not None:
            yield f"{shard.name}.weight", rows, columns, weight.data[local]
        if bias is not None:
            yield f"{shard.name}.bias", slice(None), rows, bias.data[local]


def _add(
    pieces: Pieces, name: str, announced: tuple[tuple[int, ...], str], rows: slice, columns: slice, data: torch.Tensor
) -> None:
    """Add one piece if it has the announced shape and dtype. ``slice(None)`` means all rows or columns.

    A tensor held in FP32 but sent in BF16 is compared in BF16, after a check that the cast loses nothing.
    """
    (shape, dtype), matrix = announced, as_2d(data)
    whole = as_2d(torch.empty(shape, device="meta")).shape
    (row0, row1, _), (col0, col1, _) = rows.indices(whole[0]), columns.indices(whole[1])
    if tuple(matrix.shape) != (row1 - row0, col1 - col0) or not matrix.numel():
        return
    if data.dtype == torch.float32 and dtype == "bfloat16":
        sent = data.to(torch.bfloat16)
        pieces.refuse((sent != data).any(), f"{name}: the engine holds FP32 values that are not those that were sent in BF16")
        data = sent
    if dtype_name(data.dtype) == dtype:
        pieces.add(name, row0, row1, col0, col1, data)


# ---- The precision guard: move FP8 layers of a running engine to BF16, before the weights arrive -

_GUARDED: Attached[list[str]] = Attached(
    "_jetrl_guarded", "the layer's method, which knew its Hugging Face names, is replaced by vLLM's"
)


def _takes(layers: list[str], missing: set[str]) -> bool:
    """Remove these layers from ``missing`` and return whether they were in it. Raises AuditError if only some were."""
    inside = [name for name in layers if name in missing]
    missing -= set(inside)
    if inside and len(inside) != len(layers):
        raise AuditError(
            f"the precision guard takes {', '.join(inside[:3])} ({len(inside)} in total) out of FP8, but vLLM computes all of "
            f"{', '.join(layers[:3])} ({len(layers)} in total) in one layer: they must change together. Leave guard_sqnr unset, "
            f"or exclude all of them."
        )
    return bool(inside)


def guarded_modules(model: torch.nn.Module) -> list[tuple[LinearBase, list[str]]]:
    """Return the linears that ``to_bf16`` changed, with their Hugging Face names, in module order."""
    linears = (module for module in model.modules() if isinstance(module, LinearBase))
    return [(linear, names) for linear in linears if (names := _GUARDED.get(linear)) is not None]


def _prepare(linear: RowParallelLinear | ColumnParallelLinear, method: QuantizedLinearMethod) -> Callable[[], None]:
    """Allocate a layer's BF16 weight. Returns the function that installs it."""
    bf16: Any = ExactLinearMethod() if method.exact else UnquantizedLinearMethod()
    old, holder = linear.weight, torch.nn.Module()
    with torch.device(old.device):
        bf16.create_weights(
            holder, old.shape[1], [old.shape[0]], linear.input_size, linear.output_size, torch.bfloat16,
            weight_loader=linear.weight_loader_v2,
        )  # fmt: skip

    def install(layer: Any) -> None:
        del layer.weight, layer.weight_scale_inv
        layer.weight = holder.weight
        layer.quant_method = bf16
        _GUARDED.set(layer, method.names)
        bf16.process_weights_after_loading(layer)  # vLLM then packs the weight after every load

    return functools.partial(install, linear)


# ---- The installer -------------------------------------------------------------------------------

class VllmInstaller:
    """Implements ``jetrl_patch.sync.receive.Installer`` for one worker's part of a built vLLM model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._loaded: set[str] = set()
        self._captured: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        self.seal()

    def quantized_layers(self) -> list[str]:
        """Return the Hugging Face names of the quantized layers. Experts are last, and include those of other ranks."""
        linears = [name for _, method in quantized_modules(self.model) for name in method.names]
        experts = (method for _, method in expert_modules(self.model) if method.plain is None)
        return linears + [name for method in experts for name in method.layers()]

    @torch.no_grad()
    def to_bf16(self, layers: Sequence[str]) -> None:
        """Move FP8 linears and experts (Hugging Face names) to BF16. Their weights are uninitialized until loaded.

        Raises AuditError, before any change, for a name that is no FP8 layer here, or only a part of a fused layer or of a
        block's experts.
        """
        missing = set(layers)
        changes: list[Callable[[], None]] = []  # each holds the memory that it needs
        for layer, method in quantized_modules(self.model):
            if _takes(method.names, missing):
                changes.append(_prepare(layer, method))
        for experts, own in expert_modules(self.model):
            if own.plain is None and _takes(own.layers(), missing):
                changes.append(functools.partial(own.to_bf16, experts, own.room_in_bf16(experts)))
        if missing:
            raise AuditError(
                f"the precision guard takes {', '.join(sorted(missing)[:3])} ({len(missing)} in total) out of FP8, but these are "
                f"not FP8 layers in this engine. Use the same model and JETRL_EXCLUDE on both sides."
            )
        for change in changes:
            change()
        session.register(guarded=layers)

    def stay_in_place(self) -> None:
        """Require later syncs to leave parameters and buffers in place, because captured graphs hold their addresses."""
        self._captured = _addresses(self.model)

    @torch.no_grad()
    def poison(self) -> None:
        """Fill every parameter with NaN, also quantized weights and scales. A parameter that stays unwritten then shows."""
        self._loaded = set()
        for layer, method in expert_modules(self.model):
            method.expect(layer)
        for parameter in self.model.parameters():
            if parameter.element_size() == 1:  # 0x7F is NaN in e4m3fn; int8 has no NaN, but its scales do
                parameter.data.view(torch.uint8).fill_(0x7F)
            elif parameter.is_floating_point():
                parameter.data.fill_(float("nan"))
        for linear, quantized in quantized_modules(self.model):
            quantized.format.written(linear)

    @torch.no_grad()
    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load whole Hugging Face tensors into this rank's part of the model.

        Drops the second name of a tied weight: ``lm_head``, if it is the embedding. vLLM skips it, and vLLM 0.30 refuses it in a
        call without the first name, which may be in another bucket. ``finish`` requires the first name.
        """
        mapper, first = getattr(self.model, "hf_to_vllm_mapper", None), dict(self.model.named_parameters())
        again = (name.rpartition(".") for name, _ in self.model.named_parameters(remove_duplicate=False) if name not in first)
        tied = {f"{hf_name(module, mapper)}.{leaf}" for module, _, leaf in again}
        kind = type(self.model).__name__
        family = next((family for family in FAMILIES.values() if family.causal_lm == kind), LLAMA_LIKE)
        stored = ((family.to_stored(name), weight) for name, weight in weights if name not in tied)
        self._loaded |= set(type(self.model).load_weights(self.model, stored))  # see ``writes``

    def finish(self) -> None:
        """Check completeness, and recompute what vLLM derives from the weights.

        Raises SyncError with the names of parameters that are missing, or that moved although captured graphs read them.
        """
        # Tied parameters are one object with two names: named_parameters() lists it once, load() may use either name.
        ids = {id(p) for name, p in self.model.named_parameters(remove_duplicate=False) if name in self._loaded}
        # If a weight arrived in BF16 and was quantized here, ``_loaded`` has its name but not that of its scales.
        experts = expert_modules(self.model)
        ids |= {id(getattr(layer, name)) for layer, method in experts for name in method.parameters} | made(self.model)
        missing = [
            name
            for name, p in self.model.named_parameters()
            if id(p) not in ids and not (name.endswith("_scale_inv") and not bool(p.isnan().any()))
        ]
        missing += [name for _, method in experts for name in method.missing()]
        if missing:
            left = f"{len(missing)} parameters of the engine unwritten: {', '.join(missing[:3])}"
            raise SyncError(f"the weight sync left {left}. Use the same model and versions on both sides.")
        absorb(self.model)
        now = _addresses(self.model)
        moved = [name for name, address in self._captured.items() if now.get(name) != address]
        if moved:
            what = "a weight sync into an engine with captured graphs"
            required = "every tensor at the address that the graphs read"
            found, fix = f"{len(moved)} elsewhere ({', '.join(moved[:3])})", "set enforce_eager=True and decode_graphs=False"
            raise SyncError(explain(what, required=required, found=found, fix=fix))
        self.seal()

    def seal(self) -> None:
        """Note the state of all parameters, for ``written_elsewhere``."""
        self._versions = _versions(self.model)

    def written_elsewhere(self) -> list[str]:
        """The parameters that something has written in place (not through ``.data``) or replaced since ``seal``."""
        now = _versions(self.model)
        return [name for name in {**now, **self._versions} if now.get(name) != self._versions.get(name)]

    @torch.no_grad()
    def installed(self, plain: Sent = MappingProxyType({})) -> list[Rect]:
        """Return digests of this rank's memory, under Hugging Face's names and coordinates.

        They cover quantized weights, their scales, layers and experts that the guard moved to BF16, and the tensors in ``plain``
        that are held as they were sent.
        """
        pieces = Pieces()
        add_plain(pieces, self.model, plain)
        for layer, method in quantized_modules(self.model):
            for shard, rows in _rows(layer, method.names):
                _add_weight(pieces, shard, layer.weight.data[rows])
                method.format.scales.add_to(pieces, shard, layer.weight_scale_inv.data[rows])
        for experts, method in expert_modules(self.model):
            for piece in method.pieces(experts):
                _add_weight(pieces, piece.shard, piece.weight)
                if piece.scale is not None:
                    method.format.scales.add_to(pieces, piece.shard, piece.scale)
        for layer, names in guarded_modules(self.model):
            for shard, rows in _rows(layer, names):
                _add_weight(pieces, shard, layer.weight.data[rows])
        return pieces.read()


def _rows(layer: LinearBase, names: list[str]) -> Iterator[tuple[Shard, slice]]:
    """Yield the parts of a linear with their rows of this rank's parameter."""
    for shard in shards_of(layer, names):
        yield shard, slice(shard.offset, shard.offset + shard.row1 - shard.row0)


def _versions(model: torch.nn.Module) -> dict[str, int]:
    """How often each parameter was written in place."""
    return {name: 0 if weight.is_inference() else weight._version for name, weight in model.named_parameters()}


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    """The address of each parameter and buffer of a model."""
    return {name: tensor.data_ptr() for tensors in (model.named_parameters(), model.named_buffers()) for name, tensor in tensors}


def _add_weight(pieces: Pieces, shard: Shard, weight_NK: torch.Tensor) -> None:
    pieces.add(f"{shard.name}.weight", shard.row0, shard.row1, shard.col0, shard.col1, weight_NK)
