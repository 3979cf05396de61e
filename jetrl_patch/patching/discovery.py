"""Which adapters and training programs installed packages offer, from their metadata alone."""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points

from jetrl_patch.errors import PatchError, explain

#: the entry-point group of adapters; each entry is ``NAME = MODULE:ADAPTER``
GROUP = "jetrl_patch.adapters"
#: the entry-point group of training frameworks' main modules, which ``jetrl NAME`` runs; NAME is that of the adapter
PROGRAMS = "jetrl_patch.programs"
#: the distribution that offers the project's own
OURS = "jetrl_patch"


@functools.cache
def offered() -> dict[str, EntryPoint]:
    """The adapters' entry points by name. Raises PatchError if two packages use one name, or ours is not installed."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            both, fix = f"{distribution(other)} and {distribution(point)}", "uninstall one of them"
            raise PatchError(explain(f"adapter {point.name}", required="one package that offers it", found=both, fix=fix))
    if not any(map(is_ours, found.values())):
        required, fix = f"an installation that registers its adapters ({GROUP})", "run `pip install -e .` in the clone (again)"
        raise PatchError(explain("jetrl_patch", required=required, found="none", fix=fix))
    return found


@functools.cache
def programs() -> dict[str, str]:
    """Training framework -> its main module, this package's first."""
    found = sorted(entry_points(group=PROGRAMS), key=lambda point: (not is_ours(point), point.name))
    return {point.name: point.value for point in found}


def outside() -> list[str]:
    """The other packages that offer adapters, as "NAME VERSION"."""
    return sorted({distribution(point) for point in offered().values() if not is_ours(point)})


def distribution(point: EntryPoint) -> str:
    """The package of an entry point, as "NAME VERSION"."""
    return f"{point.dist.name.replace('-', '_')} {point.dist.version}" if point.dist is not None else point.value


def is_ours(point: EntryPoint) -> bool:
    """Whether this package offers it."""
    return distribution(point).partition(" ")[0] == OURS
