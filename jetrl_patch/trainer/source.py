"""The trainer's end of a weight sync: the converted model as a ``Source``, the precision guard, and the state of a process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from jetrl_patch import session
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.backends.transformer_engine import is_te_linear, quantize_weight
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, SyncError, explain
from jetrl_patch.exact.dispatch import chosen_attention
from jetrl_patch.fp8.convert import expert_matrices, expert_modules, per_expert, shapes_per_expert, stored_buffers
from jetrl_patch.fp8.linear import Fp8State
from jetrl_patch.fp8.mixture import WHOLE, ExpertSplit
from jetrl_patch.fp8.scaling import Smoother, scale_once
from jetrl_patch.fp8.to_bf16 import to_bf16
from jetrl_patch.measure.monitor import Monitor, check_guard, show
from jetrl_patch.models.structure import check_structure, unit_of, units
from jetrl_patch.sync.delta import Sent
from jetrl_patch.sync.protocol import Terms
from jetrl_patch.sync.send import NamedTensor, SyncStats, quantized_stream
from jetrl_patch.trainer.precision import LossScale
from jetrl_patch.trainer.prepare import prepare_model

# ---- State that the patches of one process share, in every framework -----------------------------

@dataclass(kw_only=True)
class Worker:
    """State of a training process: the loss scale of the policy's optimizer, and models that follow its guard to BF16."""

    loss_scale: LossScale = field(default_factory=LossScale)
    followers: weakref.WeakSet[Source] = field(default_factory=weakref.WeakSet)


@dataclass(kw_only=True)
class Driver:
    """State of the trainer loop: metrics that wait for its next log line."""

    metrics: dict[str, Any] = field(default_factory=dict)

    def take(self) -> dict[str, Any]:
        """Return the metrics, each once."""
        found, self.metrics = self.metrics, {}
        return found


def reset(*states: object) -> None:
    """Reset each object to its initial state."""
    for state in states:
        state.__init__()  # type: ignore[misc]


# ---- A converted model, recorded before the framework shards it -----------------------------------

@dataclass(kw_only=True, eq=False)
class Source:
    """A converted model.

    Attributes:
        layers: Hugging Face names of the quantized layers, even if only the rollout quantizes them.
        modules: the converted layers and the matrices of experts. Sharding keeps these objects.
        experts: the modules of experts, by name.
        shapes: name -> shape of every tensor that a weight sync sends.
        terms: how this side computes.
        smoother: moves activation outliers into the weights that are sent, or None.
        monitor: measures the FP8 layers of the trainer or of the rollout; None if there are none.
        guarded: layers that the precision guard moved to BF16; no longer in ``layers`` and ``modules``.
        base: what the last sync sent, with ``sync="delta"``; else None.
        buffers: the buffers stored in checkpoints, as module and attribute. A sync sends them in FP32, even if the framework
            yields only parameters.
        adapters: name of each LoRA layer in peft's model -> scaling; None without LoRA, or if the rollout serves the adapters.
        device_type: where the model computes.
    """

    layers: list[str]
    modules: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    terms: Terms
    smoother: Smoother | None = None
    monitor: Monitor | None = None
    guarded: list[str] = field(default_factory=list)
    experts: Mapping[str, Any] = field(default_factory=dict)
    base: Sent | None = None
    buffers: dict[str, tuple[Any, str]] = field(default_factory=dict)
    adapters: Mapping[str, float] | None = None
    device_type: str = "cpu"

    def begin_sync(
        self, weights: Callable[[], Iterable[NamedTensor]], followers: Iterable[Source] = (), quantizes: bool = True
    ) -> None:
        """Agree on the smoothing across ranks, which saw other samples, and apply the guard's decision. Collective.

        Args:
            weights: yields the full weights once more; called only if the guard decides at this sync.
            followers: other models of this process, which move the same layers to BF16.
            quantizes: whether this rank sees the weights; other ranks only take part in the all-gather.

        Raises SyncError if a layer could not be moved to BF16. No engine has heard of the sync by then.
        """
        if self.smoother is not None:
            self.smoother.observer.agree()
        if self.monitor is None:
            return
        if self.monitor.decides:
            show(self.monitor, self._apart(weights()), self.quantize if quantizes else None)
        new = self.monitor.begin()
        for source in (self, *followers):
            source.to_bf16(new)

    def end_sync(self) -> dict[str, float]:
        """Return the metrics of the step that the sync ends. Collective. Raises PrecisionError if they must stop the run."""
        return {} if self.monitor is None else self.monitor.end()

    def take_lines(self) -> list[str]:
        """Return log lines about guard decisions and exceeded thresholds, each once."""
        return [] if self.monitor is None else self.monitor.take_lines()

    def to_bf16(self, names: Iterable[str]) -> None:
        """Move layers or units to BF16 for good: all of them, or none with a SyncError. The experts of a block move together."""
        have = units(self.modules)
        new = [unit for unit in dict.fromkeys(map(unit_of, names)) if unit in have]
        if not new:
            return
        try:
            modules = {unit: self.experts[unit] if unit in self.experts else self.modules[unit] for unit in new}
            to_bf16(modules, exact=self.terms.align == "exact")
        except Exception as error:
            raise SyncError(
                f"the precision guard could not take {', '.join(new)} out of FP8: {type(error).__name__}: {error}; "
                f"nothing was synced. Exclude these layers or unset guard_sqnr."
            ) from error
        moved = [layer for unit in new for layer in have[unit]]
        for layer in moved:
            del self.modules[layer]
        self.layers = [name for name in self.layers if name not in set(moved)]
        self.guarded += moved
        session.register(guarded=moved)

    def _apart(self, weights: Iterable[NamedTensor]) -> Iterable[NamedTensor]:
        """The weights, with stacked experts split."""
        return chain.from_iterable(per_expert(name, weight) for name, weight in weights) if self.experts else weights

    def stream(self, weights: Iterable[NamedTensor], stats: SyncStats) -> Iterator[NamedTensor]:
        """Yield the messages of one sync over full weights (``quantized_stream``). Experts are sent one by one."""
        weights = self._apart(weights)
        if self.buffers:
            own = ((name, self._on_device(getattr(module, leaf))) for name, (module, leaf) in self.buffers.items())
            weights = chain((item for item in weights if item[0] not in self.buffers), own)
        return quantized_stream(
            weights if self.monitor is None else self.monitor.watching(weights),
            terms=self.terms,
            layers=self.layers,
            shapes=self.shapes,
            stats=stats,
            quantize=self.quantize if self.modules else None,
            transform=None if self.smoother is None else self.smoother.apply,
            guarded=self.guarded,
            base=self.base,
            fp32=self.buffers,
        )

    def _on_device(self, buffer: torch.Tensor) -> torch.Tensor:
        """Bring back what verl offloaded without waiting (FSDP2's buffers): on the device, this copy comes after that one."""
        return buffer if buffer.device.type == self.device_type else buffer.to(self.device_type, non_blocking=True)

    def quantize(self, layer: str, weight: torch.Tensor) -> Quantized:
        """Return the bytes and scales that this layer computes with: [N, K] in 128x128 blocks."""
        state: Fp8State | None = getattr(self.modules[layer], "fp8", None)
        if state is None:  # a layer of TransformerEngine, which has its own quantizer
            return quantize_weight(layer, weight, self.terms.scale_format)  # type: ignore[arg-type]
        own = state.quantized(weight)
        if self.monitor is not None:
            self.monitor.see_weight(layer, weight, *own)
        return own


