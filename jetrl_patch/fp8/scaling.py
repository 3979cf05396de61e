"""Factors moved between a norm and the linears behind it: SmoothQuant at export, QuRL's update-aware scaling before training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.errors import ConfigError, ModelError, explain
from jetrl_patch.models.families import covering

# ---- Groups of a norm and the linears that read it. A factor can move between them without changing the function
#     norm(x) = x̂ · g        W norm(x) = (W · f) (norm(x) / f)        with f a number, or one number per channel
#
# Only linears may read the norm of a group. The record of the model's family lists them (``families.Family.readers``) and states
# that its norms are ``x̂ · g`` (not ``x̂ · (1 + g)``) and precede the linears. ``o_proj`` and ``down_proj`` read no norm, so they
# are in no group.

@dataclass(frozen=True)
class Group:
    """The names of a norm's weight and of the weights that read it, in the order of the model's parameters."""

    norm: str
    readers: tuple[str, ...]


def groups_of(names: Iterable[str], family: str | None, asked: str) -> list[Group]:
    """Find the groups among a model's parameters.

    Args:
        names: the parameters' Hugging Face names.
        family: ``model_type`` of the model's configuration.
        asked: the setting that the error names, with its value.

    Raises ModelError if the family is not covered, so moving a factor might change the model's function.
    """
    covered = covering("scaling")
    if family not in covered:
        required = f"one of the model families {', '.join(covered)}, whose function it preserves"
        fix = "switch it off: set smoothing=0, or drop invariant_scale"
        raise ModelError(explain(asked, required=required, found=f"model_type={family!r}", fix=fix))
    known = dict.fromkeys(names)
    found = []
    for name in known:
        stem, _, leaf = name.removesuffix(".weight").rpartition(".")
        readers = tuple(f"{stem}.{part}.weight" for part in covered[family].readers.get(leaf, ()))
        present = tuple(reader for reader in known if reader in readers)
        if present:
            found.append(Group(name, present))
    return found


# ---- QuRL's update-aware scaling: WX = (W / s)(sX), applied once before training (arXiv 2602.13953)
# An optimizer update is far smaller than the spacing of the rollout's format. With s > 1 the weights of q, k, v, gate and up
# shrink by the factor s, and the norms before them grow by it. The function is unchanged, and an update is s times larger
# relative to the quantized weight. ``o_proj``, ``down_proj`` and biases do not change.
#
# The model's configuration records the factor, and with it every ``config.json`` saved from it, so a checkpoint of a scaled model
# is not scaled again.

#: attribute of a Hugging Face configuration
RECORD = "jetrl_invariant_scale"


@torch.no_grad()
def scale_once(model: Any, scale: float) -> bool:
    """Scale a loaded Hugging Face model in place, whole or partitioned by ZeRO-3. Returns False if it was already scaled.

    Exact if ``scale`` is a power of two; otherwise each weight is rounded once in its own dtype.

    Raises:
        ModelError: the family is not covered, so its function might change.
        ConfigError: the checkpoint was scaled by another factor.
    """
    if check_record(model.config, scale):
        return False
    parameters = dict(model.named_parameters())
    for group in groups_of(parameters, model.config.model_type, f"invariant_scale={scale:g}"):
        _local(parameters[group.norm]).mul_(scale)
        for reader in group.readers:
            _local(parameters[reader]).div_(scale)
    setattr(model.config, RECORD, scale)
    return True


def check_record(hf_config: Any, scale: float) -> bool:
    """Whether a model with this configuration is already scaled. Raises ConfigError if the factor was another one."""
    recorded = getattr(hf_config, RECORD, None)
    if recorded is not None and recorded != scale:
        required = "an unscaled checkpoint, or one scaled by the same factor"
        found, fix = f"{RECORD}={recorded} in its config.json", f"use invariant_scale={recorded}, or the unscaled checkpoint"
        raise ConfigError(explain(f"invariant_scale={scale:g}", required=required, found=found, fix=fix))
    return recorded is not None


def _local(parameter: Any) -> torch.Tensor:
    """This process's part. Under ZeRO-3 the parameter itself is empty, and ``ds_tensor`` holds its slice."""
    found: torch.Tensor = getattr(parameter, "ds_tensor", parameter).data
    return found


