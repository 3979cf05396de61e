"""Test on this machine that a row's bits do not depend on the rest of the batch, before a backend serves a rollout.

A rollout decodes M = 1 to a few hundred rows, and the trainer multiplies thousands at once. The same rows must be equal
bit for bit, and so must the sum of a tensor-parallel rollout's partial products. The rollout also fuses weights (qkv, gate_up)
and holds slices of them, while the trainer multiplies whole ones: N differs, the columns of Y must not. A library that selects
its kernel by M or N can break all of this, depending on version, device and shape. So a backend with several kernels is tried
with a batch for each. The test suite proves the CPU backends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl_patch.backends.base import Backend
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.kernels.formats import BLOCK, FP8, ScaleFormat

logger = logging.getLogger(__name__)

#: rows of decode batches; up to 32 rows the Triton backend quantizes and multiplies in one launch
DECODED = (1, 7, 32, 64, 256)
#: rows of a training batch; not a multiple of a tile
TRAINED = 2056
#: rows of longer training batches, for which a library may take larger tiles
LONG = (8200, 16392)
#: rows of a batch in which parts of a fused weight are compared with whole weights
FUSED = (1, 64, TRAINED)
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
    layout: Layout | None = None,
    most: int = 0,
) -> Verdict:
    """Compare products of a whole batch and of its parts for a weight [N, K] of this ``shape``.

    Args:
        trained: rows of the whole batch.
        decoded: rows of the parts.
        most: rows that an engine may serve at once: a part is compared for each kernel that the backend may take for them too.
        layout: of the rollout's weight, whose products are compared; None: in BF16 and in FP32, and, if K is an even number of
            128-blocks, a product with ``splits=2`` with the sum of two partial products.
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
    if layout is not None and not layout.in_blocks:
        w = by_rows
    batches = sorted({*decoded, *(backend.compiled_rows(most) if most else ())})
    for out_dtype in served:
        whole = backend.fprop(x_MK, w, out_dtype)
        for rows in batches:
            for start in OFFSETS:
                if start + rows > trained:
                    continue
                part = backend.fprop(x_MK[start : start + rows], w, out_dtype)
                unequal = _unequal(part, whole[start : start + rows])
                if unequal:
                    values = f"{unequal} of {part.numel()} {out_dtype} values"
                    return Verdict(False, f"{values} at M = {rows} differ from those at M = {trained}")
    if layout is not None or K % (2 * BLOCK):
        return _equal(batches, trained)
    sums = [backend.fprop(x, part, torch.float32) for x, part in _ranks(x_MK[:7], by_rows, 2)]
    both = backend.fprop(x_MK, by_rows, torch.float32, 2)[:7]
    unequal = _unequal(sums[0] + sums[1], both)
    if unequal:
        return Verdict(False, f"{unequal} of {both.numel()} values differ between splits=2 and the sum of two ranks")
    return _equal(batches, trained)


def _equal(batches: Sequence[int], trained: int) -> Verdict:
    many = len(batches) > len(DECODED)
    few = f"{batches[0]} to {batches[-1]} ({len(batches)} sizes)" if many else ", ".join(map(str, batches))
    return Verdict(True, f"rows at M = {few} equal those at M = {trained}")


