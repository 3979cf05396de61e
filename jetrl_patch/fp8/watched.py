"""What the monitor sees of experts: the operands of their products, which no hook of a module reaches.

    activations: x of gate and up, SiLU(a) * b of down            gradients: da of gate, db of up, dy of down

Each is a row of a pair of token and expert; pairs are sorted by expert. A watch chooses rows, so nothing is copied that it
does not measure, and no count is read back to the host. The layer's own results are untouched.

Shape legend: T tokens, k experts per token, P = T * k pairs, H hidden size, I intermediate size, n rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from jetrl_patch.exact.activation import silu_mul
from jetrl_patch.units import Part

__all__ = ["HasWatch", "Watch", "Watched"]


class Watch(Protocol):
    """Takes one operand: its kind, the matrix that reads it, the expert of each row [P], and a function from rows to values."""

    def __call__(self, kind: str, part: Part, experts_P: Tensor, take: Callable[[Tensor], Tensor], /) -> None: ...


class HasWatch(Protocol):
    """The experts of a layer, which hold the watch of their next forward."""

    watch: Watch | None


class Watched:
    """One forward and its backward."""

    def __init__(self, watch: Watch, ids_Tk: Tensor) -> None:
        self._watch = watch
        self._experts_P, order_P = ids_Tk.reshape(-1).sort(stable=True)
        self._tokens_P = order_P // ids_Tk.shape[1]

    @classmethod
    def begin(cls, own: HasWatch, ids_Tk: Tensor) -> Watched | None:
        """Take the watch of these experts, if there is one: it sees one forward that autograd records and that has tokens."""
        if own.watch is None or not torch.is_grad_enabled() or ids_Tk.numel() == 0 or torch.compiler.is_compiling():
            return None
        watch, own.watch = own.watch, None
        return cls(watch, ids_Tk)

    @torch.no_grad()
    def forward(self, x_TH: Tensor, a_PI: Tensor, b_PI: Tensor) -> None:
        """See the activations. Gate and up read the same, which is named after gate."""
        self._watch("activation", "gate_proj", self._experts_P, lambda rows: x_TH[self._tokens_P[rows]])
        self._watch("activation", "down_proj", self._experts_P, lambda rows: silu_mul(a_PI[rows], b_PI[rows]))

    @torch.no_grad()
    def backward(self, dy_TH: Tensor, da_PI: Tensor, db_PI: Tensor) -> None:
        """See the gradients as DGrad quantizes them."""
        self._watch("gradient", "gate_proj", self._experts_P, lambda rows: da_PI[rows])
        self._watch("gradient", "up_proj", self._experts_P, lambda rows: db_PI[rows])
        self._watch("gradient", "down_proj", self._experts_P, lambda rows: dy_TH[self._tokens_P[rows]])
