"""Options that a framework has renamed since its newest scripts, translated for the installed parser."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["translated"]

_FLAG = "--algo.advantage.is_correction_"
#: OpenRLHF's ``is_correction_type`` up to 0.11.0 -> level and mode since 0.11.1
_TYPES = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}


def translated(framework: str, arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The arguments under their current names, and a sentence for each change."""
    if framework != "openrlhf" or f"{_FLAG}enable" not in arguments:
        return list(arguments), ()
    rest = [word for word in arguments if word != f"{_FLAG}enable"]
    chosen = "tis"
    if f"{_FLAG}type" in rest:
        at = rest.index(f"{_FLAG}type")
        chosen = rest[at + 1]
        del rest[at : at + 2]
    level, mode = _TYPES[chosen]
    new = [f"{_FLAG}level", level, f"{_FLAG}mode", mode]
    return [*rest, *new], (f"its correction {chosen} is read as `{' '.join(new)}`, its name since OpenRLHF 0.11.1",)
