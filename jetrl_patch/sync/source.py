"""What the trainer's end of a weight sync knows about its model, from before it was sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from jetrl_patch import active, registry
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, SyncError, explain
from jetrl_patch.fp8.linear import Fp8State
from jetrl_patch.fp8.transformer_engine import is_te_linear
from jetrl_patch.fp8.transformer_engine import quantize_weight as te_weight
from jetrl_patch.monitor.guard import check_guard
from jetrl_patch.monitor.monitor import Monitor, show
from jetrl_patch.scaling.invariant import scale_once
from jetrl_patch.scaling.smoothing import Smoother
from jetrl_patch.sync.manifest import Terms
from jetrl_patch.sync.stream import NamedTensor, SyncStats, quantized_stream

__all__ = ["Source", "convert"]


@dataclass(kw_only=True)
class Source:
    """A converted model.

    Attributes:
        layers: Hugging Face names of the quantized layers, be it in the rollout alone.
        modules: the converted layers themselves; sharding keeps the objects.
        shapes: name -> shape of every tensor that a weight sync sends.
        terms: how this side computes.
        smoother: what moves outliers into the weights on the way out, or None.
        monitor: measures the layers that are FP8 in the trainer, or in the rollout alone; None where there are none.
        guarded: layers that were FP8 and are BF16 by the precision guard; no longer among ``layers`` and ``modules``.
    """

    layers: list[str]
    modules: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    terms: Terms
    smoother: Smoother | None = None
    monitor: Monitor | None = None
    guarded: list[str] = field(default_factory=list)

    def agree(self) -> None:
        """Before a sync, on every training rank: what is sent must not depend on a rank's own samples."""
        if self.smoother is not None:
            self.smoother.observer.agree()

    def begin_sync(self, weights: Callable[[], Iterable[NamedTensor]], quantizes: bool = True) -> list[str]:
        """Before a sync's first byte, on every rank: the guard's decision, carried out; the layers it took.

        Args:
            weights: gives the full weights once more; asked only where the guard decides.
            quantizes: whether this rank sees the weights; others only take part in the gathering.

        Raises:
            SyncError: a layer could not be taken out of FP8; no engine has been told of it.
        """
        if self.monitor is None:
            return []
        if self.monitor.decides:
            show(self.monitor, weights(), self.quantize if quantizes else None)
        new = self.monitor.begin()
        self.to_bf16(new)
        return new

    def end_sync(self) -> dict[str, float]:
        """After a sync, on every rank: figures of its step. Raises PrecisionError where they are to stop the run."""
        return {} if self.monitor is None else self.monitor.end()

    def take_lines(self) -> list[str]:
        """What the guard did and what is beyond a threshold, for the log of the trainer's loop; each line once."""
        return [] if self.monitor is None else self.monitor.take_lines()

    def to_bf16(self, names: Iterable[str]) -> None:
        """Take layers out of FP8 for good: all of them, or none and a SyncError."""
        new = [name for name in names if name in self.modules]
        if not new:
            return
        try:
            registry.models().to_bf16({name: self.modules[name] for name in new}, exact=self.terms.align == "exact")
        except Exception as error:
            raise SyncError(
                f"the precision guard could not take {', '.join(new)} out of FP8: {type(error).__name__}: {error}; "
                f"nothing was synced. Exclude these layers, or leave guard_sqnr unset"
            ) from error
        for name in new:
            del self.modules[name]
        self.layers = [name for name in self.layers if name not in new]
        self.guarded += new
        active.register_guarded(new)

    def stream(self, weights: Iterable[NamedTensor], stats: SyncStats) -> Iterator[NamedTensor]:
        """The protocol of one sync over full weights; see ``quantized_stream``."""
        return quantized_stream(
            weights if self.monitor is None else self.monitor.watching(weights),
            terms=self.terms,
            layers=self.layers,
            shapes=self.shapes,
            stats=stats,
            quantize=self.quantize if self.modules else None,
            transform=None if self.smoother is None else self.smoother.apply,
            guarded=self.guarded,
        )

    def quantize(self, layer: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes and scales this layer computes with: (q [N, K], scales [ceil(N/128), ceil(K/128)])."""
        if is_te_linear(self.modules[layer]):
            return te_weight(layer, weight, self.terms.scale_format)  # type: ignore[arg-type]
        own = self.modules[layer].fp8.quantized(weight)
        if self.monitor is not None:
            self.monitor.see_weight(layer, weight, own.q, own.s_blocks)
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

    check_guard(config, rollout_tp)
    layers = registry.models().prepare_model(model, config, rollout_tp=rollout_tp, device_type=device_type)
    smoother = Smoother.of(model, shapes, config.resolved_smoothing) if config.resolved_smoothing else None
    if config.invariant_scale is not None and not reference:
        scale_once(model, config.invariant_scale)
    active.register_layers(layers)
    backend = choose_backend(config.backend, device_type) if config.fp8_train else ""
    if backend:
        active.register_backend(backend)
    named = dict(model.named_modules())
    modules = {name: named[name] for name in layers} if config.fp8_train else {}
    return Source(
        layers=layers,
        modules=modules,
        monitor=make_monitor(config, layers, named, device_type),
        shapes=shapes,
        terms=Terms.of(config, backend),
        smoother=smoother,
    )


def make_monitor(config: Config, layers: list[str], modules: Mapping[str, Any], device_type: str) -> Monitor | None:
    """The monitor of a model's layers.

    None where it is off, where nothing is FP8 in blocks, and for TransformerEngine's
    layers.

    Raises:
        ConfigError: a guard was asked for, and the layers are TransformerEngine's, which cannot leave FP8 one by one.
    """
    theirs = [name for name in layers if is_te_linear(modules[name])]
    if theirs and config.guard_sqnr is not None:
        raise ConfigError(
            explain(
                "guard_sqnr",
                required="layers that can leave FP8 one by one",
                found=f"TransformerEngine's {theirs[0]} and {len(theirs) - 1} more",
                fix="leave guard_sqnr unset, or name layers in exclude",
            )
        )
    in_blocks = config.fp8_rollout and not config.channelwise
    if theirs or not config.monitor_every or not in_blocks:
        return None
    if config.fp8_train:
        return Monitor(config, layers, modules)
    from jetrl_patch.fp8.backends import choose_backend

    return Monitor(config, layers, modules, Fp8State(config.scale_format, choose_backend(config.backend, device_type)))
