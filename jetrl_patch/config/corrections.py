"""The table of corrections and the check of their bounds. Imports no torch, because the settings import it.

ρ_t = π_old(y_t) / μ(y_t) is the ratio of the trainer's to the rollout's probability of a token, ρ = ∏ρ_t that of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from jetrl_patch.errors import ConfigError, explain

__all__ = [
    "CORRECTIONS", "DEFAULT_BOUNDS", "KINDS", "SEQUENCE_KINDS", "TRUNCATED", "Correction", "Kind", "check_bounds", "interval",
]  # fmt: skip

Kind = Literal["none", "tis", "seq-tis", "mis", "seq-mis", "geo-mis", "icepop"]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """One correction.

    Attributes:
        name: the value of ``Config.correction``.
        level: the ratio that is compared with the bounds: a token's, a sequence's, or the geometric mean over a sequence.
        truncates: whether a ratio above the cap is cut down to it. If not, tokens or sequences outside the bounds are dropped.
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
#: kinds with one weight per sequence
SEQUENCE_KINDS = tuple(found.name for found in _TABLE if found.weighs_sequences)
#: kinds that cut a weight down to the cap; the others drop what is outside the bounds
TRUNCATED = tuple(found.name for found in _TABLE if found.truncates)
#: kind -> default bounds
DEFAULT_BOUNDS = {found.name: found.default for found in _TABLE}


def check_bounds(kind: str, bounds: object) -> tuple[float, ...] | None:
    """The given bounds as a tuple of floats; None stays None.

    Args:
        kind: one of ``KINDS``.
        bounds: a cap, as a number or a sequence of one, or ``(low, high)``.

    Raises ConfigError for anything else, for bounds that no ratio can meet, and for bounds without a correction.
    """
    if bounds is None:
        return None
    values = (bounds,) if isinstance(bounds, Real) else bounds
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(map(_is_number, values)):
        raise ConfigError(f"correction_bounds={bounds!r} must be one number, the cap, or two, low and high.")
    if kind not in CORRECTIONS:
        raise ConfigError(f"correction_bounds={bounds!r} belongs to no correction. Drop it or set correction.")
    found, correction = tuple(float(value) for value in values), CORRECTIONS[kind]
    if len(found) not in correction.bounds:
        raise ConfigError(
            explain(
                f"correction_bounds={bounds!r} with correction={kind!r}",
                required=correction.needs,
                found=f"{len(found)} number{'' if len(found) == 1 else 's'}",
                fix="set the bounds that this correction takes, or drop correction_bounds for its defaults",
            )
        )
    if not math.isfinite(found[-1]) or found[-1] <= 0:
        raise ConfigError(f"correction_bounds={bounds!r}: the cap must be a positive, finite number.")
    if not 0 <= found[0] <= found[-1]:
        raise ConfigError(f"correction_bounds={bounds!r}: low must lie between 0 and high. Write low first.")
    return found


def interval(kind: str, bounds: Sequence[float] | None = None) -> tuple[float, float]:
    """The (lowest, highest) ratio that a correction leaves unchanged; the lowest is 0 if there is only a cap."""
    found = CORRECTIONS[kind].default if bounds is None else tuple(bounds)
    return (found[0], found[1]) if len(found) == 2 else (0.0, found[0])


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
