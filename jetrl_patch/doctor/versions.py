"""Check installed versions against the table of supported ones. Nothing is imported."""

from __future__ import annotations

from collections.abc import Iterator

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
    needed = {*_ALWAYS, *(FRAMEWORKS[framework] if framework else ())}
    if not framework and not here:
        needed |= set(FRAMEWORKS)
    elif not framework:
        needed |= {package for name in here for package in FRAMEWORKS[name]}
    for name in SUPPORTED:
        ok, found = check_framework(name)
        if ok:
            yield Check(name, "ok", f"{found}, supported {SUPPORTED[name][0]}")
            continue
        stops = name in needed or guards.is_installed(name)
        yield Check(name, "problem" if stops else "warning", *split_fix(found))
    yield _deepspeed("deepspeed" in needed)


def _deepspeed(needed: bool) -> Check:
    """Check DeepSpeed, for which jetrl_patch has no range: OpenRLHF's version decides."""
    found = guards.installed_version("deepspeed")
    if found is not None:
        return Check("deepspeed", "ok", found)
    if not needed:
        return Check("deepspeed", "skipped", "not installed; only OpenRLHF needs it")
    return Check("deepspeed", "problem", "not installed, but OpenRLHF trains with it", "install deepspeed")
