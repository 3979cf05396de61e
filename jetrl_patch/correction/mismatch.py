"""How far the trainer's log-probs are from those of the rollout that sampled the tokens.

Notation: μ the rollout's policy, π the trainer's, on the same tokens and the same weights;
Δ = log π − log μ per token, ratio = exp(Δ). On-policy to the last bit means Δ = 0 everywhere.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Figures over the tokens that the mask keeps; NaN everywhere when it keeps none.

    Attributes:
        tokens: how many.
        logp_abs_diff_mean: mean |Δ|.
        logp_abs_diff_max: max |Δ|.
        bit_equal_fraction: share of tokens whose two float32 log-probs are the same bits.
        k1_kl: mean −Δ, the plain estimate of KL(μ‖π) (may be negative).
        k3_kl: mean exp(Δ) − 1 − Δ, the non-negative estimate of the same.
        ratio_min: smallest ratio.
        ratio_max: largest ratio.
        ess: effective sample size as a share of the tokens: (Σr)² / (n Σr²).
        clipped_fraction: share of tokens whose ratio lies outside the correction's bounds; 0 without a correction.
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
    clipped_fraction: float

    def as_metrics(self, prefix: str = "jetrl/") -> dict[str, float]:
        """For a framework's logger."""
        return {prefix + name: value for name, value in asdict(self).items()}


def mismatch(
    trainer_logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    mask: torch.Tensor,
    bounds: tuple[float, float] | None = None,
) -> Mismatch:
    """Compare two sets of log-probs.

    Args:
        trainer_logp: log π, any shape, float32.
        rollout_logp: log μ, the same shape.
        mask: the same shape, non-zero where a token counts.
        bounds: (lowest, highest) ratio that the correction in use leaves alone, or None.

    Returns:
        A ``Mismatch``; computed in float64. A NaN in a counted log-prob stays visible.

    Raises:
        ValueError: the shapes differ.
    """
    if not trainer_logp.shape == rollout_logp.shape == mask.shape:
        raise ValueError(
            f"log-probs and mask must have one shape, found trainer {tuple(trainer_logp.shape)}, "
            f"rollout {tuple(rollout_logp.shape)}, mask {tuple(mask.shape)}"
        )
    keep = mask.to(torch.bool)
    pi = trainer_logp.detach()[keep].to("cpu", torch.float32)
    mu = rollout_logp.detach()[keep.to(rollout_logp.device)].to("cpu", torch.float32)
    n = pi.numel()
    if n == 0:
        nan = float("nan")
        return Mismatch(
            tokens=0, logp_abs_diff_mean=nan, logp_abs_diff_max=nan, bit_equal_fraction=nan, k1_kl=nan, k3_kl=nan,
            ratio_min=nan, ratio_max=nan, ess=nan, clipped_fraction=nan,
        )  # fmt: skip
    equal = pi.view(torch.int32) == mu.view(torch.int32)
    delta = pi.double() - mu.double()
    ratio = delta.exp()
    clipped = torch.zeros_like(equal) if bounds is None else (ratio < bounds[0]) | (ratio > bounds[1])
    return Mismatch(
        tokens=n,
        logp_abs_diff_mean=delta.abs().mean().item(),
        logp_abs_diff_max=delta.abs().max().item(),
        bit_equal_fraction=equal.double().mean().item(),
        k1_kl=(-delta).mean().item(),
        k3_kl=(torch.expm1(delta) - delta).mean().item(),
        ratio_min=ratio.min().item(),
        ratio_max=ratio.max().item(),
        ess=(ratio.sum().square() / (n * ratio.square().sum())).item(),
        clipped_fraction=clipped.double().mean().item(),
    )
