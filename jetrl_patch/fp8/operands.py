"""Operand checks shared by all backends: a kernel computes addresses from the sizes, so a wrong size reads foreign memory."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_patch.errors import explain
from jetrl_patch.fp8.formats import BLOCK, FP8, groups


def check_fprop(
    q_MK: Tensor, s_MG: Tensor, w_NK: Tensor, sw: Tensor, out_dtype: torch.dtype, blocks: bool = False
) -> None:
    """Require e4m3 X [M, K] with FP32 scales [M, G] and W [N, K] with [N, G] on one device, and BF16 or FP32 output.

    With ``blocks`` the scales of W are [ceil(N/128), G].

    Raises:
        TypeError: a dtype is wrong.
        ValueError: the shapes do not match, or the tensors are on several devices.
    """
    for name, q, s, rows in (("X", q_MK, s_MG, 1), ("W", w_NK, sw, BLOCK if blocks else 1)):
        if q.dtype != FP8 or s.dtype != torch.float32:
            raise TypeError(f"{name}: expected {FP8} with torch.float32 scales, found {q.dtype} with {s.dtype}")
        if q.dim() != 2 or s.shape != (-(-q.shape[0] // rows), groups(q.shape[1])):
            per = "row" if rows == 1 else f"{rows} rows"
            raise ValueError(f"{name}: {list(q.shape)} needs one scale per {per} and 128 columns, found {list(s.shape)}")
    if q_MK.shape[1] != w_NK.shape[1]:
        raise ValueError(
            explain(
                "an FP8 linear layer",
                required=f"inputs of width {w_NK.shape[1]}, as its weight",
                found=f"width {q_MK.shape[1]}",
                fix="check the caller; if weights are sharded, check that this one is gathered",
            )
        )
    devices = {str(t.device) for t in (q_MK, s_MG, w_NK, sw)}
    if len(devices) > 1:
        raise ValueError(
            explain(
                "an FP8 linear layer", required="input, weight and their scales on one device",
                found=", ".join(sorted(devices)), fix="move the model and its inputs to one device",
            )
        )  # fmt: skip
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"output dtype: expected torch.bfloat16 or torch.float32, found {out_dtype}")
