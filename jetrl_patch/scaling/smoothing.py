"""SmoothQuant without calibration: at export only, outliers move from activations into weights.

For channel j of a norm's output X, which the linears of a group read, with their weights stacked in W:

    f_j = max|X_j|^α / max|W_j|^(1-α)            norm' = norm / f,  W' = W · f        (SmoothQuant, arXiv 2211.10438)

max|X_j| is observed in the trainer's forward since the last sync. Before the first forward, |g_j| of the norm replaces
it, on the assumption that the normalized x̂ is similar in all channels. Factors are divided by their geometric mean, to
which per-row scales are insensitive, and rounded to powers of two. Multiplication and division are then exact in BF16, so
before quantization the smoothed model computes the same bits. The trainer's parameters do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jetrl_patch.scaling.groups import Group, groups_of
from jetrl_patch.scaling.observe import Observer

__all__ = ["Smoother", "factors", "smoothed"]

NamedTensor = tuple[str, Tensor]
#: factors are clamped to 2**±_MOST: far inside BF16's range, and far beyond what a model needs
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
    if not bool(usable.any()):
        return torch.ones_like(x)
    log = alpha * x.double().log2() - (1 - alpha) * w.double().log2()
    log = (log - log[usable].mean()).round().clamp(-_MOST, _MOST)
    return torch.where(usable, log, torch.zeros_like(log)).exp2().float()


def smoothed(
    weights: Iterable[NamedTensor],
    groups: Iterable[Group],
    alpha: float,
    seen: Callable[[str], Tensor | None],
) -> Iterator[NamedTensor]:
    """Smooth every group in a stream of weights. Holds BF16 copies of a group until it is complete.

    Args:
        weights: ``(name, full tensor)`` in any order.
        seen: name of a norm's weight -> max |X| per channel of the norm's output, or None.

    A non-finite weight stays non-finite, so that a later check of the stream finds it.
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
            yield from _smooth(group, held, alpha, seen(group.norm))
    yield from held.items()  # incomplete groups: the sync names the missing weights


def _smooth(group: Group, held: dict[str, Tensor], alpha: float, seen_K: Tensor | None) -> Iterator[NamedTensor]:
    factor_K = factors(held[group.norm], [held[name] for name in group.readers], seen_K, alpha)
    for name in group.readers:
        yield name, (held.pop(name).float() * factor_K).to(torch.bfloat16)
    yield group.norm, (held.pop(group.norm).float() / factor_K).to(torch.bfloat16)


class Smoother:
    """Smooths the exports of one model.

    Args:
        alpha: SmoothQuant's migration strength, in (0, 1].
    """

    def __init__(self, groups: Sequence[Group], alpha: float, observer: Observer) -> None:
        self.groups, self.alpha, self.observer = tuple(groups), alpha, observer

    @classmethod
    def of(cls, model: Any, shapes: Mapping[str, tuple[int, ...]], alpha: float) -> Smoother:
        """Create the smoother of a Hugging Face model whose tensors are sent under the names of ``shapes``.

        Raises:
            ModelError: the family is not covered, so dividing a norm might change the function.
        """
        groups = groups_of(shapes, model.config.model_type, f"smoothing={alpha:g}")
        norms = {group.norm: model.get_submodule(group.norm.removesuffix(".weight")) for group in groups}
        return cls(groups, alpha, Observer(norms, {group.norm: shapes[group.norm][0] for group in groups}))

    def apply(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """``smoothed`` with the observed figures. Observation starts at the first export."""
        self.observer.start()
        return smoothed(weights, self.groups, self.alpha, self.observer.seen)
