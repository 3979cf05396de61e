"""What the trainer's end of a weight sync knows about its model, from before it was sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from jetrl_patch import runtime
from jetrl_patch.config import Config
from jetrl_patch.fp8.transformer_engine import is_te_linear
from jetrl_patch.fp8.transformer_engine import quantize_weight as te_weight
from jetrl_patch.scaling.invariant import scale_once
from jetrl_patch.scaling.smoothing import Smoother
from jetrl_patch.sync.manifest import Terms
from jetrl_patch.sync.stream import NamedTensor, SyncStats, quantized_stream

__all__ = ["Source", "convert"]


@dataclass(kw_only=True)
class Source:
    """A converted model.

    Attributes:
        layers: Hugging Face names of the FP8 layers (of the rollout alone, in ``fp8-rollout``).
        modules: the converted layers themselves; sharding keeps the objects.
        shapes: name -> shape of every tensor that a weight sync sends.
        terms: how this side computes.
        smoother: what moves outliers into the weights on the way out, or None.
    """

    layers: list[str]
    modules: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    terms: Terms
    smoother: Smoother | None = None

    def agree(self) -> None:
        """Before a sync, on every training rank: what is sent must not depend on a rank's own samples."""
        if self.smoother is not None:
            self.smoother.observer.agree()

    def stream(self, weights: Iterable[NamedTensor], stats: SyncStats) -> Iterator[NamedTensor]:
        """The protocol of one sync over full weights; see ``quantized_stream``."""
        return quantized_stream(
            weights,
            terms=self.terms,
            layers=self.layers,
            shapes=self.shapes,
            stats=stats,
            quantize=self.quantize if self.modules else None,
            transform=None if self.smoother is None else self.smoother.apply,
        )

    def quantize(self, layer: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes and scales this layer computes with: (q [N, K], scales [ceil(N/128), ceil(K/128)])."""
        if is_te_linear(self.modules[layer]):
            return te_weight(layer, weight, self.terms.scale_format)  # type: ignore[arg-type]
        own = self.modules[layer].fp8.quantized(weight)
        return own.q, own.s_blocks


def convert(
    model: Any,
    config: Config,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rollout_tp: int,
    device_type: str,
    reference: bool = False,
) -> Source:
    """Convert a loaded Hugging Face model in place, before it is wrapped, and note what a sync needs.

    Args:
        shapes: of the tensors that will be sent, by Hugging Face name.
        rollout_tp: tensor parallel size of the rollout that this trainer feeds.
        reference: whether the model is never trained: it has no updates to be scaled for.

    Raises:
        ModelError, ConfigError: as ``prepare_model`` and ``scale_once``; a family that cannot be smoothed.
    """
    from jetrl_patch.fp8.backends import choose_backend

    prepare = runtime.reach("transformers", "prepare:prepare_model")
    layers: list[str] = prepare(model, config, rollout_tp=rollout_tp, device_type=device_type)
    smoother = Smoother.of(model, shapes, config.resolved_smoothing) if config.resolved_smoothing else None
    if config.invariant_scale is not None and not reference:
        scale_once(model, config.invariant_scale)
    runtime.register_layers(layers)
    backend = choose_backend(config.backend, device_type) if config.fp8_train else ""
    if backend:
        runtime.register_backend(backend)
    named = dict(model.named_modules())
    return Source(
        layers=layers,
        modules={name: named[name] for name in layers} if config.fp8_train else {},
        shapes=shapes,
        terms=Terms(
            precision=config.precision,
            align=config.resolved_align,
            scale_format=config.scale_format,
            backend=backend,
            granularity=config.granularity,
        ),
        smoother=smoother,
    )
