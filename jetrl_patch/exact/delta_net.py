"""Gated delta nets (arXiv 2412.06464): convolution and delta rule token by token, with the bits of the rollout.

    y      = silu(causal convolution of [q, k, v])                          rounded to BF16
    q, k   = y_q / |y_q| / sqrt(K),  y_k / |y_k|                            FP32
    decay  = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)   FP64, rounded to FP32
    S      = decay S;  u = v - k^T S;  S += k (beta u);  o = q^T S          FP32, sums over ascending k; o rounded to BF16

A chunked formula would be faster, but its sums depend on where chunks begin, and a rollout begins anywhere: after a cached
prefix, a chunk of a prefill, or a token. The state is FP32 in the rollout's cache too. There are C and Triton kernels, and no
torch formulas.

Shape legend: T tokens of all sequences, R sequences, H heads for values, V wide, KH for keys, K wide, C = 2 KH K + H V channels,
W taps. ``sizes`` is (KH, H, K, V).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.exact.dispatch import kernel_for, serving
from jetrl_patch.native.ops import DeltaInputs, Pool

Sizes = tuple[int, int, int, int]
#: channels whose convolution's gradient is computed at a time, in FP32: torch keeps several times their memory
CHANNELS = 1024


def require_kernels(device_type: str, backend: str = "auto") -> None:
    """Raise ConfigError if exact gated delta nets cannot run on a device with ``Config.backend``."""
    found = "the torch ops" if backend == "torch" or (device_type == "cpu" and serving("cpu") == "torch") else device_type
    if found not in ("cpu", "cuda"):
        required, fix = "a GPU, or a CPU and a C compiler, and a backend other than 'torch'", "use align='linear'"
        raise ConfigError(explain("align='exact' with gated delta nets", required=required, found=found, fix=fix))


def _kernel(op: str, tensor: Tensor) -> Any:
    kernel = kernel_for(op, tensor)
    if kernel is None:
        require_kernels(tensor.device.type, "torch")
    return kernel


def delta_net_paged(
    x_TC: Tensor, gates: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor, Tensor], starts: Tensor, sizes: Sizes,
    states: tuple[Tensor, Tensor], slots: Tensor, fresh: Tensor,
) -> Tensor:  # fmt: skip
    """A step of the rollout (no gradient), which updates ``states``: those of the convolution and of the delta rule.

    Args:
        x_TC: BF16. gates: a and b, BF16 [T, H]. weights: of the convolution [C, W], A_log [H] and dt_bias [H], as BF16.
        starts: int32 [R + 1]. slots: of each sequence in ``states``. fresh: bool [R], whether it has no state yet.
        states: BF16 [slots, ...], W - 1 inputs of C channels each, and FP32 [slots, H, K, V], both in any shape of that size.

    Returns:
        BF16 [T, H, V].
    """
    w_CW, A_log, dt_bias = (w.to(torch.bfloat16) for w in weights)
    y_TC = _kernel("conv", x_TC)(x_TC, w_CW, starts, Pool(states[0], slots, fresh))
    inputs = _kernel("delta_inputs", x_TC)(y_TC, *gates, A_log, dt_bias, sizes)
    found: Tensor = _kernel("delta_rule", x_TC)(inputs, y_TC, starts, sizes, Pool(states[1], slots, fresh))
    return found


class _DeltaNet(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, weight: Tensor, A_log: Tensor, dt_bias: Tensor, starts: Tensor, sizes: Sizes
    ) -> Tensor:
        given = (x, a, b, weight, A_log, dt_bias)
        x_TC, a_TH, b_TH, w_CW, A_H, bias_H = rounded = [t.detach().to(torch.bfloat16) for t in given]
        y_TC = _kernel("conv", x)(x_TC, w_CW, starts)
        inputs = _kernel("delta_inputs", x)(y_TC, a_TH, b_TH, A_H, bias_H, sizes)
        out = _kernel("delta_rule", x)(inputs, y_TC, starts, sizes)
        ctx.save_for_backward(*rounded, y_TC, starts)
        ctx.sizes, ctx.dtypes = sizes, [t.dtype for t in given]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, a_TH, b_TH, w_CW, A_H, bias_H, y_TC, starts = ctx.saved_tensors
        KH, H, K, V = ctx.sizes
        inputs = _kernel("delta_inputs", y_TC)(y_TC, a_TH, b_TH, A_H, bias_H, ctx.sizes)
        of_inputs, dv = _kernel("delta_gradients", y_TC)(inputs, y_TC, starts, ctx.sizes, grad_outputs[0])
        with torch.enable_grad():
            y, a, b, A_log, dt_bias = leaves = [t.float().requires_grad_() for t in (y_TC, a_TH, b_TH, A_H, bias_H)]
            outputs = (*logarithmic_inputs(y, a, b, A_log, dt_bias, ctx.sizes), y[:, 2 * KH * K :].unflatten(1, (H, V)))
            dy, da, db, dA, dbias = torch.autograd.grad(outputs, leaves, (*of_inputs, dv))
            parts = []
            for part in (slice(c, c + CHANNELS) for c in range(0, x_TC.shape[1], CHANNELS)):
                x, w = (t.float().requires_grad_() for t in (x_TC[:, part], w_CW[part]))
                parts.append(torch.autograd.grad(F.silu(convolution(x, w, starts)), (x, w), dy[:, part]))
        dx, dw = torch.cat([x for x, _ in parts], 1), torch.cat([w for _, w in parts])
        found = (dx, da, db, dw, dA, dbias)
        return *(g.to(dtype) for g, dtype in zip(found, ctx.dtypes, strict=True)), None, None


def convolution(x_TC: Tensor, w_CW: Tensor, starts: Tensor) -> Tensor:
    """The causal convolution of packed sequences [T, C] by torch's operations, for gradients."""
    T, W = x_TC.shape[0], w_CW.shape[1]
    lengths = starts.long().diff()
    places = torch.arange(T, device=x_TC.device) - starts[:-1].long().repeat_interleave(lengths, output_size=T)
    total = x_TC * w_CW[:, W - 1]
    for back in range(1, min(W, T)):
        earlier = F.pad(x_TC[: T - back], (0, 0, back, 0)) * (places >= back).unsqueeze(1)
        total = total + earlier * w_CW[:, W - 1 - back]
    return total


def logarithmic_inputs(y_TC: Tensor, a_TH: Tensor, b_TH: Tensor, A_log: Tensor, dt_bias: Tensor, sizes: Sizes) -> DeltaInputs:
    """The rule's inputs, with log(decay), by torch's operations, for gradients, in the dtype of the arguments."""
    KH, _, K, _ = sizes
    q, k = (t.unflatten(1, (KH, K)) for t in y_TC[:, : 2 * KH * K].chunk(2, 1))
    q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    return DeltaInputs(q * K**-0.5, k, -A_log.exp() * F.softplus(a_TH + dt_bias, threshold=60), b_TH.sigmoid())


def delta_net(
    x_TC: Tensor, gates: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor, Tensor], starts: Tensor, sizes: Sizes
) -> Tensor:
    """Packed sequences that begin with empty states, differentiable: BF16 [T, H, V].

    Args:
        x_TC, gates, weights: as in ``delta_net_paged``, converted to BF16. starts: int32 [R + 1], from 0 to T.

    Gradients are computed in FP32 and rounded to the inputs' dtypes.
    """
    result: Tensor = _DeltaNet.apply(x_TC, *gates, *weights, starts, sizes)
    return result
