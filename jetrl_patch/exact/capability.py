"""GPU requirements of the exact ops: ``check_*() -> (ok, reason)``, as in ``jetrl_patch.support``."""

from __future__ import annotations

import importlib.util

import torch

#: the oldest capability with BF16 tensor cores that Triton compiles for
LEAST = (8, 0)


def check_exact_cuda() -> tuple[bool, str]:
    """Whether the Triton kernels that trainer and rollout share can run here. Launches none."""
    if not torch.cuda.is_available():
        return False, f"torch {torch.__version__} sees no CUDA device"
    if torch.version.hip is not None:
        return False, f"a torch built for ROCm {torch.version.hip}"
    found = torch.cuda.get_device_capability()
    if found < LEAST:
        return False, f"compute capability {found[0]}.{found[1]}, below 8.0"
    if importlib.util.find_spec("triton") is None:
        return False, "the triton package is not installed"
    return True, torch.cuda.get_device_name()
