"""Test on this machine that a row's bits do not depend on the rest of the batch, before a backend serves a rollout.

A rollout decodes M = 1 to a few hundred rows, and the trainer multiplies thousands at once. The same rows must be equal
bit for bit, and so must the sum of a tensor-parallel rollout's partial products. A library that selects its kernel by M
can break both, depending on version, device and shape. The test suite proves the CPU backends.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.fp8.backends.base import Backend
from jetrl_patch.fp8.formats import BLOCK, ScaleFormat
from jetrl_patch.fp8.quantize import expand_weight_scale

#: rows of decode batches; up to 32 rows the Triton backend quantizes and multiplies in one launch
DECODED = (1, 7, 32, 64, 256)
#: rows of a training batch; not a multiple of a tile
TRAINED = 2056
#: positions of the decoded rows in the training batch
OFFSETS = (0, 129)

_PROVEN: set[tuple[object, ...]] = set()


class Part(NamedTuple):
    """Rows ``row0`` to ``row1`` of the trainer's weight [rows, K], and the row where they begin in the rollout's weight."""

    rows: int
    row0: int
    row1: int
    offset: int


class Layout(NamedTuple):
    """How the rollout's weight [N, K] is put together, and how many ranks hold a range of the trainer's K."""

    parts: tuple[Part, ...]
    ranks: int = 1

    @property
    def in_blocks(self) -> bool:
        """Whether each 128 rows of the rollout's weight are 128 rows of one block, so that they have one scale."""
        return all(part.row0 % BLOCK == 0 and part.offset % BLOCK == 0 for part in self.parts)


class Verdict(NamedTuple):
    """Whether all rows were equal, and a description of what was compared or what differed."""

    ok: bool
    found: str


def compare_rows(
    backend: Backend,
    shape: tuple[int, int],
    device: torch.device | str,
    scale_format: ScaleFormat = "pow2",
    trained: int = TRAINED,
    decoded: tuple[int, ...] = DECODED,
) -> Verdict:
    """Compare products of a whole batch and of its parts, in BF16 and FP32, for a weight [N, K] of this ``shape``.

    If K is an even number of 128-blocks, also compare a product with ``splits=2`` and the sum of two partial products.
    """
    N, K = shape
    generator = torch.Generator(device).manual_seed(N + K)
    x, size, w = (
        torch.randn(*shape, generator=generator, device=device) for shape in ((trained, K), (trained, 1), (N, K))
    )
    x_MK, w_NK = (x * torch.exp(size)).to(torch.bfloat16), (w * K**-0.5).to(torch.bfloat16)
    q_NK, s_blocks = backend.quantize_weight(w_NK, scale_format)
    s_NG = expand_weight_scale(s_blocks, N)
    for out_dtype in (torch.bfloat16, torch.float32):
        whole = backend.fprop(x_MK, q_NK, s_NG, scale_format, out_dtype, s_blocks=s_blocks)
        for rows in decoded:
            for start in OFFSETS:
                if start + rows > trained:
                    continue
                part = backend.fprop(
                    x_MK[start : start + rows], q_NK, s_NG, scale_format, out_dtype, s_blocks=s_blocks
                )
                unequal = _unequal(part, whole[start : start + rows])
                if unequal:
                    values = f"{unequal} of {part.numel()} {out_dtype} values"
                    return Verdict(False, f"{values} at M = {rows} differ from those at M = {trained}")
    if K % (2 * BLOCK) == 0:
        half, blocks = K // 2, K // 2 // BLOCK
        sums = [
            backend.fprop(
                x_MK[:7, i * half : (i + 1) * half].contiguous(),
                q_NK[:, i * half : (i + 1) * half].contiguous(),
                s_NG[:, i * blocks : (i + 1) * blocks].contiguous(),
                scale_format,
                torch.float32,
            )
            for i in (0, 1)
        ]
        both = backend.fprop(x_MK, q_NK, s_NG, scale_format, torch.float32, 2)[:7]
        unequal = _unequal(sums[0] + sums[1], both)
        if unequal:
            return Verdict(False, f"{unequal} of {both.numel()} values differ between splits=2 and the sum of two ranks")
    return Verdict(True, f"rows at M = {', '.join(map(str, decoded))} equal those at M = {trained}")


def _unequal(a: Tensor, b: Tensor) -> int:
    bits = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return int((a.contiguous().view(bits) != b.contiguous().view(bits)).sum())


def require_row_equality(
    backend: Backend,
    shape: tuple[int, int],
    device: torch.device,
    scale_format: ScaleFormat = "pow2",
) -> None:
    """Run ``compare_rows`` once per process for each backend, device, shape and scale format; never on a CPU.

    Call it before a CUDA graph is captured, because it reads the verdict back to the host.

    Raises:
        ModelError: rows depend on their neighbours, so rollout and trainer would disagree.
    """
    key = (backend.name, str(device), *shape, scale_format)
    if device.type == "cpu" or key in _PROVEN:
        return
    verdict = compare_rows(backend, shape, device, scale_format)
    if not verdict.ok:
        raise ModelError(
            explain(
                f"backend={backend.name!r} in a rollout",
                required=f"rows that do not depend on the batch, for weights {list(shape)}",
                found=verdict.found,
                fix='use backend="triton" on both sides',
            )
        )
    _PROVEN.add(key)
