"""May a backend serve a rollout? Only if a row's bits do not depend on what stands beside it, on this very machine.

A rollout decodes M = 1 to a few hundred rows, the trainer multiplies thousands at once: the same rows must come out equal
bit for bit, and so must the sum of a tensor-parallel rollout's partial products. A library that picks its kernel by M can
break both, by version, by device and by shape, so it is tried before it serves. The CPU backends are proven by tests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.fp8.backends.base import Backend
from jetrl_patch.fp8.formats import BLOCK, ScaleFormat
from jetrl_patch.fp8.quantize import expand_weight_scale

#: rows of a decode batch; up to 32 the Triton backend quantizes and multiplies in one launch
DECODED = (1, 7, 32, 64, 256)
#: rows of a training batch; no multiple of a tile
TRAINED = 2056
#: where in the training batch the decoded rows stand
OFFSETS = (0, 129)

_PROVEN: set[tuple[str, str, int, int, str]] = set()


class Verdict(NamedTuple):
    """Whether all rows were equal, and in words what was compared or what differed."""

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
    """Multiply a batch whole and in parts, in BF16 and FP32, with a weight [N, K] of this ``shape``; any device.

    Where K is an even number of 128-blocks, also in two ranges of K, against the sum of their partial products.
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
        whole = backend.fprop(x_MK, q_NK, s_NG, scale_format, out_dtype)
        for rows in decoded:
            for start in OFFSETS:
                if start + rows > trained:
                    continue
                part = backend.fprop(x_MK[start : start + rows], q_NK, s_NG, scale_format, out_dtype)
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
            return Verdict(False, f"{unequal} of {both.numel()} values differ between two ranges of K and two ranks' sums")
    return Verdict(True, f"rows at M = {', '.join(map(str, decoded))} equal those at M = {trained}")


def _unequal(a: Tensor, b: Tensor) -> int:
    bits = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return int((a.contiguous().view(bits) != b.contiguous().view(bits)).sum())


def require_row_equality(
    backend: Backend, shape: tuple[int, int], device: torch.device, scale_format: ScaleFormat = "pow2"
) -> None:
    """Once a process for each backend, device and shape; nothing is done on a CPU.

    Call it before a CUDA graph is captured: it reads a verdict back.

    Raises:
        ModelError: rows depend on their neighbours, so what is sampled would not be what is trained.
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
