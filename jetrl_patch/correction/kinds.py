"""The corrections there are, by name, and the bounds that each takes. No tensors here: settings are checked with it.

ρ_t = π_old(y_t) / μ(y_t) is the trainer's probability of a token over the rollout's, ρ = ∏ρ_t that of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Literal

from jetrl_patch.errors import ConfigError

__all__ = ["DEFAULT_BOUNDS", "KINDS", "SEQUENCE_KINDS", "TRUNCATED", "Kind", "check_bounds", "interval"]

Kind = Literal["none", "tis", "seq-tis", "mis", "seq-mis", "geo-mis", "icepop"]
KINDS: tuple[Kind, ...] = ("none", "tis", "seq-tis", "mis", "seq-mis", "geo-mis", "icepop")

#: kinds with one weight for a whole sequence
SEQUENCE_KINDS = ("seq-tis", "seq-mis", "geo-mis")

#: kinds that cut a weight down to the cap; the others drop what lies outside
TRUNCATED = ("tis", "seq-tis")

#: kinds whose bounds are an interval and never one number
_TWO_SIDED = ("geo-mis", "icepop")

#: what a kind uses where no bounds are given. Tokens: C = 2 (FlashRL's blog on TIS; verl's default). Sequences:
#: C = 3 (Precision-RL, arXiv 2510.26788). Geometric mean: 1 ± 0.001 (verl's preset ``decoupled_geo_rs``).
#: IcePop: [0.5, 5] (arXiv 2510.18855; verl's preset ``decoupled_token_icepop``).
DEFAULT_BOUNDS: dict[str, tuple[float, ...]] = {
    "tis": (2.0,),
    "seq-tis": (3.0,),
    "mis": (2.0,),
    "seq-mis": (3.0,),
    "geo-mis": (0.999, 1.001),
    "icepop": (0.5, 5.0),
}


def check_bounds(kind: str, bounds: object) -> tuple[float, ...] | None:
    """Bounds as they were given, as a tuple of floats; None stays None.

    Args:
        kind: one of ``KINDS``.
        bounds: one cap, or ``(low, high)``; a plain number is one cap.

    Raises ConfigError for anything else, for bounds that no ratio can meet, and for bounds of no correction.
    """
    if bounds is None:
        return None
    values = (bounds,) if isinstance(bounds, Real) else bounds
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(map(_is_number, values)):
        raise ConfigError(f"correction_bounds={bounds!r} must be one number, the cap, or two, low and high")
    if kind == "none":
        raise ConfigError(f"correction_bounds={bounds!r} belongs to no correction; drop it, or set correction")
    found = tuple(float(value) for value in values)
    if len(found) not in (1, 2) or (kind in _TWO_SIDED and len(found) == 1) or (kind in TRUNCATED and len(found) == 2):
        asked = {**dict.fromkeys(_TWO_SIDED, "low and high"), **dict.fromkeys(TRUNCATED, "one number, the cap")}
        raise ConfigError(
            f"correction_bounds={bounds!r} with correction={kind!r}: required "
            f"{asked.get(kind, 'one number, the cap, or two, low and high')}, found {len(found)} numbers"
        )
    if not math.isfinite(found[-1]) or found[-1] <= 0:
        raise ConfigError(f"correction_bounds={bounds!r}: the cap must be a positive, finite number")
    if not 0 <= found[0] <= found[-1]:
        raise ConfigError(f"correction_bounds={bounds!r}: low must lie between 0 and high; write low first")
    return found


def interval(kind: str, bounds: Sequence[float] | None = None) -> tuple[float, float]:
    """(lowest, highest) ratio that a correction leaves alone; the lowest is 0 where there is only a cap."""
    found = DEFAULT_BOUNDS[kind] if bounds is None else tuple(bounds)
    return (found[0], found[1]) if len(found) == 2 else (0.0, found[0])


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
