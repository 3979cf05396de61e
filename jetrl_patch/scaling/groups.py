"""Groups of a norm and the linears that read it, between which a factor can be moved without changing the function.

    norm(x) = x̂ · g        W norm(x) = (W · f) (norm(x) / f)        with f a number, or one number per channel

A group needs a norm that only linears read. The record of the model's family lists them (``families.Family.readers``) and
states that its norms are ``x̂ · g`` (not ``x̂ · (1 + g)``) and precede the linears. ``o_proj`` and ``down_proj`` read no
norm, so they are in no group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.families import covering

__all__ = ["Group", "groups_of"]


@dataclass(frozen=True)
class Group:
    """The names of a norm's weight and of the weights that read it, in the order of the model's parameters."""

    norm: str
    readers: tuple[str, ...]


def groups_of(names: Iterable[str], family: str | None, asked: str) -> list[Group]:
    """Find the groups among a model's parameters.

    Args:
        names: the parameters' Hugging Face names.
        family: ``model_type`` of the model's configuration.
        asked: the setting that the error names, with its value.

    Raises:
        ModelError: the family is not covered, so moving a factor might change the model's function.
    """
    covered = covering("scaling")
    if family not in covered:
        raise ModelError(
            explain(
                asked,
                required=f"one of the model families {', '.join(covered)}, whose function it preserves",
                found=f"model_type={family!r}",
                fix="switch it off: set smoothing=0, or drop invariant_scale",
            )
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
