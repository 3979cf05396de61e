"""Reductions: the digest of a weight, and the sum over ranks in rank order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.gemm_common import PINNED, check_device, rounded

# ---- The digest of a weight (``sync.digest``) on a GPU: one launch per tensor, and the host does not wait
# A program reads its part of the matrix once. The order of a sum modulo 2**64 does not matter, so programs add with an atomic.
# Results stay in slots on the device, and the host reads the slots of many tensors together.

#: rows and columns of a tile, and tiles per program, one below the other
ROWS, COLS, TILES = 16, 256, 4
#: number of slots that are allocated and set to zero together
SLOTS = 1024


@triton.jit
def odd_hash(index, SALT: tl.constexpr):  # type: ignore[no-untyped-def]
    z = index.to(tl.uint64) + SALT
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) | 1).to(tl.int64)


@triton.jit
def digest_kernel(  # type: ignore[no-untyped-def]
    x, out, rows, cols, ld, row0, col0,
    HALVES: tl.constexpr, SPECIAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr,
    ROW_SALT: tl.constexpr, COL_SALT: tl.constexpr,
):  # fmt: skip
    """``x`` holds bytes [rows, cols], or with HALVES 16-bit words. ``cols``, ``ld`` and ``col0`` count bytes or words.

    out[0] += digest. out[1] = 1 if there is a NaN or infinity, which the exponent of a word shows: of every word if SPECIAL is 1
    (BF16), of every second word if it is 2 (the upper halves of FP32).
    """
    strips = tl.cdiv(cols, COLS)
    c = (tl.program_id(0) % strips) * COLS + tl.arange(0, COLS)
    top = (tl.program_id(0) // strips).to(tl.int64) * (ROWS * TILES)
    if HALVES:
        col = odd_hash(2 * (c.to(tl.int64) + col0), COL_SALT)
        col_high = odd_hash(2 * (c.to(tl.int64) + col0) + 1, COL_SALT)
    else:
        col = odd_hash(c.to(tl.int64) + col0, COL_SALT)
    total = tl.zeros((ROWS,), tl.int64)
    special = tl.zeros((ROWS, COLS), tl.int32)
    for tile in range(TILES):
        r = top + tile * ROWS + tl.arange(0, ROWS)
        held = (r < rows)[:, None] & (c < cols)[None, :]
        word = tl.load(x + r[:, None] * ld + c[None, :], mask=held, other=0).to(tl.int32)
        if HALVES:
            low, high = word & 0xFF, (word >> 8) & 0xFF
            terms = (low + 1).to(tl.int64) * col[None, :] + (high + 1).to(tl.int64) * col_high[None, :]
            if SPECIAL:
                whole = ((c % SPECIAL) == SPECIAL - 1)[None, :]
                special |= (((word & 0x7F80) == 0x7F80) & whole).to(tl.int32)
        else:
            terms = ((word & 0xFF) + 1).to(tl.int64) * col[None, :]
        total += odd_hash(r + row0, ROW_SALT) * tl.sum(tl.where(held, terms, 0), 1)
    tl.atomic_add(out, tl.sum(total, 0), sem="relaxed")
    if SPECIAL:
        tl.store(out + 1, tl.full((), 1, tl.int64), mask=tl.max(tl.max(special, 1), 0) > 0)


#: the hashes' offsets, as in ``sync.digest``: splitmix64's increment times the salt, modulo 2**64
SALTS = {"ROW_SALT": 0x9E3779B97F4A7C15, "COL_SALT": 0x9E3779B97F4A7C15 * 2 % (1 << 64)}
FIXED = {"ROWS": ROWS, "COLS": COLS, "TILES": TILES, **SALTS}


#: words per value, for the dtypes that may hold NaN or Inf
_SPECIAL = {torch.bfloat16: 1, torch.float32: 2}


#: the slots of each device that are still zero
_free: dict[torch.device, list[Tensor]] = {}


def _slot(device: torch.device) -> Tensor:
    """Int64 zeros [2]. Many are cleared in one launch. The memory of a block is freed with the last of its slots."""
    free = _free.setdefault(device, [])
    if not free:
        free.extend(torch.zeros(SLOTS, 2, dtype=torch.int64, device=device).unbind())
    return free.pop()


def digest(matrix_RC: Tensor, row0: int, col0: int) -> Tensor:
    """The digest, and 1 if the matrix is BF16 or FP32 and holds NaN or Inf: int64 [2] on the device.

    Args:
        matrix_RC: any dtype, contiguous rows, any row stride.
        row0, col0: the position of the matrix in the whole tensor, in elements.
    """
    size = matrix_RC.element_size()
    halves = size % 2 == 0
    words = matrix_RC.view(torch.int16 if halves else torch.uint8)
    rows, cols = words.shape
    out = _slot(words.device)
    grid = (-(-cols // COLS) * -(-rows // (ROWS * TILES)),)
    digest_kernel[grid](
        words, out, rows, cols, words.stride(0), row0, col0 * (size // 2 if halves else size),
        HALVES=halves, SPECIAL=_SPECIAL.get(matrix_RC.dtype, 0), num_warps=4, **FIXED,
    )  # fmt: skip
    return out


# ---- ``fp8.mixture.added`` in one launch: the FP32 sums of R ranks, added in rank order and rounded once to BF16
# Elements are independent, so no tile or batch affects a bit. A launch moves 4 R + 2 bytes per element. torch's operations take R
# launches and move 12 (R - 1) + 6.

#: elements and warps of a program
SIZE, WARPS = 1024, 4


@triton.jit(do_not_specialize=["M"])  # one binary for every batch
def rank_sum_kernel(parts, y, M, N, RANKS: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    size = M.to(tl.int64) * N
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.load(parts + at, mask=at < size, other=0.0)
    for rank in tl.static_range(1, RANKS):
        total += tl.load(parts + rank * size + at, mask=at < size, other=0.0)
    tl.store(y + at, rounded(total), mask=at < size)


def rank_sum(parts_RMN: Tensor) -> Tensor:
    """BF16 [M, N] from FP32 [R, M, N]."""
    if parts_RMN.dtype != torch.float32:
        raise TypeError(f"the sums of ranks must be torch.float32, found {parts_RMN.dtype}")
    check_device(parts_RMN)
    (R, M, N), parts = parts_RMN.shape, parts_RMN.contiguous()
    y = torch.empty(M, N, dtype=torch.bfloat16, device=parts.device)
    if y.numel():
        rank_sum_kernel[(-(-M * N // SIZE),)](parts, y, M, N, RANKS=R, SIZE=SIZE, num_warps=WARPS, **PINNED)
    return y
