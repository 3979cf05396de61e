"""What every kernel shares: the FP8 elements, their blocks, and checks of operands."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_patch.config.formats import FORMATS
from jetrl_patch.errors import explain

# ---- The FP8 elements and the block of the usual formats ------------------------------------------
# Source: Jet-RL (arXiv 2601.14243, section 4) for the granularity; DeepSeek-V3 (arXiv 2412.19437, section 3.3) for the blocks and
# the name ``weight_scale_inv``. ``config.formats`` lists the other formats.

BLOCK = FORMATS["pow2"].block
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
#: lower bound of an amax. 1e-4, used elsewhere, would flush small gradients to zero. The scale is amax / 448, because its
#: reciprocal 448 / amax overflows for a tiny amax
AMAX_FLOOR = 1e-10


def groups(size: int, block: int = BLOCK) -> int:
    """The number of groups of ``block`` that cover ``size`` elements. The last one may be partial."""
    return -(-size // block)


def split_width(K: int, splits: int, block: int = BLOCK) -> int:
    """The width of one of ``splits`` equal ranges of K. Raises ValueError if a range boundary cuts a block."""
    if splits < 1 or (splits > 1 and K % (splits * block)):
        raise ValueError(f"K = {K} cannot be split {splits} ways without cutting a block of {block}")
    return K // splits


def exponents(scale: Tensor) -> Tensor:
    """FP32 powers of two as E8M0, uint8 of the same shape. NaN and Inf become its NaN."""
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)


# ---- Checks of operands: a kernel computes addresses from sizes, so a wrong size would read other memory

def check_operand(name: str, q: Tensor, s: Tensor, scale_shape: tuple[int, int]) -> None:
    """Raise TypeError for an operand that is not e4m3 with FP32 scales, ValueError for another shape of one of them."""
    if q.dtype != FP8 or s.dtype != torch.float32:
        raise TypeError(f"{name}: expected {FP8} with torch.float32 scales, found {q.dtype} with {s.dtype}")
    if q.dim() != 2 or s.shape != scale_shape:
        raise ValueError(f"{name}: {list(q.shape)} needs scales of shape {list(scale_shape)}, found {list(s.shape)}")


def check_fprop(
    q_MK: Tensor, s_MG: Tensor, w_NK: Tensor, sw: Tensor, out_dtype: torch.dtype, blocks: bool = False, block: int = BLOCK
) -> None:
    """Require e4m3 X [M, K] with FP32 scales [M, G] and W [N, K] with [N, G] on one device, and BF16 or FP32 output.

    G is ceil(K / block). With ``blocks`` the scales of W are [ceil(N/128), G].

    Raises:
        TypeError: a dtype is wrong.
        ValueError: the shapes do not match, or the tensors are on several devices.
    """
    for name, q, s, rows in (("X", q_MK, s_MG, 1), ("W", w_NK, sw, BLOCK if blocks else 1)):
        check_operand(name, q, s, (groups(q.shape[0], rows), groups(q.shape[-1], block)))
    what = "an FP8 linear layer"
    if q_MK.shape[1] != w_NK.shape[1]:
        required, found = f"inputs of width {w_NK.shape[1]}, as its weight", f"width {q_MK.shape[1]}"
        fix = "check the caller; if weights are sharded, check that this one is gathered"
        raise ValueError(explain(what, required=required, found=found, fix=fix))
    devices = {str(t.device) for t in (q_MK, s_MG, w_NK, sw)}
    if len(devices) > 1:
        required, found = "input, weight and their scales on one device", ", ".join(sorted(devices))
        raise ValueError(explain(what, required=required, found=found, fix="move the model and its inputs to one device"))
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"output dtype: expected torch.bfloat16 or torch.float32, found {out_dtype}")
