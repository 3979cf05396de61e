"""Ray's copies of inherited methods.

``@ray.remote`` sets every method of a class, inherited ones too, on the class that it exports. A subclass that is
decorated in the module of its base has copies from before our patch of the base; a renewed copy is the patched
function itself, which travels by name, so that each worker uses its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from jetrl_patch.adapters.base import Journal

REASON = "Ray has copied the base's methods into this class before they were patched"
REMOVE_WHEN = "Ray exports inherited methods by inheritance"


def renew(module: ModuleType, journal: Journal, *, base: str, names: Sequence[str]) -> None:
    """Give the remote classes of a module that derive from ``base`` its methods ``names`` as they are now."""
    parent = getattr(module, base)
    for remote in vars(module).values():
        exported = getattr(getattr(remote, "__ray_metadata__", None), "modified_class", None)
        if exported is None or not issubclass(exported, parent):
            continue
        for name in names:
            if name in vars(exported.__ray_actor_class__):
                continue  # a method of its own, which calls the base's
            journal.set_attr(
                exported,
                name,
                vars(parent)[name],
                target=f"{module.__name__}.{exported.__name__}.{name}",
                reason=REASON,
            )
