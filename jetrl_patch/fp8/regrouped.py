"""An input in the groups that WGrad reads, made once for all layers that read the input.

q, k and v read one tensor, as do gate and up. It is quantized and saved once, and each layer's WGrad wants its transpose in
groups of 128 tokens. That is the same for all of them: 2 bytes an element that are moved once in a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Regrouped"]


class Regrouped:
    """WGrad's operand of one quantized input. It is held from its first reader to its last, within one backward pass."""

    def __init__(self) -> None:
        self._readers: set[int] = set()
        self._left = 0
        self._made: tuple[int, tuple[Tensor, Tensor]] | None = None

    def add_reader(self, layer: object) -> Regrouped:
        """Expect a call of ``get`` from a layer's backward. A recomputation of its forward does not count again."""
        self._readers.add(id(layer))
        return self

    def get(self, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The operand: e4m3 [K, M] and scales [M/128, K]. Outside of a backward pass it is made each time."""
        number = torch._C._current_graph_task_id()
        if self._made is None or self._made[0] != number or number == -1:  # a pass before this one may have stopped half-way
            self._made, self._left = (number, make()), len(self._readers)
        value = self._made[1]
        self._left -= 1
        if self._left <= 0:
            self._made = None
        return value
