"""What a product's operands must be, said once for all backends: a kernel reads memory by their sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_patch.errors import explain
from jetrl_patch.fp8.formats import FP8, groups


def check_fprop(q_MK: Tensor, s_MG: Tensor, w_NK: Tensor, s_NG: Tensor, out_dtype: torch.dtype) -> None:
    """e4m3 X [M, K] with FP32 scales [M, G] and W [N, K] with [N, G], on one device; BF16 or FP32 output.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that do not fit, or several devices.
    """
    for name, q, s in (("X", q_MK, s_MG), ("W", w_NK, s_NG)):
        if q.dtype != FP8 or s.dtype != torch.float32:
            raise TypeError(f"{name}: expected {FP8} with torch.float32 scales, found {q.dtype} with {s.dtype}")
        if q.dim() != 2 or s.shape != (q.shape[0], groups(q.shape[1])):
            raise ValueError(f"{name}: {list(q.shape)} needs one scale a row and 128 columns, found {list(s.shape)}")
    if q_MK.shape[1] != w_NK.shape[1]:
        raise ValueError(
            explain(
                "an FP8 linear layer",
                required=f"inputs of width {w_NK.shape[1]}, which is its weight's",
                found=f"width {q_MK.shape[1]}",
                fix="look at what calls it; where weights are sharded, at whether this one is whole",
            )
        )
    devices = {str(t.device) for t in (q_MK, s_MG, w_NK, s_NG)}
    if len(devices) > 1:
        raise ValueError(
            explain(
                "an FP8 linear layer", required="its input, its weight and their scales on one device",
                found=", ".join(sorted(devices)), fix="move the model and its inputs to one device",
            )
        )  # fmt: skip
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"the output is torch.bfloat16 or torch.float32, found {out_dtype}")
