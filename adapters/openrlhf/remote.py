"""Renew Ray's copies of inherited methods.

``@ray.remote`` sets every method of a class, including inherited ones, on the class that it exports. A subclass decorated in
the module of its base therefore holds copies from before the patch. A renewed copy is the patched function itself, which Ray
pickles by name, so each worker uses its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from jetrl_patch.adapters.base import Journal

REASON = "@ray.remote copied the base's methods into this class before they were patched, so actors would run the originals"
REMOVE_WHEN = "Ray no longer copies inherited methods into the exported class"


def renew(module: ModuleType, journal: Journal, *, base: str, names: Sequence[str]) -> None:
    """Set the current methods ``names`` of ``base`` on the module's remote classes that derive from it."""
    parent = getattr(module, base)
    for remote in vars(module).values():
        exported = getattr(getattr(remote, "__ray_metadata__", None), "modified_class", None)
        if exported is None or not issubclass(exported, parent):
            continue
        for name in names:
            if name in vars(exported.__ray_actor_class__):
                continue  # an override, which calls the base's method by name
            journal.set_attr(
                exported,
                name,
                vars(parent)[name],
                target=f"{module.__name__}.{exported.__name__}.{name}",
                reason=REASON,
            )
