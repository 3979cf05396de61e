"""The gradients of SiLU(gate) * up in one kernel, 10 bytes an element: gate, up and dy are read, dgate and dup written.

    s = 1 / (1 + e^-gate)      dgate = dy * up * s * (1 + gate * (1 - s))      dup = dy * (gate * s)

In FP32, each rounded once. In torch's operations the same formula takes fourteen kernels and 126 bytes an element. A gradient
is the trainer's own, so that its last bit may be a GPU's: the exponential is the hardware's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.fp8.formats import groups
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.gemm_common import PINNED, check_device, converted
from jetrl_patch.kernels.tiles import load_tile

#: rows and warps of a tile with 128 columns
ROWS, WARPS = 8, 4


@triton.jit
def silu_mul_gradients(g, u, dy):  # type: ignore[no-untyped-def]
    """(dgate, dup) in FP32. e^-|g| cannot overflow, and 1 - s is computed without a difference of nearly equal numbers."""
    e = tl.exp(-tl.abs(g))
    near = 1.0 / (1.0 + e)  # sigmoid(|g|)
    far = e * near  # sigmoid(-|g|)
    s = tl.where(g < 0, far, near)
    rest = tl.where(g < 0, near, far)
    return dy * u * s * (1.0 + g * rest), dy * (g * s)


@triton.jit(do_not_specialize=["M"])  # one binary for every batch
def silu_mul_backward_kernel(  # type: ignore[no-untyped-def]
    gate, up, dy, dgate, dup, M, K, gate_m, up_m, dy_m, ROWS: tl.constexpr, HARDWARE: tl.constexpr
):
    """A tile [ROWS, 128]; the gradients are contiguous."""
    G = tl.cdiv(K, 128)
    m = (tl.program_id(0) // G) * ROWS + tl.arange(0, ROWS)
    k = (tl.program_id(0) % G) * 128 + tl.arange(0, 128)
    g, u = load_tile(gate, m, k, M, K, gate_m, HARDWARE), load_tile(up, m, k, M, K, up_m, HARDWARE)
    dg, du = silu_mul_gradients(g, u, load_tile(dy, m, k, M, K, dy_m, HARDWARE))
    at, inside = m.to(tl.int64)[:, None] * K + k[None, :], (m < M)[:, None] & (k < K)[None, :]
    tl.store(dgate + at, converted(dg, dgate), mask=inside)
    tl.store(dup + at, converted(du, dup), mask=inside)


def silu_mul_backward(
    gate_MK: Tensor, up_MK: Tensor, dy_MK: Tensor, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, [M, K], in ``dtypes`` (BF16 or FP32).

    Args:
        gate_MK, up_MK: BF16, as the forward pass read them; their rows may be strided halves of one tensor.
        dy_MK: the gradient of the product, BF16 or FP32.
    """
    gate_MK, up_MK, dy_MK = (t if t.stride(1) == 1 else t.contiguous() for t in (gate_MK, up_MK, dy_MK))
    check_device(gate_MK, up_MK, dy_MK)
    M, K = gate_MK.shape
    dgate, dup = (torch.empty(M, K, dtype=dtype, device=gate_MK.device) for dtype in dtypes)
    if dgate.numel():
        silu_mul_backward_kernel[(-(-M // ROWS) * groups(K),)](
            gate_MK, up_MK, dy_MK, dgate, dup, M, K, gate_MK.stride(0), up_MK.stride(0), dy_MK.stride(0), ROWS=ROWS,
            HARDWARE=not triton.knobs.runtime.interpret, num_warps=WARPS, **PINNED,
        )  # fmt: skip
    return dgate, dup


KERNELS = (
    Spec(
        "silu_mul_backward", silu_mul_backward_kernel,
        dict.fromkeys(("gate", "up", "dy", "dgate", "dup"), "*bf16")
        | dict.fromkeys(("M", "K", "gate_m", "up_m", "dy_m"), "i32"),
        {"ROWS": ROWS, "HARDWARE": True}, {"num_warps": WARPS, **PINNED}, ("K", "gate_m", "up_m", "dy_m"),
    ),
)  # fmt: skip
