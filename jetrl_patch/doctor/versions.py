"""Check installed versions against the table of supported ones, and advise what the framework in use pins. Imports nothing."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from jetrl_patch._versions import SUPPORTED
from jetrl_patch.doctor.report import Check
from jetrl_patch.errors import split_fix
from jetrl_patch.patching import guards
from jetrl_patch.support import check_framework, check_python

__all__ = ["FRAMEWORKS", "check_versions"]

#: framework -> what its runs need besides torch, transformers and vllm
FRAMEWORKS = {"verl": ("verl", "ray"), "openrlhf": ("openrlhf", "ray", "deepspeed")}
_ALWAYS = ("torch", "transformers", "vllm")


def check_versions(framework: str | None) -> Iterator[Check]:
    """Check Python and each package. ``framework`` is that of the command, None without a command.

    An unsupported version stops every ``enable()``; a missing package stops only the runs that need it.
    """
    ok, found = check_python()
    yield Check("python", "ok" if ok else "problem", found, "" if ok else "use a newer Python")
    here = [name for name in FRAMEWORKS if guards.is_installed(name)]
    used = [framework] if framework else here
    needed = {*_ALWAYS, *(package for name in used for package in FRAMEWORKS[name])} if used else {*_ALWAYS, *FRAMEWORKS}
    only = used[0] if len(used) == 1 else ""
    for name in SUPPORTED:
        pin = _pin(name, only, here)
        ok, found = check_framework(name)
        if ok:
            yield _supported(name, found, only, pin)
        elif name in needed or guards.is_installed(name):
            finding, fix = split_fix(found)
            if not used and name in FRAMEWORKS:
                fix = f"install the framework that you train with: {' or '.join(FRAMEWORKS)}"
            yield Check(name, "problem", finding, pin or fix)
        else:
            yield Check(name, "skipped", f"not installed; only runs of {name} need it")
    yield _deepspeed("deepspeed" in needed, _pin("deepspeed", only, here))


def _supported(name: str, found: str, framework: str, pin: str) -> Check:
    """A supported version. It is a warning where the framework in use requires another one and can have it."""
    finding = f"{found}, supported {SUPPORTED[name][0]}"
    required = _required(framework, name)
    if pin and not required.contains(found, prereleases=True):
        finding += f", but {framework} {guards.installed_version(framework)} requires {required}"
        return Check(name, "warning", finding, pin)
    return Check(name, "ok", finding)


def _pin(name: str, framework: str, here: Collection[str]) -> str:
    """Advice to install what a framework pins; empty if it pins no version that the plugin and all that is installed accept."""
    pinned = next((spec.version for spec in _required(framework, name, "vllm") if spec.operator == "=="), "")
    accepted = [SpecifierSet(SUPPORTED[name][0] if name in SUPPORTED else ""), *(_required(other, name) for other in here)]
    if not pinned or not all(versions.contains(pinned) for versions in accepted):
        return ""
    return f"install {name}=={pinned}, which {framework} {guards.installed_version(framework)} pins"


def _required(framework: str, name: str, extra: str = "") -> SpecifierSet:
    """The versions of a package that an installed framework requires, by itself or with an extra; all if it does not say."""
    found = SpecifierSet()
    try:
        texts = importlib.metadata.requires(framework) if framework else None
    except importlib.metadata.PackageNotFoundError:
        texts = None
    for requirement in map(Requirement, texts or ()):
        if requirement.name == name and (requirement.marker is None or requirement.marker.evaluate({"extra": extra})):
            found &= requirement.specifier
    return found


def _deepspeed(needed: bool, pin: str) -> Check:
    """Check DeepSpeed, for which jetrl_patch has no range: OpenRLHF's version decides."""
    found = guards.installed_version("deepspeed")
    if found is not None:
        return Check("deepspeed", "ok", found)
    if not needed:
        return Check("deepspeed", "skipped", "not installed; only OpenRLHF needs it")
    return Check("deepspeed", "problem", "not installed, but OpenRLHF trains with it", pin or "install deepspeed")
