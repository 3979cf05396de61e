"""From hidden states to log-probs: BF16 products with independent rows, and the one definition of a token's log-prob."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from jetrl_patch.exact.dispatch import kernel_for, kernels_serve
from jetrl_patch.native import ops

# ---- BF16 linear layers with independent rows: ``lm_head``, and layers kept out of FP8 -----------

def _product(x_MK: Tensor, w_NK: Tensor, out_dtype: torch.dtype) -> Tensor:
    bf16_gemm = kernel_for("bf16_gemm", x_MK)
    product: Tensor = (x_MK.double() @ w_NK.double().t()).to(out_dtype) if bf16_gemm is None else bf16_gemm(x_MK, w_NK, out_dtype)
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, out_dtype: torch.dtype, splits: int) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        w_NK = weight.detach().to(torch.bfloat16)
        if splits == 1:
            y = _product(x_MK, w_NK, out_dtype)
        else:  # as a row-parallel rollout: FP32 partial sums, added in rank order, rounded once
            pairs = zip(x_MK.chunk(splits, 1), w_NK.chunk(splits, 1), strict=True)
            y = functools.reduce(torch.add, (_product(*pair, torch.float32) for pair in pairs)).to(out_dtype)
        ctx.save_for_backward(x_MK, w_NK)
        ctx.x_dtype, ctx.w_dtype, ctx.out_dtype = x.dtype, weight.dtype, out_dtype
        # not a view, as the result of ``F.linear``: FSDP2 warns that writing to one would drop its hooks
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], w_NK.shape[0]])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_MK, w_NK = ctx.saved_tensors
        grad = grad_outputs[0]
        g_MN = grad.reshape(-1, grad.shape[-1]).to(ctx.out_dtype)
        dx = dw = None
        if ctx.out_dtype == torch.float32:
            terms = 1 if g_MN.device.type == "cpu" else TERMS
            dx, dw = fp32_gradients(g_MN, x_MK, w_NK, ctx.w_dtype, ctx.needs_input_grad[:2], terms)
        else:
            if ctx.needs_input_grad[0]:
                dx = ops.product(g_MN, w_NK)
            if ctx.needs_input_grad[1]:
                dw = ops.product(g_MN.t(), x_MK).to(ctx.w_dtype)
        return None if dx is None else dx.to(ctx.x_dtype).view(*grad.shape[:-1], w_NK.shape[1]), dw, None, None


#: BF16 numbers that hold the 24 bits of an FP32 one, and bytes of the gradient of logits that are split at a time
TERMS, TERM_BYTES = 3, 512 << 20


def fp32_gradients(
    g_MN: Tensor, x_MK: Tensor, w_NK: Tensor, w_dtype: torch.dtype, wanted: Sequence[bool], terms: int
) -> tuple[Tensor | None, Tensor | None]:
    """dX FP32 [M, K] and dW [N, K] from an FP32 gradient and BF16 operands, if wanted.

    On a GPU, ``TERMS`` products of BF16 numbers with FP32 sums replace one of FP32 numbers, which runs at a twelfth of their
    speed. The other operands are BF16 already. Ranges of N bound the memory of the terms, and each writes its own rows of dW.
    """
    M, N = g_MN.shape
    step = N if terms == 1 else max(1, TERM_BYTES // (4 * max(1, M)) // 128) * 128
    dx: Tensor | None = None
    dw = torch.empty(N, x_MK.shape[1], dtype=w_dtype, device=g_MN.device) if wanted[1] else None
    for start in range(0, N, step):
        part = slice(start, start + step)
        total: Tensor | None = None
        for term in in_terms(g_MN[:, part], terms):
            if wanted[0]:
                dx = _add_product(dx, term, w_NK[part])
            if dw is not None:
                total = _add_product(total, term.t(), x_MK)
        if dw is not None and total is not None:
            dw[part] = total
    return dx, dw


def in_terms(g: Tensor, terms: int) -> Iterator[Tensor]:
    """BF16 matrices whose sum is the FP32 matrix ``g``; ``g`` itself if there is to be one."""
    if terms == 1:
        yield g
        return
    yield (term := g.to(torch.bfloat16))
    for _ in range(terms - 1):
        g = g - term
        yield (term := g.to(torch.bfloat16))


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``total`` + A B in FP32."""
    if a.device.type == "cpu":
        product = torch.mm(a.float(), b.float())
        return product if total is None else total + product
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, splits: int = 1) -> Tensor:
    """Y = bf16(X W^T), then + bias in BF16: x [..., K], weight [N, K] and bias [N] -> BF16 [..., N].

    ``splits`` is the number of ranges of K whose FP32 sums a tensor-parallel rollout adds. Gradients use ordinary BF16 products.
    """
    result: Tensor = _Linear.apply(x, weight, torch.bfloat16, splits)
    return result if bias is None else result + bias.to(torch.bfloat16)


