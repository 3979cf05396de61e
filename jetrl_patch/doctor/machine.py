"""Check this machine: accelerator, compiler, GEMM backend, flash-attn."""

from __future__ import annotations

from collections.abc import Iterator

from jetrl_patch import registry, support
from jetrl_patch.config import Config
from jetrl_patch.doctor.report import Check, from_error
from jetrl_patch.errors import ConfigError, JetrlError, split_fix
from jetrl_patch.patching import guards

__all__ = ["check_flash_attn", "check_machine", "is_cpu_run"]


def is_cpu_run(config: Config) -> bool:
    """Whether the run computes on the CPU, by setting or because the installed vLLM is a CPU build."""
    return registry.platform().is_cpu_run(config)


def check_machine(config: Config) -> Iterator[Check]:
    """Check the device, the compiler, the backend, and whether exact alignment works on the device."""
    if guards.installed_version("torch") is None:
        yield Check("device", "skipped", "torch is not installed")
        return
    ok, found = support.check_torch()
    if not ok:
        yield Check("device", "problem", found, "install torch anew, in a build for this machine")
        return
    on_cpu = is_cpu_run(config)
    yield _device(on_cpu)
    if on_cpu:
        yield _compiler()
    yield _backend(config, on_cpu)
    if config.exact and not on_cpu:
        try:
            registry.rollout().refuse_exact_on("cuda")
            yield Check("exact alignment", "ok", "the kernels can run here; every engine tests them before it serves")
        except JetrlError as error:
            yield from_error("exact alignment", error)


def _device(on_cpu: bool) -> Check:
    if on_cpu:
        return Check("device", "ok", "CPU (the installed vLLM is a CPU build, or platform='cpu')")
    ok, found = support.check_cuda()
    if not ok:
        return Check("device", "problem", found, "use a machine with a GPU, or the CPU builds of torch and vLLM")
    fast, why = support.check_hopper()
    if not fast:
        finding = f"{found} has no fast FP8 kernel: {why}"
        return Check("device", "warning", finding, "use an H100 or H200; on this GPU FP8 saves memory but no time")
    return Check("device", "ok", found)


def _compiler() -> Check:
    ok, found = support.check_compiler()
    if ok:
        return Check("compiler", "ok", found)
    what, fix = split_fix(found)
    finding = f"{what}; without it FP8 products run in plain torch, many times slower"
    return Check("compiler", "warning", finding, fix or "install a C compiler (gcc or clang)")


def _backend(config: Config, on_cpu: bool) -> Check:
    if not config.fp8_rollout:
        return Check("GEMM backend", "skipped", f"precision={config.precision!r} has no FP8 products")
    from jetrl_patch.fp8.backends import choose_backend

    try:
        name = choose_backend(config.backend, "cpu" if on_cpu else "cuda")
    except ConfigError as error:
        return from_error("GEMM backend", error)
    if name == "torch":
        return Check("GEMM backend", "warning", "torch: the reference formulas, correct but slow")
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
