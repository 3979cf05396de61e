"""The router of a mixture of experts: which experts a token goes to, and with which weights.

    p = softmax(logits), FP32        the k largest p, the lower index on a tie        w_e = p_e, or p_e / (sum of the chosen p)

Other models score each expert by itself. A bias that balances the load corrects the choice, but not the weight:

    p = sigmoid(logits), FP32        the k largest c = p + bias, within the best groups of experts        w_e = scale * (as above)

A group is ranked by the sum of its two largest c. A token's experts are in ascending order. Their outputs are added in this
order too. torch's ``topk`` leaves ties open, and a softmax that sums in another order may change the last bit of a weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact.dispatch import kernel_for

#: these models add it to the sum of the chosen scores, which may all be zero
_TINY = 1e-20
#: the subject of its errors
_ROUTER = "the router of a mixture of experts"


class Sigmoid(NamedTuple):
    """The second of the two rules.

    Attributes:
        bias: the correction bias [E], FP32. It gets no gradient.
        groups: number of equal groups of experts.
        kept: number of groups from which a token's experts are chosen.
        scale: factor of all weights.
    """

    bias: Tensor
    groups: int
    kept: int
    scale: float


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, k: int, renormalize: bool, rule: Sigmoid | None) -> tuple[Tensor, Tensor]:
        in_one_launch = kernel_for("route", logits_TE)
        if in_one_launch is not None:
            logits = logits_TE if logits_TE.dtype == torch.bfloat16 else logits_TE.float()
            weights_Tk, ids_Tk = in_one_launch(logits, k, renormalize, rule)
        else:  # FP64 sums, whose order changes about one FP32 weight in 10^8
            weights_Tk, ids_Tk = _formula(logits_TE, k, renormalize, rule)
        ctx.save_for_backward(logits_TE, ids_Tk)
        ctx.renormalize, ctx.scale = renormalize, None if rule is None else rule.scale
        ctx.mark_non_differentiable(ids_Tk)
        return weights_Tk, ids_Tk

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TE, ids_Tk = ctx.saved_tensors
        with torch.enable_grad():
            source = logits_TE.detach().float().requires_grad_()
            weights_Tk = weights_of(source, ids_Tk, ctx.renormalize, ctx.scale)
        (found,) = torch.autograd.grad(weights_Tk, source, grad_outputs[0])
        return found.to(logits_TE.dtype), None, None, None


def weights_of(logits_TE: Tensor, ids_Tk: Tensor, renormalize: bool, scale: float | None) -> Tensor:
    """The weights FP32 [T, k] of these experts by torch's operations, with gradient. ``scale`` is None with a softmax."""
    logits = logits_TE.float()
    chosen = (logits.softmax(-1) if scale is None else logits.sigmoid()).gather(-1, ids_Tk)
    if renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + (0.0 if scale is None else _TINY))
    return chosen if scale is None else chosen * scale


def _formula(logits_TE: Tensor, k: int, renormalize: bool, rule: Sigmoid | None) -> tuple[Tensor, Tensor]:
    exact = logits_TE.double()
    p_TE = (exact.softmax(-1) if rule is None else exact.sigmoid()).float()
    order_TE = _descending(p_TE if rule is None else _corrected(p_TE, rule))
    ids_Tk = torch.sort(order_TE[:, :k], dim=-1).values
    chosen_Tk = p_TE.gather(-1, ids_Tk)
    if rule is not None:
        chosen_Tk = chosen_Tk.masked_fill(p_TE.isnan().any(-1, keepdim=True), torch.nan)
    if renormalize:
        total_T = chosen_Tk[:, 0].double()
        for j in range(1, k):
            total_T = total_T + chosen_Tk[:, j]
        chosen_Tk = (chosen_Tk / (total_T if rule is None else total_T + _TINY).unsqueeze(-1)).float()
    return chosen_Tk if rule is None else chosen_Tk * rule.scale, ids_Tk


def _descending(values: Tensor) -> Tensor:
    return torch.sort(values, dim=-1, descending=True, stable=True).indices


def _corrected(p_TE: Tensor, rule: Sigmoid) -> Tensor:
    """The values by which experts are chosen: scores plus bias, or minus infinity in groups that are not kept."""
    c_TE = p_TE + rule.bias
    if rule.kept == rule.groups:
        return c_TE
    c_TGe = c_TE.unflatten(-1, (rule.groups, -1))
    best_TG = _descending(c_TGe.topk(2, dim=-1).values.sum(-1))[:, : rule.kept]
    open_TG = torch.zeros(c_TGe.shape[:2], dtype=torch.bool, device=p_TE.device).scatter(1, best_TG, True)
    return c_TGe.masked_fill(~open_TG.unsqueeze(-1), -torch.inf).flatten(1)


def route(logits_TE: Tensor, k: int, renormalize: bool, rule: Sigmoid | None = None) -> tuple[Tensor, Tensor]:
    """Choose ``k`` of E experts for each token.

    Args:
        logits_TE: the router's logits [T, E], any float dtype.
        renormalize: whether the weights of the chosen experts add up to 1, before the factor of a ``rule``.
        rule: scores by a sigmoid, instead of a softmax.

    Returns:
        Weights FP32 [T, k], with gradient, and the experts' indices int64 [T, k], ascending. A NaN among the logits makes the
        token's weights NaN.

    Raises ModelError if there are fewer than ``k`` experts to choose from, or the bias is not in FP32.
    """
    experts = logits_TE.shape[-1]
    if not 0 < k <= experts:
        required, fix = f"1 to {experts} experts per token", "correct the number of experts per token in config.json"
        raise ModelError(explain(_ROUTER, required=required, found=str(k), fix=fix))
    if rule is not None:
        _check(rule, k, experts)
    weights_Tk, ids_Tk = _Route.apply(logits_TE, k, renormalize, rule)
    return weights_Tk, ids_Tk


def _check(rule: Sigmoid, k: int, experts: int) -> None:
    size = experts // rule.groups if rule.groups > 0 and experts % rule.groups == 0 else 0
    if size < 2 or not 0 < rule.kept <= rule.groups or k > rule.kept * size:
        required = f"equal groups of {experts} experts, and {k} of them in those that are kept"
        found, fix = f"{rule.kept} of {rule.groups} groups", "correct n_group and topk_group in config.json"
        raise ModelError(explain(_ROUTER, required=required, found=found, fix=fix))
    if rule.bias.dtype != torch.float32:
        what, required = "the correction bias of a router", "torch.float32, as its checkpoint has it"
        raise ModelError(explain(what, required=required, found=str(rule.bias.dtype), fix="keep buffers of the model in FP32"))
