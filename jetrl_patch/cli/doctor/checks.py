"""Checks of the installation: versions, the machine, and the patches that ``enable()`` would apply."""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from collections.abc import Collection, Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from jetrl_patch import registry, session
from jetrl_patch._versions import SUPPORTED
from jetrl_patch.config import Config
from jetrl_patch.errors import UNQUANTIZED, ConfigError, JetrlError, VersionError, split_fix
from jetrl_patch.native import machine
from jetrl_patch.native.machine import check_framework, check_python
from jetrl_patch.patching import guards
from jetrl_patch.snapshot import PatchStatus
from jetrl_patch.trainer.rules import Check, from_error

# ---- Compare the installed versions with the supported ones, and advise what the framework pins. Imports no framework

_ALWAYS = ("torch", "transformers", "vllm")


def packages() -> dict[str, tuple[str, ...]]:
    """Training framework -> what its runs need in addition to torch, transformers and vllm."""
    return {name: registry.resolve(name).packages or (name,) for name in registry.programs()}


def check_versions(framework: str | None) -> Iterator[Check]:
    """Check Python and each package. ``framework`` is that of the command, None without a command.

    An unsupported version stops every ``enable()``, even if the command does not use that framework; a missing package stops
    only the runs that need it.
    """
    ok, found = check_python()
    yield Check("python", "ok" if ok else "problem", found, "" if ok else "use a newer Python")
    known = packages()
    here = [name for name in known if guards.is_installed(name)]
    used = [framework] if framework else here
    needed = {*_ALWAYS, *(package for name in used for package in known[name])} if used else {*_ALWAYS, *known}
    only = used[0] if len(used) == 1 else ""
    for name in SUPPORTED:
        pin = _pin(name, only, here)
        ok, found = check_framework(name)
        if ok:
            finding = f"{found}, supported {SUPPORTED[name][0]}"
            required = _required(only, name)
            if pin and not required.contains(found, prereleases=True):
                finding += f", but {only} {guards.installed_version(only)} requires {required}"
                yield Check(name, "warning", finding, pin)
            else:
                yield Check(name, "ok", finding)
        elif name in needed or guards.is_installed(name):
            finding, fix = split_fix(found)
            if framework and name in known and name != framework:
                finding += f"; this stops the plugin, although the command runs {framework}"
            if not used and name in known:
                fix = f"install the framework that you train with: {' or '.join(known)}"
            yield Check(name, "problem", finding, pin or fix)
        else:
            yield Check(name, "skipped", f"not installed; only runs of {name} need it")
    yield _deepspeed([known[name] for name in used], _pin("deepspeed", only, here))


def stopped(found: Collection[Check]) -> dict[str, str]:
    """Framework -> the missing package that stops its runs, if runs of another installed framework would start."""
    missing = any(check.name == "deepspeed" and check.state == "warning" for check in found)
    return {name: "deepspeed" for name, needed in packages().items() if missing and "deepspeed" in needed}


def _pin(name: str, framework: str, here: Collection[str]) -> str:
    """Advice to install what a framework pins; empty without a pin that the plugin and all installed frameworks accept."""
    pinned = next((spec.version for spec in _required(framework, name, "vllm") if spec.operator == "=="), "")
    accepted = [SpecifierSet(SUPPORTED[name][0] if name in SUPPORTED else ""), *(_required(other, name) for other in here)]
    if not pinned or not all(versions.contains(pinned) for versions in accepted):
        return ""
    return f"install {name}=={pinned}, which {framework} {guards.installed_version(framework)} pins"


def _required(framework: str, name: str, extra: str = "") -> SpecifierSet:
    """The versions of a package that an installed framework requires, with or without an extra; all if it names none."""
    found = SpecifierSet()
    try:
        texts = importlib.metadata.requires(framework) if framework else None
    except importlib.metadata.PackageNotFoundError:
        texts = None
    for requirement in map(Requirement, texts or ()):
        if requirement.name == name and (requirement.marker is None or requirement.marker.evaluate({"extra": extra})):
            found &= requirement.specifier
    return found


def _deepspeed(used: Collection[Collection[str]], pin: str) -> Check:
    """Check DeepSpeed. jetrl_patch supports whatever version the installed OpenRLHF requires.

    ``used`` has the packages of each framework in use.
    """
    found = guards.installed_version("deepspeed")
    if found is not None:
        return Check("deepspeed", "ok", found)
    needed = ["deepspeed" in names for names in used]
    if not any(needed):
        return Check("deepspeed", "skipped", "not installed; only OpenRLHF needs it")
    finding, fix = "not installed, but OpenRLHF trains with it", pin or "install deepspeed"
    if all(needed):
        return Check("deepspeed", "problem", finding, fix)
    return Check("deepspeed", "warning", f"{finding}; other runs start", fix)


# ---- Check this machine: accelerator, compiler, GEMM backend, flash-attn -------------------------

