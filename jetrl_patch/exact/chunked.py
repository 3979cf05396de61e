"""Log-probs and entropy of hidden states, a few rows at a time: the logits of a whole batch never exist.

A micro-batch of T = 16,384 tokens and a vocabulary of V = 152,064 has 10 GB of FP32 logits. Frameworks therefore offer "fused
kernels", which compute

    z [t, V] = H [t, K] · W^T         l [t] = log-softmax(z / temperature)[label]         e [t] = -Σ_v p_v log p_v

for t rows at a time, and once more in backward. Here z comes from the run's own head and l from the one definition of a
token's log-prob. With both, a row's bits do not depend on the other rows, so they do not depend on t either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jetrl_patch.exact.logprob import divisor, log_softmax, pick

__all__ = ["ROWS", "chunked_log_probs"]

#: rows of logits that exist at a time
ROWS = 512


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TK: Tensor, w_VK: Tensor, labels_T: Tensor, score: Callable[..., tuple[Tensor, Tensor]], rows: int
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h_TK, w_VK, labels_T)
        ctx.score, ctx.rows = score, rows
        parts = [score(h, w_VK, labels) for h, labels in zip(h_TK.split(rows), labels_T.split(rows), strict=True)]
        chosen, entropies = zip(*parts, strict=True)
        return torch.cat(chosen), torch.cat(entropies)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        h_TK, w_VK, labels_T = ctx.saved_tensors
        wants_h, wants_w = ctx.needs_input_grad[:2]
        dh = torch.empty_like(h_TK) if wants_h else None
        dw = torch.zeros(w_VK.shape, dtype=torch.float32, device=w_VK.device) if wants_w else None
        for start in range(0, h_TK.shape[0], ctx.rows):
            piece = slice(start, start + ctx.rows)
            with torch.enable_grad():
                h, w = h_TK[piece].detach().requires_grad_(wants_h), w_VK.detach().requires_grad_(wants_w)
                outputs = ctx.score(h, w, labels_T[piece])
            given = [(out, grad[piece]) for out, grad in zip(outputs, grad_outputs, strict=True) if grad is not None]
            sources = [tensor for tensor in (h, w) if tensor.requires_grad]
            found = list(torch.autograd.grad([out for out, _ in given], sources, [grad for _, grad in given]))
            if dh is not None:
                dh[piece] = found.pop(0)
            if dw is not None:  # FP32: in BF16 the sum over chunks would round at each
                dw += found.pop(0)
        return dh, None if dw is None else dw.to(w_VK.dtype), None, None, None


def chunked_log_probs(
    hidden: Tensor,
    w_VK: Tensor,
    labels: Tensor,
    logits_of: Callable[[Tensor, Tensor], Tensor],
    temperature: float | Tensor = 1.0,
    rows: int = ROWS,
) -> tuple[Tensor, Tensor]:
    """FP32 log-probs of ``labels`` [...] and entropies [...], from hidden states [..., K] and the head's weight [V, K].

    Args:
        logits_of: (hidden states [t, K], weight [V, K]) -> logits [t, V], differentiable.
        temperature: one number for all rows.
        rows: t; the results do not depend on it if ``logits_of`` is row-invariant.
    """

    def score(h_tK: Tensor, weight: Tensor, labels_t: Tensor) -> tuple[Tensor, Tensor]:
        logits_tV = logits_of(h_tK, weight).float()
        every_tV = log_softmax(logits_tV, divisor(temperature, logits_tV))
        return pick(every_tV, labels_t), -(every_tV.exp() * every_tV).sum(-1)

    chosen, entropy = _Chunked.apply(hidden.reshape(-1, hidden.shape[-1]), w_VK, labels.reshape(-1), score, rows)
    return chosen.view(labels.shape), entropy.view(labels.shape)
