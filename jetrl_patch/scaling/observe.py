"""Record max |X| per channel of the norms' outputs in the trainer's forward, since the last sync."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Observer"]


class Observer:
    """Observes norms from the first ``start()``. Its figures are not part of the model's state.

    Args:
        norms: name of a norm's weight -> the module, which sharding does not replace.
        widths: name of a norm's weight -> number of channels.
    """

    def __init__(self, norms: Mapping[str, nn.Module], widths: Mapping[str, int]) -> None:
        self._norms = dict(norms)
        self._widths = dict(widths)
        self._hooks: list[Any] = []
        self._now: dict[str, Tensor] = {}
        self._agreed: dict[str, Tensor] = {}

    def start(self) -> None:
        """Start observing. A model that is never exported (a reference model) is never observed."""
        if not self._hooks:
            for name, norm in self._norms.items():
                self._hooks.append(norm.register_forward_hook(self._hook(name)))

    def seen(self, name: str) -> Tensor | None:
        """The figures [K] agreed on by all ranks; None before the first forward."""
        return self._agreed.get(name)

    @torch.no_grad()
    def agree(self) -> None:
        """Reduce the figures since the last call to their maximum over all ranks. Every rank must call it.

        If there was no forward since the last call, the previous figures remain.
        """
        flat = torch.cat([self._of(name) for name in self._norms]) if self._norms else torch.zeros(0)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if torch.distributed.get_backend() == "nccl":
                flat = flat.cuda()  # zeros may be on the CPU: no forward yet, and parameters offloaded
            torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX)
        parts = flat.split([self._widths[name] for name in self._norms]) if self._norms else ()
        for name, part in zip(self._norms, parts, strict=True):
            if bool((part > 0).any()):
                self._agreed[name] = part.clone()
        self._now = {}

    def _of(self, name: str) -> Tensor:
        found = self._now.get(name)
        if found is None:
            device = next((t.device for t in self._now.values()), _device(self._norms.values()))
            return torch.zeros(self._widths[name], device=device)
        return found

    def _hook(self, name: str) -> Any:
        @torch.no_grad()
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            x_MK = output.detach().flatten(0, -2)
            if not x_MK.shape[0]:
                return
            amax_K = torch.linalg.vector_norm(x_MK, math.inf, 0).float()  # max |x|, without a copy of |x|
            amax_K = amax_K.nan_to_num(0.0, 0.0, 0.0)  # NaN and Inf are reported where they arise, not here
            before = self._now.get(name)
            self._now[name] = amax_K if before is None else torch.maximum(before, amax_K)

        return hook


def _device(modules: Iterable[nn.Module]) -> torch.device:
    for module in modules:
        for parameter in module.parameters():
            if parameter.device.type != "meta":
                return parameter.device
    return torch.device("cpu")
