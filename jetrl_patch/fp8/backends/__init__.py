"""GEMM backends: one is chosen by name for a run and used on both sides."""

from __future__ import annotations

from jetrl_patch.errors import ConfigError
from jetrl_patch.fp8.backends.base import Backend

__all__ = ["Backend", "choose_backend", "get_backend"]

_LOADED: dict[str, Backend] = {}


def choose_backend(name: str, device_type: str) -> str:
    """The backend's name for ``Config.backend`` on this kind of device.

    "auto" takes the C kernels on a CPU that has a compiler, else the torch reference. The choice is part of
    the manifest of every weight sync, so two processes that chose differently do not go on.

    Raises:
        ConfigError: an unknown name, or one that cannot serve here.
    """
    from jetrl_patch.native import build

    if name not in ("auto", "native", "torch"):
        raise ConfigError(f"backend={name!r} is unknown; choose one of auto, native, torch")
    if name == "torch":
        return name
    if device_type != "cpu":
        if name == "native":
            raise ConfigError(f'backend="native" is for the CPU, found device type {device_type!r}; use "torch"')
        return "torch"
    ok, reason = build.available()
    if not ok and name == "native":
        raise ConfigError(f'backend="native" was asked for, but {reason}')
    return "native" if ok else "torch"


def get_backend(name: str) -> Backend:
    """The backend called ``name`` ("native" or "torch"); one instance a process."""
    if name not in _LOADED:
        if name == "native":
            from jetrl_patch.fp8.backends.native import NativeBackend

            _LOADED[name] = NativeBackend()
        elif name == "torch":
            from jetrl_patch.fp8.backends.reference import TorchBackend

            _LOADED[name] = TorchBackend()
        else:
            raise ConfigError(f"no GEMM backend is called {name!r}; there are native and torch")
    return _LOADED[name]
