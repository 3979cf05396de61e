"""GEMM backends. A run chooses one by name and uses it on both sides."""

from __future__ import annotations

import functools
import importlib
import logging

from jetrl_patch.backends.base import Backend
from jetrl_patch.config.formats import FORMATS, ScaleFormat
from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.native.machine import Capability

__all__ = ["Backend", "choose_backend", "get_backend"]

logger = logging.getLogger(__name__)

_LOADED: dict[str, Backend] = {}

#: name -> module and class
_CLASSES = {
    "native": ("cpu", "NativeBackend"),
    "torch": ("base", "Backend"),
    "triton": ("gpu", "TritonBackend"),
    "deep_gemm": ("deep_gemm", "DeepGemmBackend"),
    "cublaslt": ("cublaslt", "CublasLtBackend"),
    "te": ("cublaslt", "TeBackend"),
    "mx": ("gpu", "MxBackend"),
}
#: what "auto" tries on a GPU, best first; cuBLASLt and TransformerEngine are used only if named
_PREFERRED = ("deep_gemm", "triton")


def choose_backend(name: str, device_type: str, scale_format: ScaleFormat = "pow2", sm: Capability | None = None) -> str:
    """Resolve ``Config.backend`` to a backend's name for this device type.

    "auto" chooses the C kernels on a CPU with a compiler, DeepGEMM on Hopper if it is installed and can compile, otherwise the
    Triton kernels on Hopper, and the torch reference everywhere else. The manifest of every weight sync contains the choice, so a
    run stops if its processes chose differently. A scale format may have a backend of its own on a GPU.

    With ``sm``, the GPU's compute capability, this only checks what can be checked without CUDA, and "auto" stays "auto".

    Raises ConfigError if the name is unknown, or the backend or the scale format cannot run here.
    """
    from jetrl_patch.backends.capability import CHECKS, refuse_format_on
    from jetrl_patch.native import build

    if name not in ("auto", "native", "torch", *CHECKS):
        raise ConfigError(f"backend={name!r} is unknown. Choose one of auto, native, torch, {', '.join(CHECKS)}.")
    form = FORMATS[scale_format]
    if form.majors is not None:
        refuse_format_on(form.name, form.majors, device_type, sm)
    if name == "torch":
        return name
    on_cpu, found = device_type == "cpu", f"device type {device_type!r}"
    if on_cpu and name in CHECKS:
        raise ConfigError(explain(f"backend={name!r}", required="a CUDA device", found=found, fix='use "native" or "torch"'))
    if not on_cpu and name == "native":
        raise ConfigError(explain(f"backend={name!r}", required="a CPU", found=found, fix='use "auto" or "torch"'))
    if not on_cpu:
        return form.gpu_backend or _on_gpu(name, sm)
    ok, reason = build.available()
    if not ok and name == "native":
        raise ConfigError(f"backend={name!r} cannot run here: {reason}")
    if not ok:
        _say_slow(f"native: {reason}")
    return "native" if ok else "torch"


def _on_gpu(name: str, sm: Capability | None) -> str:
    from jetrl_patch.backends.capability import CHECKS, deep_gemm_installed

    if name == "auto" and sm is not None:
        return name
    if name == "auto":
        checked = {candidate: CHECKS[candidate]() for candidate in _PREFERRED}
        served = next((candidate for candidate, (ok, _) in checked.items() if ok), None)
        if served is None:
            _say_slow("; ".join(f"{candidate}: {reason}" for candidate, (_, reason) in checked.items()))
        elif served != _PREFERRED[0]:
            _say_next(_PREFERRED[0], checked[_PREFERRED[0]][1], served, deep_gemm_installed())
        return served or "torch"
    ok, reason = CHECKS[name](sm)
    if not ok:
        fix = 'use backend="auto" or "torch"'
        raise ConfigError(explain(f"backend={name!r}", required="a backend that runs on this device", found=reason, fix=fix))
    return name


@functools.cache
def _say_slow(reasons: str) -> None:
    """Warn once per process: results are correct, but slower than BF16."""
    logger.warning('backend="auto": no fast FP8 backend runs here (%s); the slow FP64 torch reference is used instead', reasons)


@functools.cache
def _say_next(first: str, reason: str, served: str, installed: bool) -> None:
    """Say once per process that the best backend is not used. A warning if it is installed but cannot run."""
    level = logging.WARNING if installed else logging.INFO
    logger.log(level, 'backend="auto": %s is not used (%s); %s serves', first, reason, served)


def get_backend(name: str) -> Backend:
    """The backend ``name``, as returned by ``choose_backend``; one instance per process."""
    if name not in _LOADED:
        if name not in _CLASSES:
            raise ConfigError(f"no GEMM backend is called {name!r}. Choose one of {', '.join(_CLASSES)}.")
        module, kind = _CLASSES[name]
        _LOADED[name] = getattr(importlib.import_module(f"jetrl_patch.backends.{module}"), kind)()
    return _LOADED[name]
