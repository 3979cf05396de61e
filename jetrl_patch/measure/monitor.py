"""The FP8 monitor of one training process, its thresholds, and the precision guard."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jetrl_patch.backends.quantize import expand_weight_scale
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, PrecisionError, explain
from jetrl_patch.fp8.linear import Fp8State
from jetrl_patch.measure.statistics import FIELDS, MOST, Codes, Figures, Observer, Reduce, measure, worst, worst_of
from jetrl_patch.models.families import MERGED
from jetrl_patch.models.structure import matrix_expert, matrix_name, matrix_number, units

# ---- The statistics of all layers, reduced to the few numbers that a step logs -------------------

PREFIX = "jetrl/scale/"
KINDS = ("weight", "activation", "gradient")

Found = Mapping[tuple[str, str], Figures]


def summary(found: Found, layers: Sequence[str]) -> dict[str, float]:
    """``jetrl/scale/{kind}_{figure}_{min,mean,max}`` over layers, and the worst layer's index in ``layers``.

    For a mixture of experts also the indices of the worst expert and of its layer. Omits a statistic that is NaN for every layer.
    """
    metrics: dict[str, float] = {}
    for kind in KINDS:
        of_kind = {layer: figures for (k, layer), figures in found.items() if k == kind}
        columns = {
            name: [value for figures in of_kind.values() if not math.isnan(value := getattr(figures, name))] for name in FIELDS
        }
        wanted = (
            ("sqnr", "min"), ("sqnr", "mean"), ("slice_sqnr", "min"), ("slice_sqnr", "mean"), ("underflow", "mean"),
            ("underflow", "max"), ("saturated", "max"), ("amax", "max"), ("scale_min", "min"), ("scale_max", "max"),
            ("nonfinite", "max"),
        )  # fmt: skip
        for name, how in wanted:
            if columns[name]:
                label = name if name.startswith("scale_") else f"{name}_{how}"
                metrics[f"{PREFIX}{kind}_{label}"] = _REDUCE[how](columns[name])
        lowest = _lowest(of_kind)
        if lowest is not None:
            metrics[f"{PREFIX}{kind}_worst_layer"] = float(layers.index(lowest))
        lowest = _lowest({layer: figures for layer, figures in of_kind.items() if figures.at})
        if lowest is not None:
            metrics[f"{PREFIX}{kind}_worst_experts"] = float(layers.index(lowest))
            metrics |= _worst_expert(f"{PREFIX}{kind}", of_kind[lowest])
    return metrics


def unchanged(shares: Mapping[str, float]) -> dict[str, float]:
    """``jetrl/scale/weight_unchanged_{min,mean,max}``: share of codes unchanged since the last weight sync."""
    values = list(shares.values())
    return {f"{PREFIX}weight_unchanged_{how}": reduce(values) for how, reduce in _REDUCE.items()} if values else {}


def per_layer(found: Found, shares: Mapping[str, float]) -> dict[str, float]:
    """``jetrl/scale/{layer}/{kind}_{figure}`` of every layer; for experts also the one with the lowest SQNR."""
    metrics = {
        f"{PREFIX}{layer}/{kind}_{name}": value
        for (kind, layer), figures in found.items()
        for name in FIELDS
        if not math.isnan(value := getattr(figures, name))
    }
    for (kind, layer), figures in found.items():
        metrics |= _worst_expert(f"{PREFIX}{layer}/{kind}", figures)
    return metrics | {f"{PREFIX}{layer}/weight_unchanged": share for layer, share in shares.items()}


def _worst_expert(name: str, figures: Figures) -> dict[str, float]:
    at = figures.at.get(figures.worst_figure)
    return {} if at is None else {f"{name}_worst_expert": float(matrix_expert(at))}


def _lowest(of_kind: Mapping[str, Figures]) -> str | None:
    known = {layer: figures.worst_db for layer, figures in of_kind.items() if not math.isnan(figures.worst_db)}
    return min(known, key=lambda layer: known[layer], default=None)


_REDUCE: dict[str, Reduce] = {"min": min, "mean": fmean, "max": max}


# ---- Thresholds: warn once per layer, kind and statistic, or stop the run -------------------------

def findings(found: Found, config: Config) -> Iterator[tuple[tuple[str, str, str], str]]:
    """``(layer, kind, statistic)`` and a line about it, for each statistic that crosses its threshold, in the order of ``found``.

    For experts the line names the worst matrix, such as ``17.up_proj``.
    """
    # scales follow the values, so nothing should ever saturate
    most = {"underflow": config.monitor_underflow, "saturated": 0.0, "nonfinite": 0.0}
    for (kind, layer), figures in found.items():
        crossed = [(name, getattr(figures, name), limit) for name, limit in most.items() if getattr(figures, name) > limit]
        if figures.worst_db < config.monitor_sqnr:
            crossed.insert(0, ("sqnr", figures.worst_db, config.monitor_sqnr))
        for name, value, limit in crossed:
            sign, unit = ("<", " dB") if name == "sqnr" else (">", "")
            number = figures.at.get(figures.worst_figure if name == "sqnr" else name)
            place = layer if number is None else f"{layer}.{matrix_name(number)}"
            yield (layer, kind, name), f"{place}: {kind} {name} {value:.4g}{unit} {sign} {limit:g}{unit}"


class Watch:
    """Reports each finding once, or stops the run at the first."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str, str]] = set()

    def look(self, found: Found, config: Config) -> list[str]:
        """The findings not reported before. Raises PrecisionError if there is one and ``monitor_action`` is "stop"."""
        new = {key: line for key, line in findings(found, config) if key not in self._told}
        self._told |= new.keys()
        lines = list(new.values())
        if lines and config.monitor_action == "stop":
            raise PrecisionError(
                f"monitor_action='stop': {len(lines)} statistics cross their thresholds: "
                f"{'; '.join(lines[:3])}{'; …' if len(lines) > 3 else ''}. "
                f"Exclude these layers, set guard_sqnr, or change the threshold."
            )
        return lines


