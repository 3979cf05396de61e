"""One colour and one line style per run, the same in the pictures and on the page.

The colours are those of Okabe and Ito, which remain distinct under the common kinds of colour blindness. They are darkened
for a white background and lightened for a dark one until each has a contrast of at least 3 to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jetrl_patch.report.runs import Run

__all__ = ["DARK", "DASHES", "LIGHT", "Style", "choose"]

#: blue, vermilion, green, purple, ochre, sky, grey, brown
LIGHT = ("#0072b2", "#d55e00", "#007d5c", "#a83a86", "#8f6a00", "#2a8ec4", "#5b6472", "#8c4a2f")
DARK = ("#56b4e9", "#ff8c42", "#2fcb9b", "#e894c8", "#f0c24b", "#a5dcff", "#b9c2d0", "#d9a085")

#: lengths of dashes and gaps; the empty one is a solid line
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3))

_KNOWN = {"bf16": 6, "fp8-rollout": 1, "fp8-unified/linear": 3, "fp8-unified/exact": 2}


@dataclass(frozen=True)
class Style:
    """Index into ``LIGHT`` and ``DARK``, and index into ``DASHES``."""

    colour: int
    dash: int


def choose(runs: Sequence[Run]) -> list[Style]:
    """Choose a style for every run: seeds of one arm share a colour and differ in dashes; known arms have fixed colours.

    With one seed per arm, the dashes change along with the colours, so that colour is never the only difference.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for i, run in enumerate(runs):
        groups.setdefault((run.source, run.arm or run.label), []).append(i)
    taken: list[int] = []
    for _, arm in groups:
        if len(taken) >= len(LIGHT):  # all colours are in use: start over, with other dashes
            taken.append(taken[len(taken) - len(LIGHT)])
            continue
        free = [slot for slot in range(len(LIGHT)) if slot not in taken]
        unknown = [slot for slot in free if slot not in _KNOWN.values()]
        taken.append(_KNOWN[arm] if _KNOWN.get(arm) in free else (unknown or free)[0])
    several = any(len(members) > 1 for members in groups.values())
    styles = {
        i: Style(slot, (nth if several else position + position // len(LIGHT)) % len(DASHES))
        for position, (slot, members) in enumerate(zip(taken, groups.values(), strict=True))
        for nth, i in enumerate(members)
    }
    return [styles[i] for i in range(len(runs))]
