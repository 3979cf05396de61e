"""A CPU platform for verl: ``torch.cpu`` plus no-ops for the memory calls that verl makes.

verl 0.9 defines platforms in ``verl.plugin.platform`` but none for a CPU. This one uses Ray's logical "GPUs", one per
training process, because verl places its workers by them.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

_PLENTY = 1 << 34  # result of mem_get_info; verl only compares it with what it wants to reserve


class CpuDeviceModule(types.ModuleType):
    """Result of ``verl.utils.device.get_torch_device()``: ``torch.cpu`` plus the CUDA-only calls."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        """Return False: there is no accelerator."""
        return False

    def memory_allocated(self, *_: Any, **__: Any) -> int:
        """Return 0: no device memory is in use."""
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, *_: Any, **__: Any) -> tuple[int, int]:
        """Return (free, total) bytes."""
        return _PLENTY, _PLENTY

    def nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: a CPU has no caches, streams or current device."""

    empty_cache = ipc_collect = synchronize = reset_peak_memory_stats = set_device = nothing

    def get_device_name(self, *_: Any) -> str:
        """Return the name for tables."""
        return "CPU"

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        """Restore torch's generator: verl saves no state for a device called "cpu", and asks for one on resuming."""
        torch.set_rng_state(state)

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        """The state of torch's generator."""
        return torch.get_rng_state()


DEVICE_MODULE = CpuDeviceModule("jetrl_cpu_device")


def make_platform(base: type) -> type:
    """The platform class, derived from verl's ``PlatformBase`` (which cannot be imported here)."""

    class PlatformCPU(base):
        """CPU: gloo, shared memory for weights, Ray's logical GPUs for placement."""

        device_name = "cpu"
        vendor_name = "cpu"
        device_module = DEVICE_MODULE

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return False  # only by name: never chosen on a machine that has an accelerator

        def current_device(self) -> torch.device:
            return torch.device("cpu")  # verl does x.to(get_device_id())

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            pass

        def synchronize(self, device_index: int | None = None) -> None:
            pass

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None:
            pass

        def empty_cache(self) -> None:
            pass

        def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextlib.contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None:
            pass

        def profiler_stop(self) -> None:
            pass

        def ray_resource_name(self) -> str:
            return "GPU"  # logical: ray.init(num_gpus=N)

        def ray_noset_envvars(self) -> list[str]:
            return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

        def is_ipc_supported(self) -> bool:
            return False  # verl then transfers weights through shared memory

        def rollout_env_vars(self) -> dict[str, str]:
            return {}

        def cudart(self) -> Any:
            return None

    return PlatformCPU
