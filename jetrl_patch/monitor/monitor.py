"""One run's monitor in a training process: what is measured when, and what follows from it.

A step lies between two weight syncs. Syncs are counted from 0 (the one before the first rollout); sampled are sync 0
(weights only), step 1, and from there every ``monitor_every``-th step:

    sync n-1 ends: hooks are set on the layers, if step n is sampled
    step n:        activations and gradients of one micro-batch
    sync n begins: with a guard, the new weights are measured and the figures of all ranks decide
    sync n:        weights are measured while they are sent (without a guard), codes are compared with sync n-1
    sync n ends:   figures of all ranks become metrics, warnings, or the end of the run

All ranks call ``begin`` and ``end``, which are collective in sampled syncs and take the same decisions everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.config import Config
from jetrl_patch.fp8.linear import Fp8State
from jetrl_patch.fp8.quantize import expand_weight_scale
from jetrl_patch.monitor import guard, ranks, summary
from jetrl_patch.monitor.codes import Codes
from jetrl_patch.monitor.figures import Figures, measure, worst
from jetrl_patch.monitor.observe import Observer
from jetrl_patch.monitor.thresholds import Watch

__all__ = ["Monitor", "show"]


class Monitor:
    """The monitor of one model.

    Args:
        config: ``monitor_*`` and ``guard_sqnr``.
        layers: names of the FP8 layers, in the model's order; figures name a layer by its place in it.
        modules: the layers themselves.
        rollout: how the rollout quantizes, where the trainer's layers are BF16: what it will see is measured here.
        gather: hands over one object per rank and gives back everybody's, in rank order.
    """

    def __init__(
        self,
        config: Config,
        layers: Sequence[str],
        modules: Mapping[str, nn.Module],
        rollout: Fp8State | None = None,
        gather: Callable[[Any], list[Any]] = ranks.everybody,
    ) -> None:
        self.config = config
        self.layers = tuple(layers)
        self._gather = gather
        self._rollout = rollout
        self._observer = Observer(modules, rollout)
        self._codes = Codes()
        self._watch = Watch()
        self._weights: dict[tuple[str, str], Tensor] = {}
        self._shares: dict[str, Tensor] = {}
        self._found: dict[tuple[str, str], Figures] | None = None
        self._lines: list[str] = []
        self.syncs = 0
        #: layers that the guard took out of FP8, and why
        self.guarded: dict[str, str] = {}

    def sampled(self, sync: int) -> bool:
        """Whether the step that ends with this sync is measured."""
        every = self.config.monitor_every
        return every > 0 and (sync == 0 or (sync - 1) % every == 0)

    @property
    def decides(self) -> bool:
        """Whether ``begin`` wants to see the weights of this sync before they are sent."""
        return self.config.guard_sqnr is not None and self.sampled(self.syncs)

    def begin(self) -> list[str]:
        """Before a sync's first byte, after the weights were shown where ``decides``: layers to take out of FP8 now.

        Collective. Fused partners are among them; in the model's order.
        """
        self._observer.disarm()
        if not self.decides:
            return []
        found = self._found = self._merge()
        floor = self.config.guard_sqnr
        assert floor is not None
        reasons = guard.below(found, floor)
        new = guard.with_partners(reasons, [layer for layer in self.layers if layer not in self.guarded])
        for layer in new:
            self.guarded[layer] = reasons.get(layer, "one layer with the others in vLLM")
        if new:
            named = "; ".join(f"{layer}: {self.guarded[layer]}" for layer in new)
            self._lines.append(
                f"precision guard: {len(new)} layers run in BF16 on both sides from now on, {len(self.guarded)} in all; "
                f"floor {floor:g} dB: {named}"
            )
        return new

    def see_weight(self, layer: str, w_NK: Tensor, q_NK: Tensor, s_blocks: Tensor) -> None:
        """A layer's BF16 weight [N, K] and what it was quantized to, once or more in a sync."""
        if self.sampled(self.syncs) and ("weight", layer) not in self._weights:
            figures = measure(w_NK, q_NK, expand_weight_scale(s_blocks, q_NK.shape[0]))
            self._weights["weight", layer] = figures
            share = self._codes.compare(layer, q_NK)
            if share is not None:
                self._shares[layer] = share
        elif self.sampled(self.syncs + 1) and not self.sampled(self.syncs):
            self._codes.keep(layer, q_NK)

    def watching(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The stream of full weights as it is; where the rollout quantizes them by itself, they are measured on the way."""
        names = {f"{layer}.weight": layer for layer in self.layers}
        looks = self._rollout is not None and (self.sampled(self.syncs) or self.sampled(self.syncs + 1))
        for name, weight in weights:
            if looks and name in names and self._rollout is not None:
                w_NK = weight.detach().to(torch.bfloat16).contiguous()
                self.see_weight(names[name], w_NK, *self._rollout.backend.quantize_weight(w_NK, self._rollout.scale_format))
            yield name, weight

    def end(self) -> dict[str, float]:
        """After a sync: the metrics of its step; the next one is made ready. Collective.

        Raises:
            PrecisionError: a figure is beyond its threshold, and ``monitor_action`` is "stop".
        """
        metrics: dict[str, float] = {}
        if self.config.guard_sqnr is not None:
            metrics["jetrl/guard_layers"] = float(len(self.guarded))
        if self.sampled(self.syncs):
            found = self._merge() if self._found is None else self._found
            metrics |= self._report(found)
            standing = {key: figures for key, figures in found.items() if key[1] not in self.guarded}
            self._lines += map(str, self._watch.look(standing, self.config))
        self._weights, self._shares, self._found = {}, {}, None
        self.syncs += 1
        if self.sampled(self.syncs):
            self._observer.arm(self.layers)
        else:
            self._observer.figures = {}
            if not self.sampled(self.syncs + 1):
                self._codes.drop()
        return metrics

    def take_lines(self) -> list[str]:
        """What happened since the last call, for the log of the trainer's loop; the same on all ranks."""
        lines, self._lines = self._lines, []
        return lines

    def _report(self, found: Mapping[tuple[str, str], Figures]) -> dict[str, float]:
        shares = {layer: float(share) for layer, share in self._shares.items()}
        metrics = summary.summary(found, self.layers) | summary.unchanged(shares)
        if self.config.monitor_layers:
            metrics |= summary.per_layer(found, shares)
        return metrics

    def _merge(self) -> dict[tuple[str, str], Figures]:
        """Everybody's figures, the worst of each; in the order of kinds and layers."""
        mine = {key: tensor.tolist() for key, tensor in (self._weights | self._observer.figures).items()}
        everybody = [{key: Figures(*values) for key, values in other.items()} for other in self._gather(mine)]
        merged = {}
        for kind in summary.KINDS:
            for layer in self.layers:
                seen = [other[kind, layer] for other in everybody if (kind, layer) in other]
                if seen:
                    merged[kind, layer] = worst(seen)
        return merged


def show(
    monitor: Monitor, weights: Iterable[tuple[str, Tensor]], quantize: Callable[[str, Tensor], Any] | None
) -> None:
    """Run through full weights ahead of a sync, so that ``begin`` can decide.

    Args:
        quantize: calls ``see_weight``; None on a rank that only takes part in the gathering.
    """
    names = {f"{layer}.weight": layer for layer in monitor.layers if layer not in monitor.guarded}
    for name, weight in weights:
        if name in names and quantize is not None:
            quantize(names[name], weight.detach().to(torch.bfloat16))
