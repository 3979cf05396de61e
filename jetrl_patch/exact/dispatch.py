"""Which implementation serves: the C kernels on the CPU, or FP64 torch formulas anywhere.

Both give a row the same bits whatever stands beside it; they do not give each other's bits, so a run
uses one on both sides (the choice is that of the GEMM backend and stands in the sync's manifest).
"""

from __future__ import annotations

from torch import Tensor

from jetrl_patch.fp8.backends import choose_backend

_chosen: dict[str, str] = {}


def configure(backend: str, device_type: str = "cpu") -> str:
    """Fix the implementation for ``Config.backend``; returns the backend's name."""
    _chosen[device_type] = choose_backend(backend, device_type)
    return _chosen[device_type]


def native(tensor: Tensor) -> bool:
    """Do the C kernels serve this tensor?"""
    kind = tensor.device.type
    if kind not in _chosen:
        configure("auto", kind)
    return _chosen[kind] == "native"
