"""Check that the pieces in the engine's memory make up the tensor that was sent."""

from __future__ import annotations

from collections.abc import Sequence

from jetrl_patch.errors import SyncError
from jetrl_patch.sync.digest import Rect, add


def check_tiling(name: str, shape: tuple[int, int], expected: int, rects: Sequence[Rect]) -> None:
    """Check that the rectangles tile ``[rows, cols]`` exactly and that their digests add up to the sender's.

    A slice that is replicated on several ranks counts once.

    Raises:
        SyncError: names the tensor and the fault: not held, differing replicas, a gap, an overlap, or other bytes.
    """
    pieces: dict[tuple[int, int, int, int], int] = {}
    for rect in rects:
        place = (rect.row0, rect.row1, rect.col0, rect.col1)
        if pieces.setdefault(place, rect.digest) != rect.digest:
            raise SyncError(f"{name}: two ranks hold rows {rect.row0}:{rect.row1} with different bytes after the sync")
    if not pieces:
        raise SyncError(f"{name} was sent, but no part of it lies in the rollout engine after the sync")
    places = sorted(pieces)
    for i, (r0, r1, c0, c1) in enumerate(places):
        if not (0 <= r0 < r1 <= shape[0] and 0 <= c0 < c1 <= shape[1]):
            raise SyncError(f"{name}: the engine holds [{r0}:{r1}, {c0}:{c1}], outside its shape {shape}")
        for s0, s1, d0, d1 in places[i + 1 :]:
            if r0 < s1 and s0 < r1 and c0 < d1 and d0 < c1:
                raise SyncError(f"{name}: [{r0}:{r1}, {c0}:{c1}] and [{s0}:{s1}, {d0}:{d1}] overlap in the engine")
    covered = sum((r1 - r0) * (c1 - c0) for r0, r1, c0, c1 in places)
    if covered != shape[0] * shape[1]:
        raise SyncError(f"{name}: only {covered} of {shape[0] * shape[1]} elements lie in the engine after the sync")
    if add(*pieces.values()) != expected:
        raise SyncError(
            f"{name}: the bytes in the rollout engine are not those that the trainer sent; "
            f"the engine's loader changed or re-quantized them"
        )
