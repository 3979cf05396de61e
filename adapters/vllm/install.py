"""The engine's end of a weight sync: poison, load, check that nothing is missing, and say what now lies in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from jetrl_patch import runtime
from jetrl_patch.adapters.vllm import guard
from jetrl_patch.adapters.vllm.quant import quantized_modules
from jetrl_patch.adapters.vllm.shards import Shard, shards_of
from jetrl_patch.errors import SyncError
from jetrl_patch.fp8.formats import BLOCK
from jetrl_patch.sync.digest import Rect, digest

__all__ = ["VllmInstaller"]


class VllmInstaller:
    """Implements ``jetrl_patch.sync.receive.Installer`` for one worker's part of a vLLM model.

    Args:
        model: the built vLLM model (``model_runner.get_model()``).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._loaded: set[str] = set()

    def quantized_layers(self) -> list[str]:
        """Hugging Face module names of the FP8 linears."""
        return [name for _, method in quantized_modules(self.model) for name in method.names]

    @torch.no_grad()
    def to_bf16(self, layers: Sequence[str]) -> None:
        """The precision guard's decision, carried out here; what the engine had cached of graphs does not exist (eager)."""
        guard.to_bf16(self.model, layers)
        runtime.register_guarded(layers)

    @torch.no_grad()
    def poison(self) -> None:
        """NaN into every parameter, FP8 weights and scales included, so that an unwritten one explodes."""
        self._loaded = set()
        for parameter in self.model.parameters():
            if parameter.element_size() == 1:  # e4m3fn: the byte 0x7F is NaN; int8 has none, its scales are NaN
                parameter.data.view(torch.uint8).fill_(0x7F)
            elif parameter.is_floating_point():
                parameter.data.fill_(float("nan"))

    @torch.no_grad()
    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Whole Hugging Face tensors into this rank's part of the model."""
        self._loaded |= set(self.model.load_weights(iter(weights)))

    def finish(self) -> None:
        """Nothing is repacked, so only completeness is left. Raises SyncError with the parameters still missing."""
        # Tied parameters are the same object under two names; named_parameters() lists it once, load under either.
        ids = {id(p) for name, p in self.model.named_parameters(remove_duplicate=False) if name in self._loaded}
        # A weight that came in BF16 was quantized here, scales included, under the one name of the weight.
        missing = [
            name
            for name, p in self.model.named_parameters()
            if id(p) not in ids and not (name.endswith("_scale_inv") and not bool(p.isnan().any()))
        ]
        if missing:
            raise SyncError(
                f"the weight sync left {len(missing)} parameters of the engine unwritten: {', '.join(missing[:10])}"
            )

    @torch.no_grad()
    def installed(self) -> list[Rect]:
        """Digests of FP8 weights and block scales, and of weights that the guard took out of FP8, as they lie here.

        In Hugging Face names and coordinates.
        """
        rects: list[Rect] = []
        for layer, method in quantized_modules(self.model):
            for shard in method.shards(layer):
                rows = slice(shard.offset, shard.offset + shard.row1 - shard.row0)
                rects.append(_weight(shard, layer.weight.data[rows]))
                scales = _row_scales if method.channelwise else _scales
                rects.extend(scales(shard, layer.weight_scale_inv.data[rows]))
        for layer, names in guard.guarded_modules(self.model):
            for shard in shards_of(layer, names):
                rows = slice(shard.offset, shard.offset + shard.row1 - shard.row0)
                rects.append(_weight(shard, layer.weight.data[rows]))
        return rects


def _weight(shard: Shard, weight_NK: torch.Tensor) -> Rect:
    value = digest(weight_NK, shard.row0, shard.col0)
    return Rect(f"{shard.name}.weight", shard.row0, shard.row1, shard.col0, shard.col1, value)


def _row_scales(shard: Shard, scale_N1: torch.Tensor) -> list[Rect]:
    """One scale per row; ranks that share a row along K hold the same."""
    value = digest(scale_N1, shard.row0)
    return [Rect(f"{shard.name}.weight_scale_inv", shard.row0, shard.row1, 0, 1, value)]


def _scales(shard: Shard, scale_NG: torch.Tensor) -> list[Rect]:
    """Per-row scales as block scales. A block that ranks share is a rectangle of its own, equal on all of them.

    Raises SyncError if two rows of one block differ.
    """
    g0 = shard.col0 // BLOCK
    g1 = g0 + scale_NG.shape[1]
    first, last = shard.row0 // BLOCK, -(-shard.row1 // BLOCK)
    tops = [max(block * BLOCK, shard.row0) - shard.row0 for block in range(first, last)]
    blocks = scale_NG[tops]
    sizes = [min((block + 1) * BLOCK, shard.row1) - max(block * BLOCK, shard.row0) for block in range(first, last)]
    expanded = blocks.repeat_interleave(torch.tensor(sizes, device=blocks.device), 0)
    if not torch.equal(expanded.view(torch.int32), scale_NG.view(torch.int32)):
        raise SyncError(f"{shard.name}.weight_scale_inv: rows of one 128-block hold different scales in the engine")
    edges = {first, last}
    if shard.row0 % BLOCK:
        edges.add(first + 1)
    if shard.row1 % BLOCK and shard.row1 != shard.rows:
        edges.add(last - 1)
    cuts = sorted(edges)
    return [
        Rect(f"{shard.name}.weight_scale_inv", b0, b1, g0, g1, digest(blocks[b0 - first : b1 - first], b0, g0))
        for b0, b1 in itertools.pairwise(cuts)
    ]
