"""Choose the implementation of the exact ops: C kernels on the CPU, Triton kernels on CUDA, or FP64 torch formulas anywhere.

With each of them a row's bits do not depend on the rest of the batch. Their bits differ from one another, so a run uses
one implementation on both sides, chosen by ``Config.backend`` and the device type.
"""

from __future__ import annotations

from torch import Tensor

from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.exact.capability import check_exact_cuda
from jetrl_patch.fp8.backends import choose_backend

_chosen: dict[str, str] = {}


def configure(backend: str, device_type: str = "cpu") -> str:
    """Choose and store the implementation for ``Config.backend``; returns "native", "triton" or "torch".

    On CUDA every backend uses the Triton ops, except ``backend="torch"``, which uses the slow formulas.

    Raises:
        ConfigError: the backend cannot run here, or the ops cannot run on this GPU.
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
    """The implementation for this tensor's device: "native", "triton" or "torch"."""
    kind = tensor.device.type
    if kind not in _chosen:
        configure("auto", kind)
    return _chosen[kind]