# ---- The precision guard: layers whose SQNR falls below a floor run in BF16 on both sides from the next step on

def check_guard(config: Config, rollout_tp: int) -> None:
    """Raise ConfigError if the guard is on and the rollout is tensor parallel, which is untested."""
    if config.guard_sqnr is not None and rollout_tp > 1:
        what, fix = f"guard_sqnr={config.guard_sqnr:g}", "set the size to 1, or unset guard_sqnr and list the layers in exclude"
        raise ConfigError(explain(what, required="rollout tensor parallel size 1", found=rollout_tp, fix=fix))


def below(found: Mapping[tuple[str, str], Figures], floor: float) -> dict[str, str]:
    """Layer -> its tensors below ``floor`` dB, in words. NaN (no data) is never below."""
    reasons: dict[str, list[str]] = {}
    for (kind, layer), figures in found.items():
        if figures.worst_db < floor:
            inside = figures.at.get(figures.worst_figure)
            where = "" if inside is None else f" in {matrix_name(inside)}"
            reasons.setdefault(layer, []).append(f"{kind} {figures.worst_db:.1f} dB{where}")
    return {layer: ", ".join(texts) for layer, texts in reasons.items()}


def with_partners(names: Iterable[str], layers: Collection[str]) -> list[str]:
    """``names`` and the layers that vLLM fuses with them, in the order of ``layers``. A fused layer has one precision."""
    wanted = set(names)
    for name in list(wanted):
        parent, dot, leaf = name.rpartition(".")
        for group in MERGED:
            if leaf in group:
                wanted |= {f"{parent}{dot}{partner}" for partner in group}
    return [layer for layer in layers if layer in wanted]


# ---- Gather one object from every trainer rank ---------------------------------------------------

