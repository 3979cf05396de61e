"""The one device of a run: whether it still works, and what ``nvidia-smi`` says about it."""

from __future__ import annotations

import contextlib
import subprocess

import torch


def is_broken() -> bool:
    """Whether a CUDA error, such as an illegal access, has ended all use of the device by this process.

    Such an error is returned by every later call. Others (a refused shape, memory that is short) are returned once.
    """
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # its type and words differ between versions of torch
        return True
    return False


def smi_name() -> str | None:
    """What ``nvidia-smi --id`` takes for this process's first device, whatever CUDA_VISIBLE_DEVICES says; None without one."""
    if not torch.cuda.is_available():
        return None
    name = str(torch.cuda.get_device_properties(0).uuid)
    return name if name.startswith("GPU-") else f"GPU-{name}"


def driver() -> str:
    """The version of the driver; "" where ``nvidia-smi`` does not say."""
    name = smi_name()
    if name is None:
        return ""
    command = ["nvidia-smi", f"--id={name}", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return ""
