"""The mismatch between the log-probs of trainer and rollout, and the effect of a correction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import torch

from jetrl_patch.config.corrections import CORRECTIONS
from jetrl_patch.measure.corrections import correct

# ---- Combine sums over the parts of a batch that different processes hold ------------------------

_Part = TypeVar("_Part")


def merge(kind: type[_Part], parts: Iterable[_Part]) -> _Part:
    """Merge dataclasses into one: fields ``max_…`` and ``min_…`` by maximum and minimum, others by sum. NaN propagates."""
    found = list(parts)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: _combine(name, [getattr(part, name) for part in found]) for name in names})


def _combine(name: str, values: list[Any]) -> Any:
    if any(math.isnan(value) for value in values):
        return math.nan
    if name.startswith("max_"):
        return max(values, default=-math.inf)
    return min(values, default=math.inf) if name.startswith("min_") else sum(values)


# ---- What a correction did to a batch, for a framework's logger ----------------------------------
# The effective sample size counts tokens, or sequences if a correction has one weight per sequence. The other figures count
# response tokens.

@dataclass(frozen=True, kw_only=True)
class Applied:
    """Sums over one part of a batch. ``merge`` combines the parts of several processes.

    Attributes:
        tokens: number of response tokens.
        outside: number of tokens whose ratio, or whose sequence's ratio, is outside the bounds.
        dropped: number of tokens that the correction drops.
        weight: sum of the weights over tokens.
        units: number of units with their own weight: tokens or sequences.
        unit_weight, unit_square: sums of the weights and of their squares over units.
        max_weight, min_weight: largest and smallest weight of a token.
    """

    tokens: int = 0
    outside: int = 0
    dropped: int = 0
    weight: float = 0.0
    units: int = 0
    unit_weight: float = 0.0
    unit_square: float = 0.0
    max_weight: float = -float("inf")
    min_weight: float = float("inf")

    def as_metrics(self, prefix: str = "jetrl/") -> dict[str, float]:
        """The figures for a logger. ``ess`` is 0 if every weight is 0; without a token every figure is NaN."""
        n, nan = self.tokens, float("nan")
        ess = self.unit_weight**2 / (self.units * self.unit_square) if self.unit_square else 0.0
        found = {
            "ess": ess if n else nan,
            "clipped_fraction": self.outside / n if n else nan,
            "masked_fraction": self.dropped / n if n else nan,
            "correction_weight_min": self.min_weight if n else nan,
            "correction_weight_mean": self.weight / n if n else nan,
            "correction_weight_max": self.max_weight if n else nan,
        }
        return {prefix + name: value for name, value in found.items()}


def applied(kind: str, log_ratio: torch.Tensor, mask: torch.Tensor, bounds: Sequence[float] | None = None) -> Applied:
    """Apply a correction and sum up its effect. ``kind`` is a key of ``CORRECTIONS``; the arguments are those of ``correct``."""
    counted = mask.bool().cpu()
    found = correct(kind, log_ratio.detach().double().cpu(), counted, bounds)
    if not bool(counted.any()):
        return Applied()
    weights = found.weights[counted]
    units = found.weights.amax(-1)[counted.any(-1)] if CORRECTIONS[kind].weighs_sequences else weights
    return Applied(
        tokens=weights.numel(),
        outside=int(found.outside.sum()),
        dropped=int((counted & ~found.kept).sum()),
        weight=weights.sum().item(),
        units=units.numel(),
        unit_weight=units.sum().item(),
        unit_square=units.square().sum().item(),
        max_weight=weights.max().item(),
        min_weight=weights.min().item(),
    )


def of_run(correction: tuple[str, tuple[float, float]] | None, log_ratio: torch.Tensor, mask: torch.Tensor) -> Applied | None:
    """``applied`` for the correction of a run; None if there is no correction, or none that has a name.

    ``correction`` is (kind, interval), as an adapter reads them from the framework's settings; None if it has no name.
    """
    kind, (low, high) = correction or ("none", (0.0, 0.0))
    if kind == "none":
        return None
    return applied(kind, log_ratio, mask, (high,) if CORRECTIONS[kind].truncates else (low, high))


# ---- The mismatch between the trainer's log-probs and those of the rollout that sampled the tokens
# Notation: μ is the rollout's policy, π the trainer's, with the same weights on the same tokens. Δ = log π − log μ per token,
# ratio = exp(Δ). Bit-exact on-policy training means Δ = 0 everywhere.

@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Figures over the tokens that the mask keeps. If it keeps none, all but ``tokens`` are NaN.

    Attributes:
        tokens: number of tokens.
        logp_abs_diff_mean: mean |Δ|.
        logp_abs_diff_max: max |Δ|.
        bit_equal_fraction: share of tokens whose two float32 log-probs are finite and bit-equal.
        k1_kl: mean −Δ, the k1 estimate of KL(μ‖π), which can be negative.
        k3_kl: mean exp(Δ) − 1 − Δ, the k3 estimate of the same, which is never negative.
        ratio_min: smallest ratio.
        ratio_max: largest ratio.
        ess: effective sample size as a share of the tokens, (Σr)² / (n Σr²).
    """

    tokens: int
    logp_abs_diff_mean: float
    logp_abs_diff_max: float
    bit_equal_fraction: float
    k1_kl: float
    k3_kl: float
    ratio_min: float
    ratio_max: float
    ess: float

    def as_metrics(self, prefix: str = "jetrl/") -> dict[str, float]:
        """The figures for a framework's logger, by metric name."""
        return {prefix + name: value for name, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The sums behind the figures, over one part of a batch. ``merge`` combines parts."""

    tokens: int = 0
    abs_diff: float = 0.0
    equal: int = 0
    diff: float = 0.0
    k3: float = 0.0
    ratio: float = 0.0
    ratio_square: float = 0.0
    max_abs_diff: float = -float("inf")
    max_ratio: float = -float("inf")
    min_ratio: float = float("inf")

    def figures(self) -> Mismatch:
        """The figures over all tokens that were added up."""
        n, nan = self.tokens, float("nan")
        return Mismatch(
            tokens=n,
            logp_abs_diff_mean=self.abs_diff / n if n else nan,
            logp_abs_diff_max=self.max_abs_diff if n else nan,
            bit_equal_fraction=self.equal / n if n else nan,
            k1_kl=-self.diff / n if n else nan,
            k3_kl=self.k3 / n if n else nan,
            ratio_min=self.min_ratio if n else nan,
            ratio_max=self.max_ratio if n else nan,
            ess=self.ratio**2 / (n * self.ratio_square) if n else nan,
        )


def bit_equal(pi: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    """Where two float32 tensors hold the same bits of a finite number. Two NaNs are not equal."""
    return pi.isfinite() & (pi.view(torch.int32) == mu.view(torch.int32))


def sums(trainer_logp: torch.Tensor, rollout_logp: torch.Tensor, mask: torch.Tensor) -> Sums:
    """The sums over one part of a batch. Arguments and errors as in ``mismatch``."""
    if not trainer_logp.shape == rollout_logp.shape == mask.shape:
        raise ValueError(
            f"Log-probs and mask must have the same shape, found trainer {tuple(trainer_logp.shape)}, "
            f"rollout {tuple(rollout_logp.shape)}, mask {tuple(mask.shape)}."
        )
    keep = mask.to(torch.bool)
    pi = trainer_logp.detach()[keep].to("cpu", torch.float32)
    mu = rollout_logp.detach()[keep.to(rollout_logp.device)].to("cpu", torch.float32)
    if not pi.numel():
        return Sums()
    delta = pi.double() - mu.double()
    ratio = delta.exp()
    return Sums(
        tokens=pi.numel(),
        abs_diff=delta.abs().sum().item(),
        equal=int(bit_equal(pi, mu).sum()),
        diff=delta.sum().item(),
        k3=(torch.expm1(delta) - delta).sum().item(),
        ratio=ratio.sum().item(),
        ratio_square=ratio.square().sum().item(),
        max_abs_diff=delta.abs().max().item(),
        max_ratio=ratio.max().item(),
        min_ratio=ratio.min().item(),
    )


def mismatch(trainer_logp: torch.Tensor, rollout_logp: torch.Tensor, mask: torch.Tensor) -> Mismatch:
    """Compare two sets of log-probs, in float64. A NaN in a counted log-prob makes the figures NaN; it equals nothing.

    Args:
        trainer_logp: log π in nats, float32, any shape.
        rollout_logp: log μ, same shape.
        mask: same shape, non-zero where a token counts.

    Raises ValueError if the shapes differ.
    """
    return sums(trainer_logp, rollout_logp, mask).figures()
