"""The table of corrections. Imports no torch, because the settings import it.

ρ_t = π_old(y_t) / μ(y_t) is the ratio of the trainer's to the rollout's probability of a token, ρ = ∏ρ_t that of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["none", "tis", "seq-tis", "mis", "seq-mis", "geo-mis", "icepop"]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """One correction.

    Attributes:
        name: the value of ``Config.correction``.
        level: the ratio that is compared with the bounds: a token's, a sequence's, or the geometric mean over a sequence.
        truncates: whether a ratio above the cap is reduced to it. Otherwise tokens or sequences outside the bounds are dropped.
        bounds: how many bounds it allows: 1 is a cap, 2 are low and high.
        default: the default bounds.
        source: where the formula and the default bounds come from.
        formula: the weight of a token.
    """

    name: Kind
    level: Literal["token", "sequence", "geometric"]
    truncates: bool
    bounds: tuple[int, ...]
    default: tuple[float, ...]
    source: str
    formula: str

    @property
    def weighs_sequences(self) -> bool:
        """Whether a whole sequence has one weight."""
        return self.level != "token"

    @property
    def takes_acr(self) -> bool:
        """Whether QuRL's adaptive clipping range, which compensates for truncated token ratios, can be added."""
        return self.truncates and self.level == "token"

    @property
    def needs(self) -> str:
        """The required bounds in words."""
        words: dict[tuple[int, ...], str] = {(1,): "one number, the cap", (2,): "low and high"}
        return words.get(self.bounds, "one number, the cap, or two, low and high")


_PRECISION_RL = "Precision-RL, arXiv 2510.26788, §2"

_TABLE = (
    Correction(
        name="tis", level="token", truncates=True, bounds=(1,), default=(2.0,), formula="min(ρ_t, C)",
        source="FlashRL's blog on truncated importance sampling; verl's default cap",
    ),
    Correction(
        name="seq-tis", level="sequence", truncates=True, bounds=(1,), default=(3.0,), formula="min(ρ, C)", source=_PRECISION_RL,
    ),
    Correction(
        name="mis", level="token", truncates=False, bounds=(1, 2), default=(2.0,), formula="ρ_t·1{low ≤ ρ_t ≤ C}",
        source="masked importance sampling; low = 0 is the plain form; verl's default cap",
    ),
    Correction(
        name="seq-mis", level="sequence", truncates=False, bounds=(1, 2), default=(3.0,), formula="ρ·1{low ≤ ρ ≤ C}",
        source=f"{_PRECISION_RL}; there low = 0",
    ),
    Correction(
        name="geo-mis", level="geometric", truncates=False, bounds=(2,), default=(0.999, 1.001),
        formula="1{low ≤ (∏ρ_t)^(1/n) ≤ high}",
        source="Liu, Li et al., When Speed Kills Stability (https://richardli.xyz/rl-collapse); verl's preset decoupled_geo_rs",
    ),
    Correction(
        name="icepop", level="token", truncates=False, bounds=(2,), default=(0.5, 5.0), formula="ρ_t·1{α ≤ ρ_t ≤ β}",
        source="IcePop, arXiv 2510.18855; verl's preset decoupled_token_icepop",
    ),
)  # fmt: skip

#: name -> correction, without "none"
CORRECTIONS: dict[str, Correction] = {found.name: found for found in _TABLE}
KINDS: tuple[Kind, ...] = ("none", *(found.name for found in _TABLE))

#: ``required`` of an error about bounds. Where both sides agree every ratio is 1: bounds without it drop or change every token
AROUND_ONE = "bounds around 1, the ratio of a token on which trainer and rollout agree"


def around_one(low: float, high: float) -> bool:
    """Whether bounds leave a ratio of 1 unchanged."""
    return low <= 1 <= high


def interval(kind: str, bounds: Sequence[float] | None = None) -> tuple[float, float]:
    """The (lowest, highest) ratio that a correction leaves unchanged; the lowest is 0 if there is only a cap."""
    found = CORRECTIONS[kind].default if bounds is None else tuple(bounds)
    return (found[0], found[1]) if len(found) == 2 else (0.0, found[0])