def take_over(hf_config: Any, recorded: float | None, where: str) -> None:
    """Check that a training checkpoint, whose weights replace the model's, was scaled like the model.

    If the model was built without ``invariant_scale``, its configuration takes over the checkpoint's record, so later saves
    describe their weights correctly.

    Args:
        recorded: the checkpoint's factor, or None if it records none.
        where: the checkpoint that the error names.

    Raises ConfigError if the model was scaled when it was built, and the checkpoint is unscaled or has another factor.
    """
    built = getattr(hf_config, RECORD, None)
    if built is None and recorded is not None:
        setattr(hf_config, RECORD, recorded)
    elif built != recorded:
        found = "no invariant_scale" if recorded is None else f"invariant_scale={recorded}"
        how = "without invariant_scale" if recorded is None else f"with {found}"
        fix = f"resume {how}: the factor is chosen once, before training"
        what, required = f"resuming from {where}", f"weights with invariant_scale={built}"
        raise ConfigError(explain(what, required=required, found=found, fix=fix))


# ---- Observe max |X| per channel of the norms' outputs in the trainer's forward, since the last sync

class Observer:
    """Observes norms from the first ``start()`` on. Its figures are not part of the model's state.

    Args:
        norms: name of a norm's weight -> the module, which sharding does not replace.
        widths: name of a norm's weight -> number of channels.
    """

    def __init__(self, norms: Mapping[str, nn.Module], widths: Mapping[str, int]) -> None:
        self._norms = dict(norms)
        self._widths = dict(widths)
        self._hooks: list[Any] = []
        self._now: dict[str, Tensor] = {}
        self._agreed: dict[str, Tensor] = {}

    def start(self) -> None:
        """Start observing. A model that is never exported, such as a reference model, is never observed."""
        if not self._hooks:
            for name, norm in self._norms.items():
                self._hooks.append(norm.register_forward_hook(self._hook(name)))

    def seen(self, name: str) -> Tensor | None:
        """The figures [K] that all ranks agreed on. None before the first forward."""
        return self._agreed.get(name)

    @torch.no_grad()
    def agree(self) -> None:
        """Agree on the maximum over all ranks of the figures since the last call. Every rank must call it.

        If there was no forward since then, the previous figures remain.
        """
        own = (p.device for norm in self._norms.values() for p in norm.parameters() if p.device.type != "meta")
        device = next(itertools.chain((t.device for t in self._now.values()), own), torch.device("cpu"))
        zeros = {name: torch.zeros(self._widths[name], device=device) for name in self._norms}
        flat = torch.cat([torch.zeros(0, device=device), *(zeros | self._now).values()])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if torch.distributed.get_backend() == "nccl":
                flat = flat.cuda()  # zeros may be on the CPU: no forward yet, and parameters offloaded
            torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX)
        for name, part in zip(self._norms, flat.split([self._widths[name] for name in self._norms]), strict=True):
            if bool((part > 0).any()):
                self._agreed[name] = part.clone()
        self._now = {}

    def _hook(self, name: str) -> Any:
        @torch.no_grad()
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            x_MK = output.detach().flatten(0, -2)
            if not x_MK.shape[0]:
                return
            amax_K = torch.linalg.vector_norm(x_MK, math.inf, 0).float()  # max |x|, without a copy of |x|
            amax_K = amax_K.nan_to_num(0.0, 0.0, 0.0)  # NaN and Inf are reported where they arise, not here
            before = self._now.get(name)
            self._now[name] = amax_K if before is None else torch.maximum(before, amax_K)

        return hook


