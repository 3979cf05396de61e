"""The router of a mixture of experts: which experts a token goes to, and with which weights.

    p = softmax(logits), FP32        the k largest, the lower index on a tie        w_e = p_e, or p_e / (sum of the chosen p)

The experts of a token come in ascending order, which is the order in which their outputs are added. torch's ``topk`` leaves
ties open, and a softmax that sums in another order moves the last bit of a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact.dispatch import implementation
from jetrl_patch.native import ops

__all__ = ["route"]


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        if implementation(logits_TE) == "native":
            weights_Tk, ids_Tk = ops.route(logits_TE.float(), k, renormalize)
        else:  # FP64 sums: their order changes an FP32 weight in about one of 10^8
            weights_Tk, ids_Tk = _formula(logits_TE, k, renormalize)
        ctx.save_for_backward(logits_TE, ids_Tk)
        ctx.renormalize = renormalize
        ctx.mark_non_differentiable(ids_Tk)
        return weights_Tk, ids_Tk

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        logits_TE, ids_Tk = ctx.saved_tensors
        with torch.enable_grad():
            source = logits_TE.detach().float().requires_grad_()
            chosen = source.softmax(-1).gather(-1, ids_Tk)
            if ctx.renormalize:
                chosen = chosen / chosen.sum(-1, keepdim=True)
        (found,) = torch.autograd.grad(chosen, source, grad_outputs[0])
        return found.to(logits_TE.dtype), None, None


def _formula(logits_TE: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    p_TE = logits_TE.double().softmax(-1).float()
    order_TE = torch.sort(p_TE, dim=-1, descending=True, stable=True).indices
    ids_Tk = torch.sort(order_TE[:, :k], dim=-1).values
    chosen_Tk = p_TE.gather(-1, ids_Tk)
    if not renormalize:
        return chosen_Tk, ids_Tk
    total_T = chosen_Tk[:, 0].double()
    for j in range(1, k):
        total_T = total_T + chosen_Tk[:, j]
    return (chosen_Tk / total_T.unsqueeze(-1)).float(), ids_Tk


def route(logits_TE: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose ``k`` of E experts for each token.

    Args:
        logits_TE: the router's logits [T, E], any float dtype.
        renormalize: whether the weights of the chosen experts add up to 1.

    Returns:
        Weights FP32 [T, k], with gradient, and the experts' indices int64 [T, k], ascending. A NaN among the logits makes the
        token's weights NaN.

    Raises:
        ModelError: there are fewer than ``k`` experts.
    """
    experts = logits_TE.shape[-1]
    if not 0 < k <= experts:
        raise ModelError(
            explain(
                "the router of a mixture of experts",
                required=f"1 to {experts} experts per token",
                found=str(k),
                fix="correct the number of experts per token in config.json",
            )
        )
    weights_Tk, ids_Tk = _Route.apply(logits_TE, k, renormalize)
    return weights_Tk, ids_Tk
