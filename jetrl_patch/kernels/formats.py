"""What every kernel shares: the FP8 format, its blocks, checks of operands, and operands that are made once for several
products."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from jetrl_patch.errors import explain

__all__ = ["HANDED", "Both", "Regrouped"]


# ---- Constants that trainer and rollout share: the FP8 format, the block size and the two scale formats
# Source: Jet-RL (arXiv 2601.14243, section 4) for the granularity; DeepSeek-V3 (arXiv 2412.19437, section 3.3)
# for the blocks and the name ``weight_scale_inv``.

BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
#: Lower bound of an amax. 1e-4, used elsewhere, would flush small gradients to zero. The scale is amax / 448,
#: because its reciprocal 448 / amax overflows for a tiny amax.
AMAX_FLOOR = 1e-10

ScaleFormat = Literal["pow2", "fp32"]


def groups(size: int) -> int:
    """The number of 128-element groups that cover ``size`` elements; the last one may be partial."""
    return -(-size // BLOCK)


def split_width(K: int, splits: int) -> int:
    """The width of one of ``splits`` equal ranges of K. Raises ValueError if a range boundary cuts a block."""
    if splits < 1 or (splits > 1 and K % (splits * BLOCK)):
        raise ValueError(f"K = {K} cannot be split {splits} ways without cutting a block of {BLOCK}")
    return K // splits


# ---- Operand checks shared by all backends: a kernel computes addresses from the sizes, so a wrong size reads foreign memory

def check_fprop(
    q_MK: Tensor, s_MG: Tensor, w_NK: Tensor, sw: Tensor, out_dtype: torch.dtype, blocks: bool = False
) -> None:
    """Require e4m3 X [M, K] with FP32 scales [M, G] and W [N, K] with [N, G] on one device, and BF16 or FP32 output.

    With ``blocks`` the scales of W are [ceil(N/128), G].

    Raises:
        TypeError: a dtype is wrong.
        ValueError: the shapes do not match, or the tensors are on several devices.
    """
    for name, q, s, rows in (("X", q_MK, s_MG, 1), ("W", w_NK, sw, BLOCK if blocks else 1)):
        if q.dtype != FP8 or s.dtype != torch.float32:
            raise TypeError(f"{name}: expected {FP8} with torch.float32 scales, found {q.dtype} with {s.dtype}")
        if q.dim() != 2 or s.shape != (-(-q.shape[0] // rows), groups(q.shape[1])):
            per = "row" if rows == 1 else f"{rows} rows"
            raise ValueError(f"{name}: {list(q.shape)} needs one scale per {per} and 128 columns, found {list(s.shape)}")
    if q_MK.shape[1] != w_NK.shape[1]:
        raise ValueError(
            explain(
                "an FP8 linear layer",
                required=f"inputs of width {w_NK.shape[1]}, as its weight",
                found=f"width {q_MK.shape[1]}",
                fix="check the caller; if weights are sharded, check that this one is gathered",
            )
        )
    devices = {str(t.device) for t in (q_MK, s_MG, w_NK, sw)}
    if len(devices) > 1:
        raise ValueError(
            explain(
                "an FP8 linear layer", required="input, weight and their scales on one device",
                found=", ".join(sorted(devices)), fix="move the model and its inputs to one device",
            )
        )  # fmt: skip
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"output dtype: expected torch.bfloat16 or torch.float32, found {out_dtype}")


# ---- Output gradients that an operation quantized for the layers before it: their backward need not read the gradient again
# The gradient itself, in BF16, goes through autograd as ever, so that hooks, a bias and a monitor see it. Its bytes wait here,
# under that very tensor and version: a gradient that was changed, summed with another or copied on its way finds none, and is
# quantized.

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


# ---- An input in the groups that WGrad reads, made once for all layers that read the input -------
# q, k and v read one tensor, as do gate and up. It is quantized and saved once, and each layer's WGrad wants its transpose in
# groups of 128 tokens. That is the same for all of them: 2 bytes an element that are moved once in a backward pass.

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
