"""The single definition of a token's log-prob: log-softmax in FP32 of the logits after temperature.

The formula needs FP32 copies of the logits, which at a vocabulary of 150,000 are larger than the model's activations. A row's
log-prob and gradient depend on that row alone, so both passes work in blocks of rows and hold the copies of one block. The
backward pass runs autograd over the same formula, block by block, so that no bit differs from a single pass over all rows.

On a GPU the gradient is one kernel's, without FP32 copies: it reads the logits once and writes their gradient once. For that the
forward pass keeps the largest logit of each row and its log-prob. Only an edit of the logits still needs FP32 copies of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from jetrl_patch.exact.dispatch import kernels_serve

#: bytes of one FP32 copy of a block, of which the backward pass in torch's operations holds about four
BLOCK_BYTES = 64 << 20
#: Rows per block are a multiple of this: in every block, a row has the alignment to 16 bytes that it has among all rows.
_MULTIPLE = 16

#: changes a block of FP32 logits [rows, V] before the temperature, differentiably; the slice says which rows they are
Edit = Callable[[Tensor, slice], Tensor]


def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    edit: Edit | None = None,
    reuse: bool = False,
) -> Tensor:
    """FP32 log-probs [...] of ``labels`` [...] under ``logits`` [..., V].

    The logits are converted to FP32 before the division, as in vLLM's sampler; verl divides in BF16 and uses a
    different formula for each dtype. ``temperature`` is a number or a tensor that broadcasts against [..., 1].

    On CUDA this is also vLLM's own formula: torch's log-softmax, one thread block per row, whose size depends on V. It
    groups a row's elements by the row's alignment to 16 bytes, which is the same for all rows if V is a multiple of 4 (or
    at most 1024). For other vocabularies ``exact.trial`` tests it on the machine.

    Args:
        edit: applied to each block of the flattened rows, for example to ban tokens.
        reuse: the backward pass writes the gradient over the logits, which nobody may read afterwards. A second backward
            pass then raises autograd's error about a tensor that was modified in place.
    """
    rows = labels.shape
    if isinstance(temperature, Tensor):
        one = temperature.numel() == 1
        temperature = temperature.reshape(()) if one else temperature.expand(*rows, 1).reshape(-1, 1)
    else:
        temperature = divisor(temperature, logits)
    flat: Tensor = logits.reshape(-1, logits.shape[-1])
    found: Tensor = _InBlocks.apply(flat, labels.reshape(-1).long(), temperature, edit, reuse)
    return found.view(rows)


def _edited(logits: Tensor, edit: Edit | None, part: slice) -> Tensor:
    x = logits.float()
    return x if edit is None else edit(x, part)


def _log_probs(x: Tensor, temperature: float | Tensor, part: slice) -> Tensor:
    by_row = isinstance(temperature, Tensor) and temperature.dim() == 2
    return log_softmax(x, temperature[part] if by_row else temperature)  # type: ignore[index]


def log_softmax(x: Tensor, temperature: float | Tensor) -> Tensor:
    """FP32 log-probs [..., V] of every token under FP32 logits ``x`` [..., V]."""
    if isinstance(temperature, Tensor) or temperature != 1.0:
        x = x / temperature
    return torch.log_softmax(x, dim=-1)


def pick(every: Tensor, labels: Tensor) -> Tensor:
    """The values [...] of ``labels`` [...] among ``every`` [..., V]."""
    return every.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)


def divisor(temperature: float | Tensor, like: Tensor) -> float | Tensor:
    """``temperature`` as vLLM divides by it: on CUDA a tensor, because CUDA multiplies by the reciprocal of a number."""
    if isinstance(temperature, Tensor) or not like.is_cuda:
        return temperature
    return torch.full((), temperature, dtype=torch.float32, device=like.device)


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows, vocabulary = logits.shape
    step = max(1, BLOCK_BYTES // (4 * vocabulary) // _MULTIPLE) * _MULTIPLE
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float | Tensor, edit: Edit | None, reuse: bool
    ) -> Tensor:
        found = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        keep = ctx.needs_input_grad[0] and _kernel_takes(logits)
        top, top_log_prob = (torch.empty_like(found) for _ in range(2)) if keep else (None, None)
        for part in _blocks(logits):
            x = _edited(logits[part], edit, part)
            every = _log_probs(x, temperature, part)
            found[part] = pick(every, labels[part])
            if top is not None and top_log_prob is not None:
                top_log_prob[part], place = every.max(-1)
                top[part] = pick(x, place)
        ctx.temperature, ctx.edit, ctx.reuse = temperature, edit, reuse
        ctx.save_for_backward(logits, labels, top, top_log_prob)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, top, top_log_prob = ctx.saved_tensors
        found = logits if ctx.reuse else torch.empty_like(logits)
        if top is None:
            _by_autograd(ctx, logits, labels, grad_outputs[0], found)
        else:
            _by_kernel(ctx, logits, labels, grad_outputs[0], (top, top_log_prob), found)
        return found, None, None, None, None


def _by_autograd(ctx: Any, logits: Tensor, labels: Tensor, dy: Tensor, found: Tensor) -> None:
    for part in _blocks(logits):
        block = logits[part].detach().requires_grad_()
        with torch.enable_grad():
            y = pick(_log_probs(_edited(block, ctx.edit, part), ctx.temperature, part), labels[part])
        (gradient,) = torch.autograd.grad(y, block, dy[part])
        found[part] = gradient


def _kernel_takes(logits: Tensor) -> bool:
    if not kernels_serve(logits):
        return False
    from jetrl_patch.kernels.logprob_backward import DTYPES

    return logits.dtype in DTYPES and logits.stride(1) == 1


def _by_kernel(
    ctx: Any, logits: Tensor, labels: Tensor, dy: Tensor, tops: tuple[Tensor, Tensor], found: Tensor
) -> None:
    """All rows at once; with an edit, block by block, each through the edit's own gradient."""
    from jetrl_patch.kernels.logprob_backward import log_prob_backward

    top, top_log_prob = tops
    given = torch.as_tensor(ctx.temperature, dtype=torch.float32, device=logits.device).reshape(-1)
    if ctx.edit is None:
        log_prob_backward(logits, labels, dy, top, top_log_prob, given, found)
        if ctx.reuse:
            increment_version(found)
        return
    for part in _blocks(logits):
        block = logits[part].detach().requires_grad_()
        with torch.enable_grad():
            x = _edited(block, ctx.edit, part).contiguous()
        dx = torch.empty_like(x)
        t = given if given.numel() == 1 else given[part]
        log_prob_backward(x.detach(), labels[part], dy[part], top[part], top_log_prob[part], t, dx)
        (found[part],) = torch.autograd.grad(x, block, dx)
