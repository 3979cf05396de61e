"""The CPU platform adapter. It does nothing unless this is a CPU run."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar

from jetrl_patch.adapters import cpu
from jetrl_patch.adapters.cpu import megatron, openrlhf, verl
from jetrl_patch.errors import ConflictError, explain
from jetrl_patch.patching.guards import is_installed
from jetrl_patch.registry import Adapter, Config, Journal, OnImport, Patch, Platform

#: set where the user has not; read by verl and vLLM in this process and its children
ENVIRONMENT = {
    "VERL_PLATFORM": ("cpu", "which platform verl uses"),
    "VERL_ENGINE_DEVICE": ("cuda", "verl registers its FSDP engines for 'cuda' and 'npu' only"),
    "VLLM_CPU_OMP_THREADS_BIND": ("nobind", "several engines and trainers share the cores of one machine"),
    "TORCHDYNAMO_DISABLE": ("1", "compiling costs more than it saves at laptop sizes, and fuses what must stay exact"),
}

HIDDEN = "CUDA_VISIBLE_DEVICES"

_ENGINE_BY_VERL = "verl registers a checkpoint engine that runs on CPUs in CheckpointEngineRegistry"
_PLATFORM_BY_VERL = "verl registers a platform named cpu in PlatformRegistry (verl#3266)"


class CpuAdapter(Adapter):
    """Registers a platform with verl, and applies the patches that verl and OpenRLHF need."""

    name: ClassVar[str] = "cpu"
    frameworks: ClassVar[tuple[str, ...]] = ("vllm", "verl", "openrlhf")
    order: ClassVar[int] = 2

    def patches(self, config: Config) -> Sequence[Patch]:
        if not cpu.is_cpu_run(config):
            return ()
        parts = {"torch": verl.FOR_TORCH, "verl": verl.FOR_VERL, "openrlhf": openrlhf.FOR_OPENRLHF}
        return (verl.VERSION, *(patch for name, patches in parts.items() if is_installed(name) for patch in patches))

    def hooks(self, config: Config) -> Sequence[OnImport]:
        """Return the registrations of verl's platform and checkpoint engine, and the hook on OpenRLHF's ``torch.cuda`` calls."""
        if not cpu.is_cpu_run(config):
            return ()
        for_verl: tuple[OnImport, ...] = (
            OnImport(
                "verl.checkpoint_engine", "gloo checkpoint engine",
                functools.partial(_register_engine, timeout=config.sync_timeout),
                reason="verl sends weights to separate rollout processes by its NCCL checkpoint engine, which needs a GPU",
                remove_when=_ENGINE_BY_VERL,
                upstream=verl.NO_CPU,
            ),
            OnImport(
                "verl.plugin.platform.platform_manager", "cpu", _register,
                reason="verl has no CPU platform; this registers one in its PlatformRegistry",
                remove_when=_PLATFORM_BY_VERL,
                upstream=verl.NO_CPU,
            ),
        )  # fmt: skip
        if is_installed("megatron.core"):
            for_verl += (megatron.HOOK,)
        parts = {"verl": for_verl, "openrlhf": openrlhf.HOOKS}
        return tuple(hook for name, hooks in parts.items() if is_installed(name) for hook in hooks)

    def platform(self) -> Platform:
        return cpu

    def on_apply(self, config: Config, journal: Journal) -> None:
        """Set the environment of verl and vLLM. A user's value wins, unless it names another platform."""
        if not cpu.is_cpu_run(config):
            return
        chosen = os.environ.get("VERL_PLATFORM", "cpu")
        if chosen.strip().lower() != "cpu":
            required, fix = "cpu (JETRL_PLATFORM)", "unset VERL_PLATFORM or JETRL_PLATFORM"
            raise ConflictError(explain("VERL_PLATFORM", required=required, found=repr(chosen), fix=fix))
        environment = dict(ENVIRONMENT)
        if is_installed("openrlhf"):
            environment |= openrlhf.ENVIRONMENT
            openrlhf.stand_in(journal)
        for name, (value, reason) in environment.items():
            if not os.environ.get(name):
                journal.set_item(os.environ, name, value, target=f"os.environ[{name!r}]", reason=reason)
        if os.environ.get(HIDDEN, "0").strip() in ("", "-1", "NoDevFiles"):
            journal.remove_item(
                os.environ, HIDDEN,
                target=f"os.environ[{HIDDEN!r}]",
                reason="it hides all GPUs, and Ray then rejects the logical GPUs that verl requests for the workers of a CPU run",
                remove_when="verl's RayResourcePool requests CPUs, not GPUs, for its workers in a CPU run",
            )  # fmt: skip


def _register_engine(package: ModuleType, journal: Journal, timeout: float) -> None:
    from jetrl_patch.adapters.cpu.platform import make_engine

    registry = package.base.CheckpointEngineRegistry._registry
    if "nccl" not in registry:
        journal.set_item(
            registry, "nccl", make_engine(package.base, timeout),
            target="verl.checkpoint_engine.CheckpointEngineRegistry['nccl']",
            reason="verl's NCCL checkpoint engine needs a GPU",
            remove_when=_ENGINE_BY_VERL,
        )  # fmt: skip


def _register(manager: ModuleType, journal: Journal) -> None:
    from jetrl_patch.adapters.cpu.platform import make_platform

    current = manager._current_platform
    chosen = current is not None and current.device_name != "cpu"
    if chosen and current.is_available():
        found = f"{current.device_name!r}, which verl has already chosen"
        fix = "call jetrl_patch.enable() before verl is used, or set VERL_PLATFORM=cpu"
        raise ConflictError(explain("verl's platform", required="cpu", found=found, fix=fix))
    journal.set_item(
        manager.PlatformRegistry._platforms, "cpu", make_platform(manager.PlatformBase),
        target="verl.plugin.platform.PlatformRegistry['cpu']",
        reason="verl has no CPU platform",
        remove_when=_PLATFORM_BY_VERL,
    )  # fmt: skip
    if chosen:  # verl was imported before enable() and fell back to a platform whose device is missing
        journal.set_attr(
            manager, "_current_platform", manager.PlatformRegistry._platforms["cpu"](),
            target="verl.plugin.platform.platform_manager._current_platform",
            reason=f"verl fell back to {current.device_name!r}, which this machine lacks",
            remove_when=_PLATFORM_BY_VERL,
        )  # fmt: skip


ADAPTER = CpuAdapter()
