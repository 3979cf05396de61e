"""SmoothQuant without a calibrated checkpoint: outliers move from activations into weights, at export only.

For channel j of a norm's output, with X what the linears read and W their weights (all of a group, stacked):

    f_j = max|X_j|^α / max|W_j|^(1-α)            norm' = norm / f,  W' = W · f        (SmoothQuant, arXiv 2211.10438)

max|X_j| is what the trainer's own forward showed since the last sync; before there was one, |g_j| of the norm stands
for it (the normalized x̂ is taken as alike in all channels). Factors are brought to a geometric mean of one, which
per-row scales do not see, and rounded to powers of two: then dividing and multiplying are exact in BF16, and the
smoothed model computes the same bits as the model before it is quantized. The trainer's parameters stay as they are.
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
#: a factor is at most 2**±_MOST: far inside BF16's range, and far outside of what a model asks for
_MOST = 12


def factors(norm_K: Tensor, weights: Sequence[Tensor], seen_K: Tensor | None, alpha: float) -> Tensor:
    """The factors [K] of one group, FP32 powers of two; 1 where a channel is zero on either side.

    Args:
        norm_K: the norm's weight [K].
        weights: of the linears that read it, each [N, K].
        seen_K: max |X| per channel as observed, or None.
        alpha: how much of the difficulty moves, in [0, 1].
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
    """A stream of weights with every group smoothed. Holds one group at a time, as copies in BF16.

    Args:
        weights: ``(name, full tensor)`` in any order.
        seen: max |X| per channel behind a norm (by the name of its weight), or None.

    A weight that is not finite stays so, for whoever checks the stream.
    """
    member = {name: group for group in groups for name in (group.norm, *group.readers)}
    held: dict[str, Tensor] = {}
    for name, weight in weights:
        group = member.get(name)
        if group is None:
            yield name, weight
            continue
        held[name] = weight.detach().to(torch.bfloat16, copy=True)  # the framework may let go of its tensor
        del weight
        if all(part in held for part in (group.norm, *group.readers)):
            yield from _smooth(group, held, alpha, seen(group.norm))
    yield from held.items()  # of groups that did not come whole: the sync names what is missing


def _smooth(group: Group, held: dict[str, Tensor], alpha: float, seen_K: Tensor | None) -> Iterator[NamedTensor]:
    factor_K = factors(held[group.norm], [held[name] for name in group.readers], seen_K, alpha)
    for name in group.readers:
        yield name, (held.pop(name).float() * factor_K).to(torch.bfloat16)
    yield group.norm, (held.pop(group.norm).float() / factor_K).to(torch.bfloat16)


class Smoother:
    """The smoothing of one model's export.

    Args:
        alpha: in (0, 1].
    """

    def __init__(self, groups: Sequence[Group], alpha: float, observer: Observer) -> None:
        self.groups, self.alpha, self.observer = tuple(groups), alpha, observer

    @classmethod
    def of(cls, model: Any, shapes: Mapping[str, tuple[int, ...]], alpha: float) -> Smoother:
        """For a Hugging Face model whose tensors are sent under the names of ``shapes``.

        Raises ModelError for a family where dividing a norm might change the function.
        """
        groups = groups_of(shapes, model.config.model_type, f"smoothing={alpha:g}")
        norms = {group.norm: model.get_submodule(group.norm.removesuffix(".weight")) for group in groups}
        return cls(groups, alpha, Observer(norms, {group.norm: shapes[group.norm][0] for group in groups}))

    def apply(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """``smoothed`` with what was seen; watching begins with the first export."""
        self.observer.start()
        return smoothed(weights, self.groups, self.alpha, self.observer.seen)
