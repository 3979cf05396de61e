"""The engine's end of a weight sync: poison, load, check that nothing is missing, and say what now lies in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jetrl_patch import runtime
from jetrl_patch.adapters.vllm import guard
from jetrl_patch.adapters.vllm.method import quantized_modules
from jetrl_patch.adapters.vllm.shards import Shard, shards_of
from jetrl_patch.errors import SyncError
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
        """Hugging Face module names of the quantized linears."""
        return [name for _, method in quantized_modules(self.model) for name in method.names]

    @torch.no_grad()
    def to_bf16(self, layers: Sequence[str]) -> None:
        """The precision guard's decision, carried out here; what the engine had cached of graphs does not exist (eager)."""
        guard.to_bf16(self.model, layers)
        runtime.register_guarded(layers)

    @torch.no_grad()
    def poison(self) -> None:
        """NaN into every parameter, quantized weights and scales included, so that an unwritten one explodes."""
        self._loaded = set()
        for parameter in self.model.parameters():
            if parameter.element_size() == 1:  # the byte 0x7F is NaN in e4m3fn; an integer has none, its scales are NaN
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
        """Digests of quantized weights and their scales, and of weights that the guard took out of FP8, as they lie here.

        In Hugging Face names and coordinates.
        """
        rects: list[Rect] = []
        for layer, method in quantized_modules(self.model):
            for shard in method.shards(layer):
                rows = slice(shard.offset, shard.offset + shard.row1 - shard.row0)
                rects.append(_weight(shard, layer.weight.data[rows]))
                rects.extend(method.format.scales.rects(shard, layer.weight_scale_inv.data[rows]))
        for layer, names in guard.guarded_modules(self.model):
            for shard in shards_of(layer, names):
                rows = slice(shard.offset, shard.offset + shard.row1 - shard.row0)
                rects.append(_weight(shard, layer.weight.data[rows]))
        return rects


def _weight(shard: Shard, weight_NK: torch.Tensor) -> Rect:
    value = digest(weight_NK, shard.row0, shard.col0)
    return Rect(f"{shard.name}.weight", shard.row0, shard.row1, shard.col0, shard.col1, value)
