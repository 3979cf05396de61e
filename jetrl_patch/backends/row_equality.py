"""Test on this machine that a row's bits do not depend on the rest of the batch, before a backend serves a rollout.

A rollout decodes M = 1 to a few hundred rows, and the trainer multiplies thousands at once. The same rows must be equal bit for
bit, and so must the sum of a tensor-parallel rollout's partial products. The rollout also fuses weights (qkv, gate_up) and holds
slices of them, while the trainer multiplies whole ones: N differs, but the columns of Y must not. A library that selects its
kernel by M or N can break all of this, depending on version, device and shape. So a backend with several kernels is tried with a
batch for each of them. The test suite proves the CPU backends.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, ParamSpec

import torch
from torch import Tensor

from jetrl_patch.backends.base import Backend
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.kernels.formats import BLOCK, FP8

logger = logging.getLogger(__name__)

#: rows of decode batches. The Triton backend quantizes and multiplies up to 32 rows in one launch
DECODED = (1, 7, 32, 64, 256)
#: rows of a training batch; not a multiple of a tile
TRAINED = 2056
#: rows of longer training batches, for which a library may use larger tiles
LONG = (8200, 16392)
#: rows of the batches in which a fused weight is compared with whole weights
FUSED = (1, 64, TRAINED)
#: positions of the decoded rows in the training batch
OFFSETS = (0, 129)

_PROVEN: set[tuple[object, ...]] = set()


class Part(NamedTuple):
    """Rows ``row0`` to ``row1`` of the trainer's weight [rows, K], and the row of the rollout's weight where they begin."""

    rows: int
    row0: int
    row1: int
    offset: int


class Layout(NamedTuple):
    """The parts of the rollout's weight [N, K], and the number of ranks that each hold a range of the trainer's K."""

    parts: tuple[Part, ...]
    ranks: int = 1

    @property
    def in_blocks(self) -> bool:
        """Whether every 128 rows of the rollout's weight are one block of the trainer's, and so share a scale."""
        return all(part.row0 % BLOCK == 0 and part.offset % BLOCK == 0 for part in self.parts)


class Verdict(NamedTuple):
    """Whether all rows were equal, and a description of what was compared or what differed."""

    ok: bool
    found: str


class Unequal(Exception):
    """Two results differ. The message says where."""


def require_equal(ours: Tensor, theirs: Tensor, where: str) -> None:
    """Compare bits. Raise ``Unequal``: "3 of 64 {where}"."""
    bits = torch.int16 if ours.dtype == torch.bfloat16 else torch.int32
    unequal = int((ours.contiguous().view(bits) != theirs.contiguous().view(bits)).sum())
    if unequal:
        raise Unequal(f"{unequal} of {ours.numel()} {where}")


_Arguments = ParamSpec("_Arguments")


def as_verdict(compare: Callable[_Arguments, str]) -> Callable[_Arguments, Verdict]:
    """Turn the result of a comparison, or its ``Unequal``, into a verdict."""

    @functools.wraps(compare)
    def run(*args: _Arguments.args, **named: _Arguments.kwargs) -> Verdict:
        try:
            return Verdict(True, compare(*args, **named))
        except Unequal as difference:
            return Verdict(False, str(difference))

    return run


@as_verdict
def compare_rows(
    backend: Backend,
    shape: tuple[int, int],
    device: torch.device | str,
    scale_format: ScaleFormat = "pow2",
    trained: int = TRAINED,
    decoded: tuple[int, ...] = DECODED,
    layout: Layout | None = None,
    most: int = 0,
) -> str:
    """Compare products of a whole batch and of its parts for a weight [N, K] of this ``shape``.

    Args:
        trained: rows of the whole batch.
        decoded: rows of the parts.
        layout: of the rollout's weight, in whose output dtype products are compared. None: in BF16 and FP32, and, if K is an
            even number of 128-blocks, a product with ``splits=2`` with the sum of two partial products.
        most: largest batch of an engine. A part is compared for each kernel that the backend may use up to it.
    """
    N, K = shape
    generator = torch.Generator(device).manual_seed(N + K)
    x_MK, size, w_NK = (
        torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
        for shape in ((trained, K), (trained, 1), (N, K))
    )
    x_MK, w_NK = x_MK * torch.exp(size), w_NK * K**-0.5
    w = backend.quantize_weight(w_NK, scale_format)
    by_rows = Quantized(w.q, w.s_rows, "rows", scale_format)
    served: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    if layout is not None:
        served = (torch.float32 if layout.ranks > 1 else torch.bfloat16,)
        w = w if layout.in_blocks else by_rows
    compiled = backend.compiled_rows(most) if most else ()
    batches = sorted({*decoded, *compiled})
    for out_dtype in served:
        for rows in compiled:
            backend.fprop(x_MK[:rows], w, out_dtype)
        whole = backend.fprop(x_MK, w, out_dtype)
        for rows in batches:
            for start in OFFSETS:
                part = slice(start, start + rows)
                if part.stop <= trained:
                    where = f"{out_dtype} values at M = {rows} differ from those at M = {trained}"
                    require_equal(backend.fprop(x_MK[part], w, out_dtype), whole[part], where)
    if layout is None and K % (2 * BLOCK) == 0:
        first, second = (backend.fprop(x, part, torch.float32) for x, part in _ranks(x_MK[:7], by_rows, 2))
        both = backend.fprop(x_MK, by_rows, torch.float32, 2)[:7]
        require_equal(first + second, both, "values differ between splits=2 and the sum of two ranks")
    many = len(batches) > len(DECODED)
    sizes = f"{batches[0]} to {batches[-1]} ({len(batches)} sizes)" if many else ", ".join(map(str, batches))
    return f"rows at M = {sizes} equal those at M = {trained}"


@as_verdict
@torch.no_grad()
def compare_parts(
    backend: Backend,
    shape: tuple[int, int],
    layout: Layout,
    device: torch.device | str,
    scale_format: ScaleFormat = "pow2",
    batches: tuple[int, ...] = FUSED,
    longer: tuple[int, ...] = (),
) -> str:
    """Compare products of the rollout's weight [N, K] of this ``shape`` and ``layout`` with those of the trainer's.

    First, the trainer's products in the largest of ``batches`` are compared with those in ``longer`` batches. Sums over ranks are
    compared before and after rounding to BF16, which would hide another order of most of them.
    """
    K, most = shape[1] * layout.ranks, max(batches)
    generator = torch.Generator(device).manual_seed(sum(shape))
    x_MK, *ws = (
        torch.randn(rows, K, generator=generator, device=device, dtype=torch.bfloat16)
        for rows in (max(batches + longer), *(part.rows for part in layout.parts))
    )
    expected, held = [], []
    for w_NK, part in zip(ws, layout.parts, strict=True):
        w, mine = backend.quantize_weight(w_NK, scale_format), slice(part.row0, part.row1)
        y_MN = backend.fprop(x_MK[:most], w, torch.bfloat16, layout.ranks)
        if layout.ranks > 1:
            sum_MN = backend.fprop(x_MK[:most], w, torch.float32, layout.ranks)
            require_equal(y_MN, sum_MN.to(torch.bfloat16), f"values of a weight {[part.rows, K]} differ from their rounded sums")
            y_MN = sum_MN
        for M in longer:
            same = backend.fprop(x_MK[:M], w, y_MN.dtype, layout.ranks)[:most]
            where = f"values of a weight {[part.rows, K]} differ between M = {most} and M = {M}"
            require_equal(same, y_MN, where)
        expected.append(y_MN[:, mine])
        held.append((w.q[mine].view(torch.uint8), w.s_rows[mine]))
    q_NK, s_NG = (torch.cat(tensors) for tensors in zip(*held, strict=True))
    fused = Quantized(q_NK.view(FP8), s_NG, "rows", scale_format)
    ranks = f" on {layout.ranks} ranks" if layout.ranks > 1 else ""
    for M in batches:
        y_MN = _rollout(backend, x_MK[:M], fused, layout)
        for part, theirs in zip(layout.parts, expected, strict=True):
            whole = f"rows {part.row0} to {part.row1} of a weight {[part.rows, K]}"
            where = f"values at M = {M} differ between {whole} and the same rows in one of {list(shape)}{ranks}"
            require_equal(y_MN[:, part.offset : part.offset + part.row1 - part.row0], theirs[:M], where)
    return f"rows of {len(layout.parts)} whole weights equal those of the one that holds them"


def _rollout(backend: Backend, x_MK: Tensor, w: Quantized, layout: Layout) -> Tensor:
    """Y [M, N]: one product in BF16, or the FP32 sum in rank order of the partial products over ranges of K."""
    if layout.ranks > 1:
        parts = (backend.fprop(x, own, torch.float32) for x, own in _ranks(x_MK, w, layout.ranks))
        return functools.reduce(torch.add, parts)
    if backend.blocks and layout.in_blocks:
        w = replace(w, s_blocks=backend.block_scales(w.s))
    return backend.fprop(x_MK, w)


def _ranks(x_MK: Tensor, w: Quantized, ranks: int) -> Iterator[tuple[Tensor, Quantized]]:
    """Yield each tensor-parallel rank's part of an input and of a weight: a range of K, copied."""
    K = w.shape[1] // ranks
    for k in range(0, K * ranks, K):
        q, s = (t.contiguous() for t in w.columns(k, k + K))
        yield x_MK[:, k : k + K].contiguous(), Quantized(q, s, "rows", w.scale_format)


