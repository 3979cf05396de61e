"""Whether a call, or a replacement function, fits a recorded signature."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_FORM = re.compile(r"^((?:staticmethod |classmethod |async )*)(def|class)\((.*)\)$")


@dataclass
class Signature:
    """Parameters in order, by name; True if there is a default."""

    places: dict[str, bool] = field(default_factory=dict)
    named: dict[str, bool] = field(default_factory=dict)
    more: bool = False
    more_named: bool = False

    @classmethod
    def read(cls, text: str) -> Signature | None:
        """Parse ``def(self, a, b=, *, c, **more)``; None without a signature."""
        form = _FORM.match(text)
        if form is None:
            return None
        found, star = cls(), False
        for part in form[3].split(", ") if form[3] else []:
            if part.startswith("**"):
                found.more_named = True
            elif part.startswith("*"):
                star, found.more = True, len(part) > 1
            else:
                (found.named if star else found.places)[part.rstrip("=")] = part.endswith("=")
        if next(iter(found.places), "") in ("self", "cls") and "staticmethod" not in form[1]:
            del found.places[next(iter(found.places))]
        return found


def call(theirs: Signature, count: int, words: tuple[str, ...], complete: bool) -> str:
    """Why ``count`` positional arguments and these keywords do not fit; empty if they do."""
    if count > len(theirs.places) and not theirs.more:
        return f"takes {len(theirs.places)} positional arguments, not {count}"
    after = list(theirs.places)[count:]
    unknown = [word for word in words if word not in after and word not in theirs.named]
    if unknown and not theirs.more_named:
        return f"has no {', '.join(unknown)}"
    if not complete:
        return ""
    required = [n for n in after if not theirs.places[n]] + [n for n, default in theirs.named.items() if not default]
    missing = [name for name in required if name not in words]
    return f"needs {', '.join(missing)}" if missing else ""


def replacement(ours: Signature, theirs: Signature) -> str:
    """Why a caller of ``theirs`` could not call ``ours``; empty if every call fits."""
    if theirs.more and theirs.more_named and not theirs.places:
        return ""  # it dispatches: its callers use other signatures
    mine = list(ours.places)
    for i, (name, default) in enumerate(theirs.places.items()):
        if i < len(mine):
            if mine[i] != name:
                return f"has {name} where ours has {mine[i]}"
            if default and not ours.places[name]:
                return f"has a default for {name}"
        elif not (ours.more_named or name in ours.named) or not (ours.more or default):
            return f"takes {name}"  # an optional one is passed by name
    extra = [n for n in mine[len(theirs.places) :] if not ours.places[n]]
    if extra and not theirs.more:
        return f"has no {', '.join(extra)}"
    if theirs.more_named and not ours.more_named:
        return "takes any keyword"
    unknown = [name for name in theirs.named if name not in ours.named and name not in mine]
    return f"takes {', '.join(unknown)}" if unknown and not ours.more_named else ""
