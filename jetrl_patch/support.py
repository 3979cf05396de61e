"""Checks of this machine, ``check_*() -> (ok, reason)``, for errors, test skips and ``jetrl status``.

If ok, the reason is what was found (a version, a device name). If not, it says what is missing. Only the hardware checks
import torch.
"""

from __future__ import annotations

import sys

from jetrl_patch._versions import SUPPORTED
from jetrl_patch.errors import VersionError, explain
from jetrl_patch.patching.guards import check_version, is_installed

__all__ = [
    "check_compiler",
    "check_cuda",
    "check_framework",
    "check_hopper",
    "check_python",
    "check_torch",
    "count_gpus",
    "installed_frameworks",
    "require_torch",
]

Check = tuple[bool, str]

MINIMUM_PYTHON = (3, 10)
#: FP8 ``wgmma`` and the block-scaled kernels of the GPU libraries exist only on Hopper (8.9 accumulates in another
#: order, 10.0 uses other scales)
HOPPER = (9, 0)


def check_python() -> Check:
    """Whether the Python version is supported."""
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < MINIMUM_PYTHON:
        return False, f"Python {'.'.join(map(str, MINIMUM_PYTHON))} or newer is required, but this is {found}"
    return True, found


def check_framework(name: str) -> Check:
    """Whether a framework of ``_versions.SUPPORTED`` is installed in a supported version. Imports nothing."""
    if name not in SUPPORTED:
        return False, f"{name} is not among the supported frameworks: {', '.join(SUPPORTED)}"
    return check_version(name)


def installed_frameworks() -> list[str]:
    """The frameworks of ``_versions.SUPPORTED`` that can be imported, in a supported version or not."""
    return [name for name in SUPPORTED if is_installed(name)]


def check_torch() -> Check:
    """Whether torch is installed and can be imported."""
    if not is_installed("torch"):
        return False, "torch is not installed"
    try:
        import torch
    except Exception as error:  # whatever a damaged installation raises
        words = " ".join(str(error).split())
        return False, f"torch cannot be imported ({type(error).__name__}: {words[:160]})"
    return True, str(torch.__version__)


def require_torch(command: str) -> None:
    """Raise VersionError, in the name of a command, if torch cannot be imported."""
    ok, found = check_torch()
    if not ok:
        fix = f"install torch{SUPPORTED['torch'][0]} anew"
        raise VersionError(explain(command, required="torch", found=f"that {found}", fix=fix))


def check_compiler() -> Check:
    """Whether this machine can compile the fast CPU backend."""
    ok, reason = check_torch()
    if not ok:
        return False, reason
    from jetrl_patch.native import build

    return build.available()


def check_cuda() -> Check:
    """Whether torch sees a CUDA device."""
    ok, reason = check_torch()
    if not ok:
        return False, reason
    import torch

    if not torch.cuda.is_available():
        return False, f"torch {torch.__version__} sees no CUDA device"
    return True, torch.cuda.get_device_name()


def count_gpus() -> int:
    """The number of CUDA devices that torch sees, under ``CUDA_VISIBLE_DEVICES``."""
    if not check_cuda()[0]:
        return 0
    import torch

    return torch.cuda.device_count()


def check_hopper() -> Check:
    """Whether torch sees a Hopper GPU, the only kind that the fast FP8 backends serve."""
    ok, reason = check_cuda()
    if not ok:
        return ok, reason
    import torch

    if torch.version.hip is not None:
        return False, f"it needs an NVIDIA GPU, and this torch was built for ROCm {torch.version.hip}"
    found = torch.cuda.get_device_capability()
    if found != HOPPER:
        return False, f"it needs compute capability 9.0 (Hopper), and this device has {found[0]}.{found[1]}"
    return True, reason