def everybody(mine: Any) -> list[Any]:
    """The objects of all ranks, in rank order. Collective; without a process group, ``[mine]``."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


# ---- The FP8 monitor of one training process: when it measures, and what it does with the results
# A step lies between two weight syncs. Sync 0 is the one before the first rollout. The monitor samples sync 0 (weights only),
# step 1, and every ``monitor_every``-th step after it:
#
#     sync n-1 ends: hooks are set on the layers if step n is sampled
#     step n:        activations and gradients of one micro-batch are measured
#     sync n begins: with the guard, the new weights are measured and the statistics of all ranks decide
#     sync n:        without the guard, weights are measured as they are sent; codes are compared with sync n-1
#     sync n ends:   the statistics of all ranks become metrics and warnings, or stop the run
#
# The experts of a block count as one layer (``units``). Every matrix is measured, and the worst of each statistic is kept with
# the number of its matrix. All statistics reach the host in one transfer.
#
# Every rank calls ``begin`` and ``end``. In sampled syncs both are collective, and they decide the same on every rank.

class Monitor:
    """The monitor of one model.

    Args:
        config: ``monitor_*`` and ``guard_sqnr`` apply.
        layers: names of the FP8 layers in model order.
        modules: the layers by name, experts by their module's name.
        rollout: the rollout's quantization, with which the monitor measures if the trainer's layers are BF16.
        gather: takes one object per rank and returns those of all ranks, in rank order.

    Attributes:
        layers: the units: single layers, and the experts of a block. Metrics refer to a unit by its index here.
        matrices: unit -> its layers, as a weight sync sends them.
    """

    def __init__(
        self,
        config: Config,
        layers: Sequence[str],
        modules: Mapping[str, nn.Module],
        rollout: Fp8State | None = None,
        gather: Callable[[Any], list[Any]] = everybody,
    ) -> None:
        self.config = config
        self.matrices = units(layers)
        self.layers = tuple(self.matrices)
        #: matrix -> codes to keep; the matrices of a unit share ``MOST``
        self._most = {name: max(1, MOST // len(names)) for names in self.matrices.values() for name in names}
        self._gather = gather
        self._rollout = rollout
        self._observer = Observer(modules, rollout)
        self._codes = Codes()
        self._watch = Watch()
        self._weights: dict[str, Tensor] = {}  # by matrix name, like ``_shares``
        self._shares: dict[str, Tensor] = {}
        self._found: dict[tuple[str, str], Figures] | None = None
        self._lines: list[str] = []
        self.syncs = 0
        #: layers that the guard moved to BF16, and why
        self.guarded: dict[str, str] = {}

    def sampled(self, sync: int) -> bool:
        """Whether the step that ends with this sync is measured."""
        every = self.config.monitor_every
        return every > 0 and (sync == 0 or (sync - 1) % every == 0)

    @property
    def decides(self) -> bool:
        """Whether ``begin`` must see the weights of this sync before they are sent."""
        return self.config.guard_sqnr is not None and self.sampled(self.syncs)

    def begin(self) -> list[str]:
        """The units to move to BF16 now, in model order and with their fused partners. Collective.

        Call it before a sync sends anything, and after ``show`` if ``decides``.
        """
        self._observer.disarm()
        if not self.decides:
            return []
        found = self._found = self._merge()
        floor = self.config.guard_sqnr
        assert floor is not None
        reasons = below(found, floor)
        new = with_partners(reasons, [layer for layer in self.layers if layer not in self.guarded])
        for layer in new:
            self.guarded[layer] = reasons.get(layer, "fused with the others in vLLM")
        if new:
            named = "; ".join(f"{layer}: {self.guarded[layer]}" for layer in new)
            self._lines.append(
                f"precision guard: {len(new)} layers run in BF16 on both sides from now on, {len(self.guarded)} in all; "
                f"floor {floor:g} dB: {named}"
            )
        return new

    def see_weight(self, layer: str, w_NK: Tensor, q_NK: Tensor, s_blocks: Tensor) -> None:
        """Record a layer's BF16 weight [N, K] and its quantized form; repeated calls in one sync are ignored."""
        if self.sampled(self.syncs) and layer not in self._weights:
            form = self.config.scales
            s_NG = expand_weight_scale(s_blocks, q_NK.shape[0]) if form.square else s_blocks
            self._weights[layer] = measure(w_NK, q_NK, s_NG, form=form)
            share = self._codes.compare(layer, q_NK, self._most[layer])
            if share is not None:
                self._shares[layer] = share
        elif self.sampled(self.syncs + 1) and not self.sampled(self.syncs):
            self._codes.compare(layer, q_NK, self._most[layer])

    def watching(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The full weights. If only the rollout quantizes them, they are measured on their way through."""
        if self._rollout is not None and (self.sampled(self.syncs) or self.sampled(self.syncs + 1)):
            return self._measured(weights, self._rollout)
        return weights

    def _measured(self, weights: Iterable[tuple[str, Tensor]], rollout: Fp8State) -> Iterator[tuple[str, Tensor]]:
        names = {f"{layer}.weight": layer for layer in self._most}
        for name, weight in weights:
            if name in names:
                w_NK = weight.detach().to(torch.bfloat16).contiguous()
                self.see_weight(names[name], w_NK, *rollout.backend.quantize_weight(w_NK, rollout.scale_format))
            yield name, weight

    def end(self) -> dict[str, float]:
        """Finish a sync: return the metrics of its step and prepare the next. Collective.

        Raises PrecisionError if a statistic crosses its threshold and ``monitor_action`` is "stop".
        """
        metrics: dict[str, float] = {}
        if self.config.guard_sqnr is not None:
            metrics["jetrl/guard_layers"] = float(len(self.guarded))
        if self.sampled(self.syncs):
            found = self._merge() if self._found is None else self._found
            metrics |= self._report(found)
            standing = {key: figures for key, figures in found.items() if key[1] not in self.guarded}
            self._lines += self._watch.look(standing, self.config)
        self._weights, self._shares, self._found = {}, {}, None
        self.syncs += 1
        if self.sampled(self.syncs):
            self._observer.arm(self.layers)
        else:
            self._observer.clear()
            if not self.sampled(self.syncs + 1):
                self._codes = Codes()
        return metrics

    def take_lines(self) -> list[str]:
        """The log lines since the last call, the same on all ranks."""
        lines, self._lines = self._lines, []
        return lines

    def _report(self, found: Mapping[tuple[str, str], Figures]) -> dict[str, float]:
        of_matrices = dict(zip(self._shares, _to_host(list(self._shares.values())), strict=True))
        shares = {
            unit: fmean(known)
            for unit, matrices in self.matrices.items()
            if (known := [of_matrices[name] for name in matrices if name in of_matrices])
        }
        metrics = summary(found, self.layers) | unchanged(shares)
        if self.config.monitor_layers:
            metrics |= per_layer(found, shares)
        return metrics

    def _merge(self) -> dict[tuple[str, str], Figures]:
        """The worst of each statistic over all ranks, ordered by kind, then layer."""
        measured = self._of_weights() | self._observer.figures
        mine = dict(zip(measured, _to_host(list(measured.values())), strict=True))
        everybody = [{key: Figures.of(row) for key, row in other.items()} for other in self._gather(mine)]
        merged = {}
        for kind in KINDS:
            for layer in self.layers:
                seen = [other[kind, layer] for other in everybody if (kind, layer) in other]
                if seen:
                    merged[kind, layer] = worst(seen)
        return merged

    def _of_weights(self) -> dict[tuple[str, str], Tensor]:
        found = {}
        for unit, matrices in units(self._weights).items():
            numbers = [number for name in matrices if (number := matrix_number(name)) is not None]
            rows = [self._weights[name] for name in matrices]
            found["weight", unit] = worst_of(torch.stack(rows), numbers) if numbers else rows[0]
        return found


def _to_host(tensors: Sequence[Tensor]) -> list[Any]:
    """The values of 1-D or 0-D FP64 tensors, in one transfer."""
    if not tensors:
        return []
    sizes = [tensor.numel() for tensor in tensors]
    values = torch.cat([tensor.reshape(-1).to(tensors[0].device) for tensor in tensors]).tolist()
    found, start = [], 0
    for tensor, size in zip(tensors, sizes, strict=True):
        found.append(values[start : start + size] if tensor.dim() else values[start])
        start += size
    return found


def show(monitor: Monitor, weights: Iterable[tuple[str, Tensor]], quantize: Callable[[str, Tensor], Any] | None) -> None:
    """Go through the full weights before a sync, on which ``begin`` then decides.

    Args:
        quantize: calls ``see_weight``; None on a rank that only takes part in the gather.
    """
    still = {unit: matrices for unit, matrices in monitor.matrices.items() if unit not in monitor.guarded}
    names = {f"{layer}.weight": layer for matrices in still.values() for layer in matrices}
    for name, weight in weights:
        if name in names and quantize is not None:
            quantize(names[name], weight.detach().to(torch.bfloat16))
