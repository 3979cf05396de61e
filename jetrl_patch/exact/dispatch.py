"""Which implementation serves: C kernels on the CPU, Triton kernels on CUDA, or FP64 torch formulas anywhere.

Each gives a row the same bits whatever stands beside it; they do not give each other's bits, so a run uses one on both
sides (the choice follows from ``Config.backend`` and the kind of device).
"""

from __future__ import annotations

from torch import Tensor

from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.exact.capability import check_exact_cuda
from jetrl_patch.fp8.backends import choose_backend

_chosen: dict[str, str] = {}


def configure(backend: str, device_type: str = "cpu") -> str:
    """Fix the implementation for ``Config.backend``; returns "native", "triton" or "torch".

    On CUDA the ops are Triton's whichever backend multiplies in FP8; ``backend="torch"`` asks for the slow formulas.

    Raises:
        ConfigError: no such backend here, or a GPU on which the ops cannot run.
    """
    chosen = choose_backend(backend, device_type)
    if device_type != "cpu":
        chosen = "triton" if backend != "torch" and device_type == "cuda" else "torch"
        ok, reason = check_exact_cuda() if chosen == "triton" else (True, "")
        if not ok:
            asked, fix = "an NVIDIA GPU of compute capability 8.0 or newer with triton", "use align='linear' on CUDA"
            raise ConfigError(explain("align='exact' on CUDA", required=asked, found=reason, fix=fix))
    _chosen[device_type] = chosen
    return chosen


def implementation(tensor: Tensor) -> str:
    """What serves this tensor: "native", "triton" or "torch"."""
    kind = tensor.device.type
    if kind not in _chosen:
        configure("auto", kind)
    return _chosen[kind]
