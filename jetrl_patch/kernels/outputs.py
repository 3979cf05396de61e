"""The host's part of the quantizers: what they refuse, what they write to, how they are launched."""

from __future__ import annotations

from typing import Any, get_args

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.compiler import CUDAOptions

from jetrl_patch.errors import explain
from jetrl_patch.fp8.formats import BLOCK, FP8, ScaleFormat, groups
from jetrl_patch.kernels.gemm_common import PINNED, check_device

#: pinned as for the GEMMs, and instructions ordered for few registers: an element's chain of operations is long, its tile
#: wide, and without this a tile of SiLU spills. Older triton has no such option.
COMPILER = {**PINNED, **({"sched4reg": True} if "sched4reg" in CUDAOptions.__dataclass_fields__ else {})}


def check_input(name: str, x: Tensor, *dtypes: torch.dtype) -> None:
    """Refuse what a kernel would read wrongly: [rows, columns], a device that Triton runs on, adjacent elements.

    Raises:
        TypeError: not one of ``dtypes`` (BF16 where none is given).
        ValueError: not two dimensions, elements of a row that are not adjacent, or not the current device.
        ConfigError: a CPU without the interpreter.
    """
    dtypes = dtypes or (torch.bfloat16,)
    if x.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        raise TypeError(explain(f"the quantizer's {name}", required=wanted, found=x.dtype, fix="convert it first"))
    if x.dim() != 2:
        raise ValueError(
            explain(
                f"the quantizer's {name}", required="two dimensions", found=list(x.shape), fix="flatten the batch first"
            )
        )
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(
            explain(
                f"the quantizer's {name}",
                required="rows of adjacent elements",
                found=f"strides {list(x.stride())}",
                fix="call .contiguous() first",
            )
        )
    check_device(x)
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        raise ValueError(
            explain(
                f"the quantizer's {name}",
                required=f"the current device, cuda:{torch.cuda.current_device()}",
                found=x.device,
                fix="select the device with torch.cuda.device(...)",
            )
        )


def options(x: Tensor, scale_format: ScaleFormat) -> dict[str, Any]:
    """The constants that all kernels take, and pinned compiler options; raises ValueError for an unknown format."""
    if scale_format not in get_args(ScaleFormat):
        known = " or ".join(get_args(ScaleFormat))
        raise ValueError(explain("the scale format", required=known, found=repr(scale_format), fix="use one of these"))
    return {"POW2": scale_format == "pow2", "HARDWARE": not triton.knobs.runtime.interpret, **COMPILER}


def new_rows(x: Tensor, M: int, K: int, columns: bool = False) -> tuple[Tensor, Tensor]:
    """uint8 [M, K] and FP32 [M, G]; ``columns`` gives the scales the strides (1, M) instead of (G, 1)."""
    q, G = torch.empty(M, K, dtype=torch.uint8, device=x.device), groups(K)
    if columns:
        return q, torch.empty(G, M, dtype=torch.float32, device=x.device).t()
    return q, torch.empty(M, G, dtype=torch.float32, device=x.device)


def new_tokens(x: Tensor, M: int, K: int, transposed: bool, pad: bool) -> tuple[Tensor, Tensor]:
    """uint8 [M, K], or [K, M] (``pad``: M in whole groups), and FP32 [ceil(M / 128), K]."""
    s = torch.empty(groups(M), K, dtype=torch.float32, device=x.device)
    shape = (K, groups(M) * BLOCK if pad else M) if transposed else (M, K)
    return torch.empty(shape, dtype=torch.uint8, device=x.device), s


def as_fp8(q: Tensor) -> Tensor:
    """The kernels write bytes; outside they are e4m3."""
    return q.view(FP8)