def head_linear_fp32(x: Tensor, w_VK: Tensor) -> Tensor:
    """Unrounded FP32 logits [..., V] of BF16 hidden states [..., K] and weight [V, K]. Gradients are computed in FP32."""
    result: Tensor = _Linear.apply(x, w_VK, torch.float32, 1)
    return result


def partial_sum(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """The unrounded FP32 product [M, N] of one rank of a row-parallel layer (no gradient)."""
    return _product(x_MK, w_NK, torch.float32)


# ---- The single definition of a token's log-prob: log-softmax in FP32 of the logits, divided by the temperature
# The formula needs FP32 copies of the logits. At a vocabulary of 150,000 these are larger than the model's activations. A row's
# log-prob and gradient depend only on that row, so both passes work in blocks of rows and hold the copies of one block at a time.
# The backward pass runs autograd over the same formula block by block, so every bit is that of a single pass over all rows.
#
# On a GPU, one kernel computes the gradient without FP32 copies: it reads the logits once and writes their gradient once. For
# this, the forward pass keeps each row's largest logit and its log-prob. FP32 copies of a block remain only with an ``edit``.

#: bytes of one FP32 copy of a block; the backward pass in torch's operations holds about four copies
BLOCK_BYTES = 64 << 20
#: the rows of a block are a multiple of this: a row has the same alignment to 16 bytes in its block as among all rows
_MULTIPLE = 16

#: changes a block of FP32 logits [rows, V], differentiably, before the division by the temperature. The slice says which rows
Edit = Callable[[Tensor, slice], Tensor]


def chained(first: Edit | None, then: Edit) -> Edit:
    """One edit after another, if there is one."""
    if first is None:
        return then
    return lambda block, part: then(first(block, part), part)


def edited(logits: Tensor, edit: Edit) -> Tensor:
    """All logits [..., V] after an edit of their rows."""
    flat = logits.reshape(-1, logits.shape[-1])
    return edit(flat, slice(0, len(flat))).view(logits.shape)


def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    edit: Edit | None = None,
    reuse: bool = False,
) -> Tensor:
    """FP32 log-probs [...] of ``labels`` [...] under ``logits`` [..., V].

    The logits are converted to FP32 before the division, as in vLLM's sampler. verl divides in BF16 and uses a different formula
    for each dtype.

    On CUDA this is also vLLM's own formula: torch's log-softmax, with one thread block per row, whose size depends on V. It
    groups a row's elements by the row's alignment to 16 bytes, which is the same for all rows if V is a multiple of 4 (or at most
    1024). ``exact.trial`` tests other vocabularies on the machine.

    Args:
        temperature: a number, or a tensor that broadcasts against [..., 1].
        edit: applied to each block of the flattened rows, for example to ban tokens.
        reuse: the backward pass overwrites the logits with their gradient, so nothing may read them afterwards. A second backward
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
    """FP32 log-probs [..., V] of all tokens, from FP32 logits ``x`` [..., V]."""
    if isinstance(temperature, Tensor) or temperature != 1.0:
        x = x / temperature
    return torch.log_softmax(x, dim=-1)


def pick(every: Tensor, labels: Tensor) -> Tensor:
    """The values [...] at ``labels`` [...] in ``every`` [..., V]."""
    return every.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)


def entropy(log_probs: Tensor) -> Tensor:
    """Entropies [...] of distributions [..., V], in nats."""
    return -(log_probs.exp() * log_probs).sum(-1)


def divisor(temperature: float | Tensor, like: Tensor) -> float | Tensor:
    """``temperature`` as vLLM divides by it: on CUDA a tensor, because CUDA would multiply by the reciprocal of a number."""
    if isinstance(temperature, Tensor) or not like.is_cuda:
        return temperature
    return torch.full((), temperature, dtype=torch.float32, device=like.device)


def blocks(logits: Tensor) -> Iterator[slice]:
    """The rows of ``logits`` [rows, V], in blocks that take at most ``BLOCK_BYTES`` in FP32."""
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
        for part in blocks(logits):
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
        dy, found = grad_outputs[0], logits if ctx.reuse else torch.empty_like(logits)
        if top is not None:
            from jetrl_patch.kernels.head import log_prob_backward

            given = torch.as_tensor(ctx.temperature, dtype=torch.float32, device=logits.device).reshape(-1)
            if ctx.edit is None:
                log_prob_backward(logits, labels, dy, top, top_log_prob, given, found)
                if ctx.reuse:
                    increment_version(found)
                return found, None, None, None, None
        for part in blocks(logits):
            block = logits[part].detach().requires_grad_()
            with torch.enable_grad():
                x = _edited(block, ctx.edit, part)
                y = x.contiguous() if top is not None else pick(_log_probs(x, ctx.temperature, part), labels[part])
            gradient = dy[part]
            if top is not None:  # of the edited logits, by the kernel; then through the edit's own gradient
                gradient, t = torch.empty_like(y), given if given.numel() == 1 else given[part]
                log_prob_backward(y.detach(), labels[part], dy[part], top[part], top_log_prob[part], t, gradient)
            (found[part],) = torch.autograd.grad(y, block, gradient)
        return found, None, None, None, None


def _kernel_takes(logits: Tensor) -> bool:
    if not kernels_serve(logits):
        return False
    from jetrl_patch.kernels.head import DTYPES

    return logits.dtype in DTYPES and logits.stride(1) == 1


# ---- Log-probs and entropy from hidden states, a few rows at a time: the logits of a whole batch never exist
# The FP32 logits of a micro-batch of T = 16,384 tokens and a vocabulary of V = 152,064 take 10 GB. So frameworks offer "fused
# kernels", which compute
#
#     z [t, V] = H [t, K] · W^T         l [t] = log-softmax(z / temperature)[label]         e [t] = -Σ_v p_v log p_v
#
# for t rows at a time, and again in the backward pass. Here z comes from the run's own head, and l from the single definition of
# a token's log-prob. In both, rows are independent, so the results do not depend on t.
#
# The backward pass computes z for a block of many chunks and overwrites it, chunk by chunk, with its gradient. Each block adds to
# dW [V, K] once. That moves up to 12 bytes per element, as many for 512 rows as for thousands.

#: number of rows whose logits exist in FP32 at the same time, and bytes of a block of logits in the backward pass
ROWS, LOGIT_BYTES = 512, 1 << 30

#: (hidden states [t, K], weight [V, K]) -> logits [t, V], differentiable; what it saves for its gradient is not the result
LogitsOf = Callable[[Tensor, Tensor], Tensor]
#: weight -> context in which it has all of its values
Whole = Callable[[Tensor], contextlib.AbstractContextManager[Any]]


def _scored(
    logits_tV: Tensor, labels_t: Tensor, temperature: float | Tensor, edit: Edit | None, at: slice
) -> tuple[Tensor, Tensor]:
    """Log-probs of labels, and entropies, FP32 [t], of the rows ``at``."""
    logits_tV = _edited(logits_tV, edit, at)
    every_tV = log_softmax(logits_tV, divisor(temperature, logits_tV))
    return pick(every_tV, labels_t), entropy(every_tV)


def _differentiate(
    z_tV: Tensor, labels_t: Tensor, temperature: float | Tensor, edit: Edit | None, at: slice, grads: Sequence[Tensor | None]
) -> None:
    """Overwrite logits with their gradient, from those of ``_scored``."""
    logits, alone = z_tV.detach().requires_grad_(), grads[1] is None and edit is None and _kernel_takes(z_tV)
    with torch.enable_grad():
        if alone:  # without entropies a kernel does it in one pass
            outputs = token_log_probs(logits, labels_t, temperature, reuse=True), None
        else:
            outputs = _scored(logits, labels_t, temperature, edit, at)
    given = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    (found,) = torch.autograd.grad([out for out, _ in given], logits, [grad for _, grad in given])
    if not alone:
        z_tV.copy_(found)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TK: Tensor, w_VK: Tensor, labels_T: Tensor, logits_of: LogitsOf, temperature: float | Tensor,
        edit: Edit | None, rows: int, whole: Whole,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h_TK, w_VK, labels_T)
        ctx.logits_of, ctx.temperature, ctx.edit, ctx.rows, ctx.whole = logits_of, temperature, edit, rows, whole
        parts = [slice(start, min(start + rows, len(h_TK))) for start in range(0, max(1, len(h_TK)), rows)]
        scored = (_scored(logits_of(h_TK[at], w_VK), labels_T[at], temperature, edit, at) for at in parts)
        chosen, entropies = zip(*scored, strict=True)
        return torch.cat(chosen), torch.cat(entropies)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        with ctx.whole(ctx.saved_tensors[1]):
            return _Chunked._gradients(ctx, *grad_outputs)

    @staticmethod
    def _gradients(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        h_TK, w_VK, labels_T = ctx.saved_tensors
        wants_h, wants_w = ctx.needs_input_grad[:2]
        dh = torch.empty_like(h_TK) if wants_h else None
        dw: Tensor | None = None
        block = max(1, LOGIT_BYTES // (2 * w_VK.shape[0] * ctx.rows)) * ctx.rows
        for start in range(0, h_TK.shape[0], block):
            part = slice(start, min(start + block, h_TK.shape[0]))
            with torch.enable_grad():
                h, w = h_TK[part].detach().requires_grad_(wants_h), w_VK.detach().requires_grad_(wants_w)
                z_tV = ctx.logits_of(h, w)
            dz_tV = z_tV.data  # autograd need not know that it changes
            for first in range(0, dz_tV.shape[0], ctx.rows):
                at = slice(start + first, min(start + first + ctx.rows, part.stop))
                grads = [None if grad is None else grad[at] for grad in grad_outputs]
                _differentiate(dz_tV[first : first + ctx.rows], labels_T[at], ctx.temperature, ctx.edit, at, grads)
            found = list(torch.autograd.grad(z_tV, [tensor for tensor in (h, w) if tensor.requires_grad], dz_tV))
            if dh is not None:
                dh[part] = found.pop(0)
            if wants_w:  # FP32, because a BF16 sum would round after each block
                dw = found.pop(0) if dw is None else dw.float().add_(found.pop(0))
        return dh, None if dw is None else dw.to(w_VK.dtype), None, None, None, None, None, None


def chunked_log_probs(
    hidden: Tensor,
    w_VK: Tensor,
    labels: Tensor,
    logits_of: LogitsOf,
    temperature: float | Tensor = 1.0,
    rows: int = ROWS,
    whole: Whole = contextlib.nullcontext,
    edit: Edit | None = None,
) -> tuple[Tensor, Tensor]:
    """FP32 log-probs of ``labels`` [...] and entropies [...], from hidden states [..., K] and the head's weight [V, K].

    Args:
        temperature: one number for all rows.
        edit: as in ``token_log_probs``. Entropies are those of the edited distributions.
        rows: t. The results do not depend on it if the rows of ``logits_of`` are independent.
        whole: gathers the weight for the backward pass, if it is sharded in between.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    chosen, entropy = _Chunked.apply(flat, w_VK, labels.reshape(-1), logits_of, temperature, edit, rows, whole)
    return chosen.view(labels.shape), entropy.view(labels.shape)
