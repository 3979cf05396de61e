"""Rectangles that cover a tensor exactly, and some that do not."""

import pytest
import torch

from jetrl_patch.errors import SyncError
from jetrl_patch.sync.digest import Rect, digest
from jetrl_patch.sync.receive import check_tiling

W = torch.arange(48, dtype=torch.uint8).view(6, 8)


def rect(r0, r1, c0, c1, source=W):
    return Rect("w", r0, r1, c0, c1, digest(source[r0:r1, c0:c1], r0, c0))


def check(*rects):
    check_tiling("w", (6, 8), digest(W), rects)


def test_exact_tilings_pass_and_replicas_count_once():
    check(rect(0, 6, 0, 8))
    check(rect(0, 2, 0, 8), rect(2, 6, 0, 3), rect(2, 6, 3, 8))
    check(rect(0, 3, 0, 8), rect(3, 6, 0, 8), rect(3, 6, 0, 8))


@pytest.mark.parametrize(
    ("rects", "match"),
    [
        ((), "no part of it"),
        ((rect(0, 3, 0, 8),), "only 24 of 48"),
        ((rect(0, 4, 0, 8), rect(3, 6, 0, 8)), "overlap"),
        ((rect(0, 6, 0, 8), Rect("w", 0, 6, 0, 8, 1)), "two ranks hold"),
        ((rect(0, 6, 0, 8, W + 1),), "are not those that the trainer sent"),
        ((Rect("w", 0, 7, 0, 8, 1),), "outside its shape"),
    ],
)
def test_everything_else_is_named(rects, match):
    with pytest.raises(SyncError, match=match):
        check(*rects)