# ---- SmoothQuant without calibration: outliers move from activations into weights, at export only ----
# For channel j of a norm's output X, which the linears of a group read, with their weights stacked in W:
#
#     f_j = max|X_j|^α / max|W_j|^(1-α)            norm' = norm / f,  W' = W · f        (SmoothQuant, arXiv 2211.10438)
#
# max|X_j| is observed in the trainer's forward since the last sync. Before the first forward, |g_j| of the norm replaces it, on
# the assumption that the normalized x̂ is similar in all channels. Factors are divided by their geometric mean, to which per-row
# scales are insensitive, and rounded to powers of two. So multiplication and division are exact in BF16, and before quantization
# the smoothed model computes the same bits. The trainer's parameters do not change.

NamedTensor = tuple[str, Tensor]
#: factors are clamped to 2**±_MOST: far inside BF16's range, far beyond what a model needs
_MOST = 12


def factors(norm_K: Tensor, weights: Sequence[Tensor], seen_K: Tensor | None, alpha: float) -> Tensor:
    """The factors [K] of one group, FP32 powers of two; 1 for a channel that is zero or not finite on either side.

    Args:
        norm_K: the norm's weight [K].
        weights: the weights of the linears that read it, each [N, K].
        seen_K: observed max |X| per channel, or None.
        alpha: SmoothQuant's migration strength, in [0, 1].
    """
    x = (norm_K.abs() if seen_K is None else seen_K.to(norm_K.device)).float()
    w = torch.stack([weight.abs().amax(0).float() for weight in weights]).amax(0)
    usable = (x > 0) & (w > 0) & torch.isfinite(x) & torch.isfinite(w)
    log = alpha * x.double().log2() - (1 - alpha) * w.double().log2()
    log = (log - log[usable].mean()).round().clamp(-_MOST, _MOST)
    return torch.where(usable, log, torch.zeros_like(log)).exp2().float()


def smoothed(
    weights: Iterable[NamedTensor], groups: Iterable[Group], alpha: float, seen: Callable[[str], Tensor | None]
) -> Iterator[NamedTensor]:
    """Smooth every group in a stream of weights. Holds BF16 copies of a group until it is complete.

    A non-finite weight stays non-finite, for a later check of the stream to find.

    Args:
        weights: ``(name, full tensor)`` in any order.
        seen: name of a norm's weight -> max |X| per channel of the norm's output, or None.
    """
    member = {name: group for group in groups for name in (group.norm, *group.readers)}
    held: dict[str, Tensor] = {}
    for name, weight in weights:
        group = member.get(name)
        if group is None:
            yield name, weight
            continue
        held[name] = weight.detach().to(torch.bfloat16, copy=True)  # the framework may free its tensor
        del weight
        if all(part in held for part in (group.norm, *group.readers)):
            factor_K = factors(held[group.norm], [held[name] for name in group.readers], seen(group.norm), alpha)
            for reader in group.readers:
                yield reader, (held.pop(reader).float() * factor_K).to(torch.bfloat16)
            yield group.norm, (held.pop(group.norm).float() / factor_K).to(torch.bfloat16)
    yield from held.items()  # incomplete groups: the sync names the missing weights


class Smoother:
    """Smooths the exports of one model. ``alpha`` is SmoothQuant's migration strength, in (0, 1]."""

    def __init__(self, groups: Sequence[Group], alpha: float, observer: Observer) -> None:
        self.groups, self.alpha, self.observer = tuple(groups), alpha, observer

    @classmethod
    def of(cls, model: Any, shapes: Mapping[str, tuple[int, ...]], alpha: float) -> Smoother:
        """Create the smoother of a Hugging Face model whose tensors are sent under the names of ``shapes``.

        Raises ModelError if the family is not covered, so dividing a norm might change the function.
        """
        groups = groups_of(shapes, model.config.model_type, f"smoothing={alpha:g}")
        norms = {group.norm: model.get_submodule(group.norm.removesuffix(".weight")) for group in groups}
        return cls(groups, alpha, Observer(norms, {group.norm: shapes[group.norm][0] for group in groups}))

    def apply(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """``smoothed`` with the observed figures. Observation starts at the first export."""
        self.observer.start()
        return smoothed(weights, self.groups, self.alpha, self.observer.seen)
