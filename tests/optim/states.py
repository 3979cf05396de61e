"""How many bytes an optimizer's moments take."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def state_bytes(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of this process's moments: (as stored, the same in FP32). Step counters are not included."""
    kept = values = 0
    for state in optimizer.state.values():
        for name, tensor in state.items():
            if isinstance(tensor, Tensor) and name != "step":
                kept += sum(part.numel() * part.element_size() for part in _plain_parts(tensor))
                values += _local(tensor).numel()
    return kept, 4 * values


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    tensor = _local(tensor)
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_parts(getattr(tensor, name))
    else:
        yield tensor


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
