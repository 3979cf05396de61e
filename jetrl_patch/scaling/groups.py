"""Which linears read which norm: where a factor of the norm's output can be taken out of one and put into the other.

    norm(x) = x̂ · g        W norm(x) = (W · f) (norm(x) / f)        with f a number, or one number per channel

Only linears that read the norm, and nothing else that does, may stand in a group; the record of the model's family says
which they are (``families.Family.readers``), and that its norms are ``x̂ · g`` (not ``1 + g``) and stand before the linears.
``o_proj`` and ``down_proj`` read no norm and are in none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jetrl_patch.errors import ModelError
from jetrl_patch.families import covering

__all__ = ["Group", "groups_of"]


@dataclass(frozen=True)
class Group:
    """Names of one norm's weight and of the weights that read it, in the order in which they are sent."""

    norm: str
    readers: tuple[str, ...]


def groups_of(names: Iterable[str], family: str | None, asked: str) -> list[Group]:
    """The groups among a model's parameters.

    Args:
        names: of the parameters, as Hugging Face calls them.
        family: ``model_type`` of the model's configuration.
        asked: what wants to know, for the error.

    Raises:
        ModelError: another family, where a factor might change the model's function.
    """
    covered = covering("scaling")
    if family not in covered:
        raise ModelError(
            f"{asked} is known to change nothing for the model families {', '.join(covered)}, found "
            f"model_type={family!r}; switch it off (smoothing=0, or no invariant_scale)"
        )
    known = dict.fromkeys(names)
    found = []
    for name in known:
        stem, _, leaf = name.removesuffix(".weight").rpartition(".")
        readers = tuple(f"{stem}.{part}.weight" for part in covered[family].readers.get(leaf, ()))
        present = tuple(reader for reader in known if reader in readers)
        if present:
            found.append(Group(name, present))
    return found