#: what to do about a backend that fails, and about the last of the fast ones
_OTHERWISE = (
    'use backend="triton" on both sides (JETRL_BACKEND=triton)',
    'use precision="fp8-rollout" with a correction, or backend="torch" (slow)',
)


def require_row_equality(
    backend: Backend,
    shape: tuple[int, int],
    device: torch.device,
    scale_format: ScaleFormat = "pow2",
    layout: Layout | None = None,
    most: int = TRAINED,
) -> bool:
    """Run both comparisons once per process for each backend, device, shape, layout and scale format; never on a CPU.

    Call it before a CUDA graph is captured, because it reads results back to the host. ``most`` is the engine's largest batch.
    Returns whether they ran now.

    Raises:
        ModelError: rows depend on the batch, or on the weights that theirs is fused with. Rollout and trainer would disagree.
    """
    whole = Layout((Part(shape[0], 0, shape[0], 0),))  # the rollout holds the trainer's weight as it is
    layout = layout or whole
    key = (backend.name, str(device), *shape, scale_format, layout, most)
    if device.type == "cpu" or key in _PROVEN:
        return False
    longer, longest = LONG

    def trial() -> Verdict:
        decoded, whole_batch = (*DECODED, TRAINED, longer), max(longest, most)  # every batch that is served is a part
        verdict = compare_rows(backend, shape, device, scale_format, whole_batch, decoded, layout, most)
        if verdict.ok and layout != whole:
            verdict = compare_parts(backend, shape, layout, device, scale_format, FUSED, LONG)
        return verdict

    verdict = trial()
    if not verdict.ok and backend.give_up_few_rows():
        words = "jetrl_patch: backend=%r decodes with the kernels of long batches, which is slower: %s"
        logger.warning(words, backend.name, verdict.found)
        verdict = trial()
    if not verdict.ok:
        what, fix = f"backend={backend.name!r} in a rollout", _OTHERWISE[backend.name == "triton"]
        required = f"rows that depend neither on the batch nor on N, for weights {list(shape)}"
        raise ModelError(explain(what, required=required, found=verdict.found, fix=fix))
    _PROVEN.add(key)
    return True