@torch.no_grad()
def compare_parts(
    backend: Backend,
    shape: tuple[int, int],
    layout: Layout,
    device: torch.device | str,
    scale_format: ScaleFormat = "pow2",
    batches: tuple[int, ...] = FUSED,
    longer: tuple[int, ...] = (),
) -> Verdict:
    """Compare products with the rollout's weight [N, K] of this ``shape`` and ``layout`` with the trainer's, in BF16.

    The trainer's own are compared with those of ``longer`` batches first.
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
        for M in longer:
            unequal = _unequal(backend.fprop(x_MK[:M], w, torch.bfloat16, layout.ranks)[:most], y_MN)
            if unequal:
                values = f"{unequal} of {y_MN.numel()} values of a weight {[part.rows, K]}"
                return Verdict(False, f"{values} differ between M = {most} and M = {M}")
        expected.append(y_MN[:, mine])
        held.append((w.q[mine].view(torch.uint8), w.s_rows[mine]))
    q_NK, s_NG = (torch.cat(tensors) for tensors in zip(*held, strict=True))
    fused = Quantized(q_NK.view(FP8), s_NG, "rows", scale_format)
    for M in batches:
        y_MN = _rollout(backend, x_MK[:M], fused, layout)
        for part, theirs in zip(layout.parts, expected, strict=True):
            unequal = _unequal(y_MN[:, part.offset : part.offset + part.row1 - part.row0], theirs[:M])
            if unequal:
                whole = f"rows {part.row0} to {part.row1} of a weight {[part.rows, K]}"
                ranks = f" on {layout.ranks} ranks" if layout.ranks > 1 else ""
                values = f"{unequal} of {theirs[:M].numel()} values at M = {M}"
                return Verdict(False, f"{values} differ between {whole} and the same rows in one of {list(shape)}{ranks}")
    return Verdict(True, f"rows of {len(layout.parts)} whole weights equal those of the one that holds them")


def _rollout(backend: Backend, x_MK: Tensor, w: Quantized, layout: Layout) -> Tensor:
    """Y [M, N] BF16: one product, or the sum in rank order of the partial products over ranges of K."""
    if layout.ranks == 1:
        if backend.blocks and layout.in_blocks:
            w = replace(w, s_blocks=backend.block_scales(w.s))
        return backend.fprop(x_MK, w)
    total: Tensor | None = None
    for x, own in _ranks(x_MK, w, layout.ranks):
        part = backend.fprop(x, own, torch.float32)
        total = part if total is None else total + part
    assert total is not None
    return total.to(torch.bfloat16)


def _ranks(x_MK: Tensor, w: Quantized, ranks: int) -> Iterator[tuple[Tensor, Quantized]]:
    """Yield what each tensor-parallel rank holds of an input and of a weight: a range of K, in memory of its own."""
    K = w.shape[1] // ranks
    for k in range(0, K * ranks, K):
        q, s = (t.contiguous() for t in w.columns(k, k + K))
        yield x_MK[:, k : k + K].contiguous(), Quantized(q, s, "rows", w.scale_format)


def _unequal(a: Tensor, b: Tensor) -> int:
    bits = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return int((a.contiguous().view(bits) != b.contiguous().view(bits)).sum())


#: what to do about a backend that fails, and if it is the last of the fast ones
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

    Call it before a CUDA graph is captured, because it reads the verdict back to the host. ``most`` is the largest batch of the
    engine.

    Returns:
        whether they ran now.

    Raises:
        ModelError: rows depend on the batch or on what the weight is fused with, so rollout and trainer would disagree.
    """
    whole = Layout((Part(shape[0], 0, shape[0], 0),))  # the rollout holds the trainer's weight as it is
    layout = layout or whole
    key = (backend.name, str(device), *shape, scale_format, layout, most)
    if device.type == "cpu" or key in _PROVEN:
        return False
    short, (longer, longest) = (*DECODED, TRAINED), LONG

    def trial() -> Verdict:
        whole_batch = max(longest, most)  # every batch that is served is a part of it
        verdict = compare_rows(backend, shape, device, scale_format, whole_batch, (*short, longer), layout, most)
        if verdict.ok and layout != whole:
            verdict = compare_parts(backend, shape, layout, device, scale_format, FUSED, LONG)
        return verdict

    verdict = trial()
    if not verdict.ok and backend.give_up_few_rows():
        words = "jetrl_patch: backend=%r decodes with the kernels of long batches, which is slower: %s"
        logger.warning(words, backend.name, verdict.found)
        verdict = trial()
    if not verdict.ok:
        raise ModelError(
            explain(
                f"backend={backend.name!r} in a rollout",
                required=f"rows that do not depend on the batch nor on N, for weights {list(shape)}",
                found=verdict.found,
                fix=_OTHERWISE[backend.name == "triton"],
            )
        )
    _PROVEN.add(key)
    return True
