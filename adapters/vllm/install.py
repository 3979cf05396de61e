"""The engine's end of a weight sync: poison, load, check completeness, and report digests of what is in memory."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch

from jetrl_patch import runtime
from jetrl_patch.adapters.vllm import guard
from jetrl_patch.adapters.vllm.experts import expert_modules
from jetrl_patch.adapters.vllm.latent import absorb, made
from jetrl_patch.adapters.vllm.method import quantized_modules
from jetrl_patch.adapters.vllm.names import hf_name, vllm_names
from jetrl_patch.adapters.vllm.plain import Sent, add_plain
from jetrl_patch.adapters.vllm.shards import Shard, shards_of
from jetrl_patch.errors import SyncError, explain
from jetrl_patch.sync.digest import Pieces, Rect

__all__ = ["VllmInstaller"]


class VllmInstaller:
    """Implements ``jetrl_patch.sync.receive.Installer`` for one worker's part of a vLLM model.

    Args:
        model: the built vLLM model (``model_runner.get_model()``).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._loaded: set[str] = set()
        self._captured: dict[str, int] = {}

    def quantized_layers(self) -> list[str]:
        """Return the Hugging Face names of the quantized layers, those of experts last, also of experts on other ranks."""
        linears = [name for _, method in quantized_modules(self.model) for name in method.names]
        experts = (method for _, method in expert_modules(self.model) if method.plain is None)
        return linears + [name for method in experts for name in method.layers()]

    @torch.no_grad()
    def to_bf16(self, layers: Sequence[str]) -> None:
        """Move these layers to BF16, as the precision guard decided."""
        guard.to_bf16(self.model, layers)
        runtime.register_guarded(layers)

    def stay_in_place(self) -> None:
        """Require that later syncs leave parameters and buffers where they lie: captured graphs hold their addresses."""
        self._captured = _addresses(self.model)

    @torch.no_grad()
    def poison(self) -> None:
        """Fill every parameter with NaN, quantized weights and scales included, so that an unwritten one shows."""
        self._loaded = set()
        for layer, method in expert_modules(self.model):
            method.expect(layer)
        for _, linear in quantized_modules(self.model):
            linear.format.written()
        for parameter in self.model.parameters():
            if parameter.element_size() == 1:  # 0x7F is NaN in e4m3fn; int8 has no NaN, but its scales do
                parameter.data.view(torch.uint8).fill_(0x7F)
            elif parameter.is_floating_point():
                parameter.data.fill_(float("nan"))

    @torch.no_grad()
    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load whole Hugging Face tensors into this rank's part of the model.

        The second name of a tied weight, ``lm_head`` beside the embedding, is left out: vLLM skips it, and vLLM 0.30 refuses a
        call that has it without the first, which may have come in another bucket. ``finish`` requires the first.
        """
        tied = self._tied()
        named = ((name, weight) for name, weight in weights if name not in tied)
        self._loaded |= set(self.model.load_weights(vllm_names(self.model, named)))

    def _tied(self) -> set[str]:
        """Hugging Face's names of parameters that the model also has under an earlier name."""
        mapper, first = getattr(self.model, "hf_to_vllm_mapper", None), dict(self.model.named_parameters())
        again = (name.rpartition(".") for name, _ in self.model.named_parameters(remove_duplicate=False) if name not in first)
        return {f"{hf_name(module, mapper)}.{leaf}" for module, _, leaf in again}

    def finish(self) -> None:
        """Check completeness, and make again what vLLM has made of the weights.

        Raises SyncError, which names the parameters still missing, or those that captured graphs no longer find.
        """
        # Tied parameters are one object with two names: named_parameters() lists it once, load() may use either name.
        ids = {id(p) for name, p in self.model.named_parameters(remove_duplicate=False) if name in self._loaded}
        # A weight that arrived in BF16 was quantized here, and its scales are recorded under the weight's name only.
        experts = expert_modules(self.model)
        ids |= {id(getattr(layer, name)) for layer, method in experts for name in method.parameters} | made(self.model)
        missing = [
            name
            for name, p in self.model.named_parameters()
            if id(p) not in ids and not (name.endswith("_scale_inv") and not bool(p.isnan().any()))
        ]
        missing += [name for _, method in experts for name in method.missing()]
        if missing:
            raise SyncError(
                f"the weight sync left {len(missing)} parameters of the engine unwritten: {', '.join(missing[:3])}"
            )
        absorb(self.model)
        now = _addresses(self.model)
        moved = [name for name, address in self._captured.items() if now.get(name) != address]
        if moved:
            raise SyncError(
                explain(
                    "a weight sync into an engine with captured graphs",
                    required="every tensor at the address that the graphs read",
                    found=f"{len(moved)} elsewhere ({', '.join(moved[:3])})",
                    fix="set enforce_eager=True and decode_graphs=False",
                )
            )

    @torch.no_grad()
    def installed(self, plain: Sent = MappingProxyType({})) -> list[Rect]:
        """Return digests of what is in this rank's memory, under Hugging Face's names and coordinates.

        These are the quantized weights, their scales, the guarded weights and experts in BF16, and of ``plain`` what is held as
        it was sent.
        """
        pieces = Pieces()
        add_plain(pieces, self.model, plain)
        for layer, method in quantized_modules(self.model):
            for shard in method.shards(layer):
                rows = slice(shard.offset, shard.offset + shard.row1 - shard.row0)
                _add_weight(pieces, shard, layer.weight.data[rows])
                method.format.scales.add_to(pieces, shard, layer.weight_scale_inv.data[rows])
        for experts, method in expert_modules(self.model):
            for piece in method.pieces(experts):
                _add_weight(pieces, piece.shard, piece.weight)
                if piece.scale is not None:
                    method.format.scales.add_to(pieces, piece.shard, piece.scale)
        for layer, names in guard.guarded_modules(self.model):
            for shard in shards_of(layer, names):
                rows = slice(shard.offset, shard.offset + shard.row1 - shard.row0)
                _add_weight(pieces, shard, layer.weight.data[rows])
        return pieces.read()


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    """Where each parameter and buffer of a model lies."""
    return {name: tensor.data_ptr() for tensors in (model.named_parameters(), model.named_buffers()) for name, tensor in tensors}


def _add_weight(pieces: Pieces, shard: Shard, weight_NK: torch.Tensor) -> None:
    pieces.add(f"{shard.name}.weight", shard.row0, shard.row1, shard.col0, shard.col1, weight_NK)
