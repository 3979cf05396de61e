"""The mismatch between the trainer's log-probs and those of the rollout that sampled the tokens.

Notation: μ is the rollout's policy, π the trainer's, with the same weights on the same tokens. Δ = log π − log μ per token,
ratio = exp(Δ). Bit-exact on-policy training means Δ = 0 everywhere.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

__all__ = ["Mismatch", "Sums", "bit_equal", "mismatch", "sums"]


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Figures over the tokens that the mask keeps. All but ``tokens`` are NaN if it keeps none.

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
    """The sums behind the figures, over one part of a batch. ``parts.merge`` combines parts. Empty by default."""

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
        """The figures that follow from these sums."""
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
    """Where two float32 tensors hold the same bits of a finite number. A NaN on both sides is no agreement."""
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
    """Compare two sets of log-probs.

    Args:
        trainer_logp: log π in nats, float32, any shape.
        rollout_logp: log μ, same shape.
        mask: same shape, non-zero where a token counts.

    Returns:
        The figures, computed in float64. A NaN in a counted log-prob makes the figures NaN; it is equal to nothing.

    Raises:
        ValueError: the shapes differ.
    """
    return sums(trainer_logp, rollout_logp, mask).figures()
