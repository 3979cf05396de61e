"""Sort the pairs of token and expert by expert, on the device: no count is read back, so that no launch waits for the host.

    ids [T, k]  ->  order [P], place [P], offsets [E + 1], and tables of tiles and groups        P = T * k pairs

Pair t * k + j is token t's j-th expert. Sorted by expert, and by token within one, pair ``order[p]`` stands at position p and
pair i at ``place[i]``; expert e has the positions ``offsets[e]`` to ``offsets[e + 1]``. A product needs one tile for each 64
positions of an expert, WGrad one group for each 128. How many there are is known only on the device: grids follow from the
upper bound P // size + min(E, P), and programs without a tile end.

An index beyond the experts gets no position. ``combine`` turns its token into NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.fp8.formats import BLOCK
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.gemm_common import PINNED, check_device

#: rows of a product's tile: the least that FP8 ``wgmma`` has, because a decoding step gives an expert few tokens
ROWS = 64
#: pairs that a program reads at once, and its warps
STEP, WARPS = 1024, 4


class Table(NamedTuple):
    """Ranges of positions of one expert each: ``entries`` [bound, 3] of expert, first position, end; ``first`` [E + 1] of an
    expert's first entry, and last the number of entries."""

    entries: Tensor
    first: Tensor


class Plan(NamedTuple):
    """The sorted pairs of a batch; everything is int32 but ``ids``.

    Attributes:
        ids: indices of the experts [T, k], contiguous.
        order, place, offsets: see the module.
        tiles: ranges of at most ``ROWS`` positions. groups: of at most 128.
    """

    ids: Tensor
    order: Tensor
    place: Tensor
    offsets: Tensor
    tiles: Table
    groups: Table

    @property
    def experts(self) -> int:
        return self.offsets.shape[0] - 1

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything, for ``of``."""
        return (*self[:4], *self.tiles, *self.groups)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Plan:
        """The plan that consists of these tensors."""
        ids, order, place, offsets, *tables = tensors
        return cls(ids, order, place, offsets, Table(*tables[:2]), Table(*tables[2:]))


@triton.jit(do_not_specialize=["P"])  # one binary for every batch
def count_kernel(ids, counts, P, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program an expert: the number of its pairs."""
    expert = tl.program_id(0)
    total = tl.zeros((STEP,), tl.int32)
    for start in tl.range(0, P, STEP):
        pair = start + tl.arange(0, STEP)
        total += (tl.load(ids + pair, mask=pair < P, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0))


@triton.jit
def fill_table(entries, first, expert, E, counts, offset, SIZE: tl.constexpr, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the entries of one expert, from the counts of all."""
    each = (counts + (SIZE - 1)) // SIZE
    index = tl.arange(0, EXPERTS)
    mine = tl.sum(tl.where(index == expert, each, 0), 0)
    end = offset + tl.sum(tl.where(index == expert, counts, 0), 0)
    start = tl.sum(tl.where(index < expert, each, 0), 0)
    tl.store(first + expert, start)
    if expert == E - 1:
        tl.store(first + E, start + mine)
    for i in tl.range(0, mine, 64):
        j = i + tl.arange(0, 64)
        at = entries + (start + j) * 3
        tl.store(at, tl.full((64,), 0, tl.int32) + expert, mask=j < mine)
        tl.store(at + 1, offset + j * SIZE, mask=j < mine)
        tl.store(at + 2, tl.minimum(offset + (j + 1) * SIZE, end), mask=j < mine)


@triton.jit(do_not_specialize=["E", "P"])  # one binary for every batch
def plan_kernel(  # type: ignore[no-untyped-def]
    ids, counts, order, place, offsets, tiles, tile_first, groups, group_first, P, E,
    ROWS: tl.constexpr, STEP: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """One program an expert: the positions of its pairs, and its entries. EXPERTS is a power of two that covers E."""
    expert = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    every = tl.load(counts + index, mask=index < E, other=0)
    at = tl.sum(tl.where(index < expert, every, 0), 0)
    tl.store(offsets + expert, at)
    if expert == E - 1:
        tl.store(offsets + E, tl.sum(every, 0))
    fill_table(tiles, tile_first, expert, E, every, at, ROWS, EXPERTS)
    fill_table(groups, group_first, expert, E, every, at, 128, EXPERTS)
    for start in tl.range(0, P, STEP):
        pair = start + tl.arange(0, STEP)
        mine = tl.load(ids + pair, mask=pair < P, other=-1) == expert
        one = mine.to(tl.int32)
        position = at + tl.cumsum(one, 0) - 1
        tl.store(order + position, pair, mask=mine)
        tl.store(place + pair, position, mask=mine)
        at += tl.sum(one, 0)


def plan(ids_Tk: Tensor, experts: int) -> Plan:
    """Sort the pairs by expert, in two launches.

    Args:
        ids_Tk: indices of experts, int64 or int32.

    Raises:
        TypeError: the indices have another dtype.
        ValueError, ConfigError: as ``check_device``.
    """
    if ids_Tk.dtype not in (torch.int32, torch.int64) or ids_Tk.dim() != 2:
        raise TypeError(f"indices of experts: expected int32 or int64 [T, k], found {ids_Tk.dtype} {list(ids_Tk.shape)}")
    check_device(ids_Tk)
    ids, P = ids_Tk.contiguous(), ids_Tk.numel()
    few = min(experts, P)
    sizes = (experts, P, P, experts + 1, (P // ROWS + few) * 3, experts + 1, (P // BLOCK + few) * 3, experts + 1)
    counts, order, place, offsets, *tables = (torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes)
    count_kernel[(experts,)](ids, counts, P, STEP=STEP, num_warps=WARPS, **PINNED)
    plan_kernel[(experts,)](
        ids, counts, order, place, offsets, *tables, P, experts,
        ROWS=ROWS, STEP=STEP, EXPERTS=triton.next_power_of_2(experts), num_warps=WARPS, **PINNED,
    )  # fmt: skip
    tiles, tile_first, groups, group_first = tables
    return Plan(ids, order, place, offsets, Table(tiles.view(-1, 3), tile_first), Table(groups.view(-1, 3), group_first))


_OUTPUTS = ("order", "place", "offsets", "tiles", "tile_first", "groups", "group_first")
KERNELS = (
    Spec(
        "expert_counts", count_kernel, {"ids": "*i64", "counts": "*i32", "P": "i32"}, {"STEP": STEP},
        {"num_warps": WARPS, **PINNED},
    ),
    Spec(
        "expert_plan", plan_kernel,
        {"ids": "*i64", "counts": "*i32", **dict.fromkeys(_OUTPUTS, "*i32"), "P": "i32", "E": "i32"},
        {"ROWS": ROWS, "STEP": STEP, "EXPERTS": 128}, {"num_warps": WARPS, **PINNED},
    ),
)  # fmt: skip