def check_machine(config: Config, address: str = "") -> Iterator[Check]:
    """Check the device, the compiler, the backend, and whether exact alignment works on the device.

    ``address`` is that of the Ray cluster that the run would join. Its head node may have no GPU, and then tells nothing.
    """
    if guards.installed_version("torch") is None:
        yield Check("device", "skipped", "torch is not installed")
        return
    ok, found = machine.check_torch()
    if not ok:
        yield Check("device", "problem", found, "reinstall torch, in a build for this machine")
        return
    on_cpu = registry.platform().is_cpu_run(config)
    device = _device(config, on_cpu, address)
    yield device
    if device.state == "unknown":
        yield Check("GEMM backend", "skipped", "only a node with a GPU can tell")
        return
    if on_cpu:
        yield _compiler()
    yield _backend(config, on_cpu)
    if config.exact and not on_cpu:
        from jetrl_patch.backends import capability

        try:
            capability.refuse_exact_on("cuda")
            yield Check("exact alignment", "ok", "the kernels can run here; every engine tests them before it serves")
        except JetrlError as error:
            yield from_error("exact alignment", error)


#: what works on every GPU, in the words of docs/install.md
_ANY_GPU = f"use {UNQUANTIZED} or 'fp16' on this GPU; for FP8 use an H100 or H200"


def _device(config: Config, on_cpu: bool, address: str) -> Check:
    """The device, and whether it can run the precision: for each format, vLLM refuses GPUs below a compute capability."""
    if on_cpu:
        return Check("device", "ok", "CPU (the installed vLLM is a CPU build, or platform='cpu')")
    ok, found = machine.check_cuda()
    if not ok and address not in ("", "local"):
        finding = f"{found} on this node, and the others of the Ray cluster at {address} were not checked"
        return Check("device", "unknown", finding, "run jetrl doctor on a node that has GPUs")
    if not ok:
        fix = "use a machine with a GPU, or the CPU builds of torch and vLLM; on a Ray head node without a GPU set RAY_ADDRESS"
        return Check("device", "problem", found, fix)
    fast, why = machine.check_hopper()
    if fast or config.format is None or config.scales.majors is not None:  # then the check of the backend decides
        return Check("device", "ok", found)
    import torch

    major, minor = torch.cuda.get_device_capability()
    least = config.format.capability
    if 10 * major + minor < least:
        required = f"vLLM serves {config.precision} from compute capability {least // 10}.{least % 10} on"
        return Check("device", "problem", f"{found} has compute capability {major}.{minor}, and {required}", _ANY_GPU)
    if not config.fp8_rollout:
        return Check("device", "ok", found)
    finding = f"{found} has no fast FP8 kernel: {why}; FP8 is correct on it, and far too slow to train"
    return Check("device", "warning", finding, _ANY_GPU)


def _compiler() -> Check:
    ok, found = machine.check_compiler()
    if ok:
        return Check("compiler", "ok", found)
    what, fix = split_fix(found)
    finding = f"{what}; without it FP8 products run in plain torch, many times slower"
    return Check("compiler", "warning", finding, fix or "install a C compiler (gcc or clang)")


def _backend(config: Config, on_cpu: bool) -> Check:
    if not config.fp8_rollout:
        return Check("GEMM backend", "skipped", f"precision={config.precision!r} has no FP8 products")
    from jetrl_patch.backends import choose_backend

    try:
        name = choose_backend(config.backend, "cpu" if on_cpu else "cuda", config.scale_format)
    except ConfigError as error:
        return from_error("GEMM backend", error)
    if name == "torch":
        return Check("GEMM backend", "warning", "torch: the FP64 reference, correct but slow")
    return Check("GEMM backend", "ok", name)


def check_flash_attn(on_cpu: bool, needed_by: str | None) -> Check:
    """Check flash-attn. ``needed_by`` names what in the command needs it; empty if nothing does, None if that is unknown."""
    if guards.is_installed("flash_attn"):
        return Check("flash-attn", "ok", guards.installed_version("flash-attn") or "installed")
    if on_cpu or needed_by == "":
        return Check("flash-attn", "skipped", f"not installed; {'a CPU run' if on_cpu else 'the command'} works without it")
    if needed_by:
        return Check("flash-attn", "problem", f"not installed, but {needed_by} needs it", "install flash-attn")
    finding = "not installed; on CUDA OpenRLHF needs it, and verl with its default attention or packed samples"
    return Check("flash-attn", "warning", finding, "install flash-attn, or check the command (`jetrl doctor -- …`)")


# ---- List the patches that ``enable()`` would apply ----------------------------------------------

def check_patches(config: Config) -> tuple[Check, list[PatchStatus]]:
    """Run the checks of ``enable()`` on versions, settings and targets. Imports no framework and changes nothing."""
    if not machine.check_torch()[0]:
        return Check("patches", "skipped", "they need torch (see above)"), []
    try:
        planned = session.preview(config)
    except VersionError:
        return Check("patches", "skipped", "a version is not supported (see above)"), []
    except JetrlError as error:
        return from_error("patches", error), []
    counts = Counter(re.split("[.:]", patch.target)[0] for patch in planned)
    parts = ", ".join(f"{number} in {name}" for name, number in counts.items())
    return Check("patches", "ok", f"{len(planned)} would be applied: {parts}"), planned
