"""GEMM backends: one is chosen by name for a run and used on both sides."""

from __future__ import annotations

import functools
import importlib
import logging

from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.fp8.backends.base import Backend

__all__ = ["Backend", "choose_backend", "get_backend"]

logger = logging.getLogger(__name__)

_LOADED: dict[str, Backend] = {}

#: name -> module and class
_CLASSES = {
    "native": ("native", "NativeBackend"),
    "torch": ("reference", "TorchBackend"),
    "triton": ("triton", "TritonBackend"),
    "deep_gemm": ("deep_gemm", "DeepGemmBackend"),
    "cublaslt": ("cublaslt", "CublasLtBackend"),
    "te": ("te", "TeBackend"),
}
#: what "auto" takes on a GPU, best first; cuBLASLt and TransformerEngine only by name
_PREFERRED = ("deep_gemm", "triton")


def choose_backend(name: str, device_type: str) -> str:
    """The backend's name for ``Config.backend`` on this kind of device.

    "auto" takes the C kernels on a CPU that has a compiler, DeepGEMM on Hopper where it is installed, else the Triton
    kernels there, and the torch reference everywhere else. The choice is part of the manifest of every weight sync, so
    two processes that chose differently do not go on.

    Raises:
        ConfigError: an unknown name, or one that cannot serve here.
    """
    from jetrl_patch.fp8.backends.capability import CHECKS
    from jetrl_patch.native import build

    if name not in ("auto", "native", "torch", *CHECKS):
        raise ConfigError(f"backend={name!r} is unknown; choose one of auto, native, torch, {', '.join(CHECKS)}")
    if name == "torch":
        return name
    if device_type != "cpu":
        if name == "native":
            raise ConfigError(f'backend="native" is for the CPU, found device type {device_type!r}; use "torch"')
        return _on_gpu(name)
    if name in CHECKS:
        found = f"device type {device_type!r}"
        raise ConfigError(explain(f"backend={name!r}", required="a CUDA device", found=found, fix='use "native" or "torch"'))
    ok, reason = build.available()
    if not ok and name == "native":
        raise ConfigError(f'backend="native" was asked for, but {reason}')
    return "native" if ok else "torch"


def _on_gpu(name: str) -> str:
    from jetrl_patch.fp8.backends.capability import CHECKS

    if name == "auto":
        checked = {candidate: CHECKS[candidate]() for candidate in _PREFERRED}
        served = next((candidate for candidate, (ok, _) in checked.items() if ok), None)
        if served is None:
            _say_slow("; ".join(f"{candidate}: {reason}" for candidate, (_, reason) in checked.items()))
        return served or "torch"
    ok, reason = CHECKS[name]()
    if not ok:
        fix = 'use backend="auto" or "torch"'
        raise ConfigError(explain(f"backend={name!r}", required="one that serves on this device", found=reason, fix=fix))
    return name


@functools.cache
def _say_slow(reasons: str) -> None:
    """Once a process: the run is right, and no faster than BF16."""
    logger.warning(
        'backend="auto": no fast FP8 backend serves this GPU (%s); the torch reference computes, in FP64 and slowly', reasons
    )


def get_backend(name: str) -> Backend:
    """The backend called ``name``, as ``choose_backend`` gave it; one instance a process."""
    if name not in _LOADED:
        if name not in _CLASSES:
            raise ConfigError(f"no GEMM backend is called {name!r}; there are {', '.join(_CLASSES)}")
        module, kind = _CLASSES[name]
        _LOADED[name] = getattr(importlib.import_module(f"jetrl_patch.fp8.backends.{module}"), kind)()
    return _LOADED[name]
