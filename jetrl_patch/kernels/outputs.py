"""The host side of the quantizers: checks of the input, output tensors, launch options."""

from __future__ import annotations

from typing import Any, get_args

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.compiler import CUDAOptions

from jetrl_patch.errors import explain
from jetrl_patch.fp8.formats import BLOCK, FP8, ScaleFormat, groups
from jetrl_patch.kernels.gemm_common import PINNED, check_device

#: pinned as for the GEMMs, with instructions scheduled for few registers: the chain of operations per element is long and the
#: tile wide, and a SiLU tile would spill otherwise. Older versions of triton lack the option.
COMPILER = {**PINNED, **({"sched4reg": True} if "sched4reg" in CUDAOptions.__dataclass_fields__ else {})}


def check_input(name: str, x: Tensor, *dtypes: torch.dtype) -> None:
    """Check an input before a kernel reads it: [rows, columns] with contiguous rows, on a device that Triton runs on.

    Raises:
        TypeError: the dtype is not one of ``dtypes`` (BF16 by default).
        ValueError: the tensor is not two-dimensional, its rows are not contiguous, or it is not on the current device.
        ConfigError: the device is a CPU and the interpreter is off.
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
                required="contiguous rows",
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
    """The constants and compiler options of all quantizer kernels. Raises ValueError for an unknown format."""
    if scale_format not in get_args(ScaleFormat):
        known = " or ".join(get_args(ScaleFormat))
        raise ValueError(explain("the scale format", required=known, found=repr(scale_format), fix="use one of these"))
    return {"POW2": scale_format == "pow2", "HARDWARE": not triton.knobs.runtime.interpret, **COMPILER}


def new_rows(x: Tensor, M: int, K: int, columns: bool = False) -> tuple[Tensor, Tensor]:
    """Allocate uint8 [M, K] and FP32 [M, G]; ``columns`` gives the scales strides (1, M rounded up to 4), not (G, 1)."""
    q, G = torch.empty(M, K, dtype=torch.uint8, device=x.device), groups(K)
    if columns:
        return q, torch.empty(G, -(-M // 4) * 4, dtype=torch.float32, device=x.device)[:, :M].t()
    return q, torch.empty(M, G, dtype=torch.float32, device=x.device)


def new_tokens(x: Tensor, M: int, K: int, transposed: bool, pad: bool) -> tuple[Tensor, Tensor]:
    """Allocate uint8 [M, K], or [K, M] (``pad``: M in whole groups), and FP32 [ceil(M / 128), K]."""
    s = torch.empty(groups(M), K, dtype=torch.float32, device=x.device)
    shape = (K, groups(M) * BLOCK if pad else M) if transposed else (M, K)
    return torch.empty(shape, dtype=torch.uint8, device=x.device), s


def as_fp8(q: Tensor) -> Tensor:
    """View the bytes that the kernels write as e4m3."""
    return q.view(FP8)
