"""Output gradients that an operation quantized for the layers before it: their backward need not read the gradient again.

The gradient itself, in BF16, goes through autograd as ever, so that hooks, a bias and a monitor see it. Its bytes wait here,
under that very tensor and version: a gradient that was changed, summed with another or copied on its way finds none, and is
quantized.
"""

from __future__ import annotations

import threading
import weakref

from torch import Tensor

from jetrl_patch.fp8.formats import ScaleFormat

__all__ = ["HANDED", "Both"]

#: both layouts of dY [M, N]: (q [M, N], s [M, N/128]) for DGrad, (q [N, M padded], s [M/128, N]) for WGrad
Both = tuple[Tensor, Tensor, Tensor, Tensor]


class _Handed(threading.local):
    def __init__(self) -> None:
        self._waiting: dict[int, tuple[weakref.ref[Tensor], tuple[int, str, ScaleFormat], Both]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def keep(self, grad: Tensor, both: Both, backend: str, scale_format: ScaleFormat) -> None:
        """Hold the bytes of ``grad`` [..., N] until they are taken or the tensor is freed."""
        place, waiting = id(grad), self._waiting  # of this thread, whichever frees the tensor
        source = weakref.ref(grad, lambda _: waiting.pop(place, None))
        waiting[place] = source, (grad._version, backend, scale_format), both

    def take(self, grad: Tensor, backend: str, scale_format: ScaleFormat) -> Both | None:
        """The bytes that wait for this tensor as it is now, for the layer that calls; None if there are none."""
        found = self._waiting.pop(id(grad), None)
        if found is None:
            return None
        source, key, both = found
        same = key == (grad._version, backend, scale_format)
        return both if same and source() is grad else None


#: those of the thread that runs the backward pass
HANDED = _Handed()
