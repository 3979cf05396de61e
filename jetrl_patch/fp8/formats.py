"""Constants that trainer and rollout share: the FP8 format, the block size and the two scale formats.

Source: Jet-RL (arXiv 2601.14243, section 4) for the granularity; DeepSeek-V3 (arXiv 2412.19437, section 3.3)
for the blocks and the name ``weight_scale_inv``.
"""

from __future__ import annotations

from typing import Literal

import torch

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
