"""Statistics of the FP8 layers' activations and output gradients, from hooks that exist during one sampled step only.

A hook measures the first forward of its layer that autograd records, on at most ``MOST_ROWS`` tokens, and then removes
itself. The layer's own results are untouched, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.monitor.figures import measure

__all__ = ["MOST_ROWS", "Observer"]

MOST_ROWS = 4096


class Observer:
    """Statistics of one rank, keyed by (kind, layer); the kinds are "activation" and "gradient".

    Args:
        modules: layers by name; without ``rollout``, those that are not (or no longer) ``Fp8Linear`` are skipped.
        rollout: the rollout's quantization, if the trainer's layers are BF16; only activations are measured then.
    """

    def __init__(self, modules: Mapping[str, nn.Module], rollout: Fp8State | None = None) -> None:
        self._modules = modules
        self._rollout = rollout
        self._handles: dict[str, Any] = {}
        self.figures: dict[tuple[str, str], Tensor] = {}

    def arm(self, names: Iterable[str]) -> None:
        """Clear the statistics and wait for the next forward of these layers."""
        self.disarm()
        self.figures = {}
        for name in names:
            module = self._modules.get(name)
            state = module.fp8 if isinstance(module, Fp8Linear) else self._rollout
            if module is not None and state is not None:
                self._handles[name] = module.register_forward_hook(self._hook(name, state))

    def disarm(self) -> None:
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}

    def _hook(self, name: str, state: Fp8State) -> Any:
        def see(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling() or name not in self._handles:
                return
            self._handles.pop(name).remove()
            self.figures["activation", name] = _figures(arguments[0], state, slices=True)
            if output.requires_grad and isinstance(module, Fp8Linear):
                output.register_hook(lambda grad: self._keep(name, grad, state))

        return see

    def _keep(self, name: str, grad: Tensor, state: Fp8State) -> None:
        """Measure the gradient as DGrad quantizes it, in groups of 128 along N."""
        self.figures["gradient", name] = _figures(grad, state, slices=False)


@torch.no_grad()
def _figures(x: Tensor, state: Fp8State, slices: bool) -> Tensor:
    x_MK = x.detach().reshape(-1, x.shape[-1])
    if x_MK.shape[0] > MOST_ROWS:  # groups lie within a row, so rows can be dropped
        x_MK = x_MK[torch.linspace(0, x_MK.shape[0] - 1, MOST_ROWS, device=x.device).round().long()]
    x_MK = x_MK.to(torch.bfloat16).contiguous()
    return measure(x_MK, *state.backend.quantize_activation(x_MK, state.scale_format), slices=slices)
