"""The most memory that a call needs on a device."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_mib(device: torch.device, call: Callable[[int], object]) -> float | str:
    """MiB that one call allocates at most above what was allocated before it; "" where the device does not count them."""
    if device.type != "cuda":
        return ""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(0)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