def convert(
    model: Any,
    config: Config,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rollout_tp: int,
    device_type: str,
    reference: bool = False,
    rollout_ep: int = 1,
) -> Source:
    """Convert a loaded Hugging Face model in place, before the framework wraps it, and record what syncs need.

    Args:
        shapes: shape of every tensor that the framework yields, by Hugging Face name.
        rollout_tp: tensor-parallel size of the rollout.
        reference: whether the model is never trained. ``invariant_scale`` then does not apply.
        rollout_ep: expert-parallel size of the rollout.

    Raises:
        ModelError, ConfigError: as ``check_structure``, ``prepare_model`` and ``scale_once``, or the family does not support
            smoothing.
    """
    from jetrl_patch.backends import choose_backend

    if config.quantized_rollout:
        check_structure(model.config, config)  # the driver has checked only local folders
    check_guard(config, rollout_tp)
    sizes: dict[str, Any] = {"rollout_tp": rollout_tp, "rollout_ep": rollout_ep}
    layers = prepare_model(model, config, device_type=device_type, **sizes)
    smoother = Smoother.of(model, shapes, config.resolved_smoothing) if config.resolved_smoothing else None
    if config.invariant_scale is not None and not reference:
        scale_once(model, config.invariant_scale)
    backend = choose_backend(config.backend, device_type, config.scale_format) if config.fp8_train else ""
    attention = chosen_attention(device_type) if config.exact else ""
    session.register(layers=layers, backend=backend, attention=attention)
    experts = expert_modules(model)
    buffers = stored_buffers(model) if experts else {}
    shapes = {**shapes, **{name: tuple(getattr(*place).shape) for name, place in buffers.items()}}
    named = dict(model.named_modules())
    modules = {name: named[name] for name in layers if name in named} if config.fp8_train else {}
    return Source(
        layers=layers,
        modules=modules | expert_matrices(model),
        experts=experts,
        monitor=make_monitor(config, layers, named, device_type),
        shapes=shapes_per_expert(shapes) if experts else shapes,
        terms=Terms.of(config, backend, ExpertSplit.of(rollout_tp, rollout_ep) if experts else WHOLE, attention),
        smoother=smoother,
        base=Sent() if config.sync == "delta" else None,
        buffers=buffers,
        device_type=device_type,
    )


def make_monitor(config: Config, layers: list[str], modules: Mapping[str, Any], device_type: str) -> Monitor | None:
    """The monitor of a model's layers; None if it is off, if no layer is block FP8, or if the layers are TransformerEngine's.

    Raises ConfigError if a guard is set, because TransformerEngine layers cannot leave FP8 one by one.
    """
    theirs = [name for name in layers if name in modules and is_te_linear(modules[name])]
    if theirs and config.guard_sqnr is not None:
        required, found = "layers that can leave FP8 one by one", f"TransformerEngine's ({theirs[0]} and {len(theirs) - 1} more)"
        raise ConfigError(explain("guard_sqnr", required=required, found=found, fix="unset it, or name layers in exclude"))
    in_blocks = config.fp8_rollout and not config.channelwise
    if theirs or not config.monitor_every or not in_blocks:
        return None
    if config.fp8_train:
        return Monitor(config, layers, modules)
    from jetrl_patch.backends import choose_backend

    return Monitor(config, layers, modules, Fp8State(config.scale_format, choose_backend(config.backend, device_type)))
