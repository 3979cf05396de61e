"""Checks of this machine, ``check_*() -> (ok, reason)``, for errors, test skips and ``jetrl status``.

If ok, the reason is what was found (a version, a device name). If not, it says what is missing. Only the hardware checks
import torch.
"""

from __future__ import annotations

import sys

from jetrl_patch._versions import SUPPORTED
from jetrl_patch.patching.guards import check_version, is_installed

__all__ = ["check_compiler", "check_cuda", "check_framework", "check_hopper", "check_python", "installed_frameworks"]

Check = tuple[bool, str]

MINIMUM_PYTHON = (3, 10)
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


def check_compiler() -> Check:
    """Whether this machine can compile the fast CPU backend."""
    if not is_installed("torch"):
        return False, "torch is not installed"
    from jetrl_patch.native import build

    return build.available()


def check_cuda() -> Check:
    """Whether torch sees a CUDA device."""
    if not is_installed("torch"):
        return False, "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return False, f"torch {torch.__version__} sees no CUDA device"
    return True, torch.cuda.get_device_name()


def check_hopper() -> Check:
    """Whether the CUDA device has FP8 tensor cores with block scales (compute capability 9.0)."""
    ok, reason = check_cuda()
    if not ok:
        return ok, reason
    import torch

    found = torch.cuda.get_device_capability()
    if found < HOPPER:
        return False, f"compute capability {HOPPER[0]}.{HOPPER[1]} is required, but {reason} has {found[0]}.{found[1]}"
    return True, reason
