"""Causal attention with the rollout's forward pass."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from jetrl_patch.exact import flash3, kv_cache
from jetrl_patch.exact.dispatch import attention as serving_attention
from jetrl_patch.exact.dispatch import implementation
from jetrl_patch.native import ops

# ---- Causal attention with the rollout's forward and an ordinary backward ------------------------
# Each query row is computed by itself: FP32 scores over ascending keys, one rounding to BF16. The C kernel makes two passes; the
# Triton kernel, ``kernels.attention``, an online softmax over fixed blocks and chunks of keys. So a row has the same bits in a
# packed training batch, a prefill, a chunk of a prefill and a decode step. On Hopper, ``exact.flash3`` may compute the forward
# instead. Values may be narrower than keys, as in latent attention. The Triton kernel for that (``kernels.latent``) reads keys
# alone: there, values must be their first numbers, and the gradient of the keys is that of both.
# Shape legend: T tokens of all sequences, H query heads, KH key/value heads, D head width, V width of a value, R sequences.

#: up to this many scores, the backward pads all sequences into one batch. Above, it takes one sequence at a time
_BATCHED_SCORES = 1 << 26


def attention_paged(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    out: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of the rollout over a paged cache (no gradient).

    Args:
        q_THD: BF16 [T, H, D]. Rows query_start_loc[r] to query_start_loc[r + 1] are the queries of request r, at the last of its
            positions.
        k_cache, v_cache: BF16 [blocks, block size, KH, D] and [blocks, block size, KH, V], or with ``scales`` the bytes of e4m3,
            uint8. The last dimension is contiguous, other strides are free.
        block_table: int32 [R, B]. seq_lens: int32 [R], keys so far. query_start_loc: int32 [R + 1].
        out: BF16 [T, H, V], contiguous, to be filled.
        scales: of the keys and of the values in an FP8 cache, FP32 [blocks, block size, KH] (``exact.kv_cache``).

    Returns:
        ``out``, or BF16 [T, H, V].
    """
    serves = serving_attention(q_THD)
    if scales is not None and serves != "triton":
        k_cache, v_cache = kv_cache.dequantize(k_cache, scales[0]), kv_cache.dequantize(v_cache, scales[1])
    if serves == "native":
        found = ops.attention(q_THD, k_cache, v_cache, block_table, seq_lens, query_start_loc, scale)[0]
        return found if out is None else out.copy_(found)
    if serves in ("triton", flash3.FLASH3):
        from jetrl_patch.kernels import attention

        step = (block_table, seq_lens, query_start_loc, scale, out)
        if v_cache.shape[3] != q_THD.shape[2]:
            return _latent().attention_paged(q_THD, k_cache, v_cache.shape[3], *step)[0]
        if serves == flash3.FLASH3:
            return flash3.attention_paged(q_THD, k_cache, v_cache, *step)[0]
        return attention.attention_paged(q_THD, k_cache, v_cache, *step, scales)[0]
    out = q_THD.new_empty(*q_THD.shape[:2], v_cache.shape[3]) if out is None else out
    size = k_cache.shape[1]
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for r, length in enumerate(lengths):
        if starts[r + 1] > starts[r]:
            blocks = block_table[r, : -(-length // size)].long()
            k, v = (cache[blocks].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            rows = slice(starts[r], starts[r + 1])
            out[rows] = _reference(q_THD[rows], k, v, scale)[0]
    return out


def _latent() -> Any:
    from jetrl_patch.kernels import latent

    return latent


def _reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One sequence in FP64: output [Tq, H, V] BF16 and log-sum-exp [Tq, H] FP32."""
    per = q.shape[1] // k.shape[1]
    qd, kd, vd = q.double(), k.double().repeat_interleave(per, 1), v.double().repeat_interleave(per, 1)
    scores = torch.einsum("qhd,khd->hqk", qd, kd) * scale
    first = k.shape[0] - q.shape[0]
    keys, rows = torch.arange(k.shape[0], device=q.device), torch.arange(q.shape[0], device=q.device)
    scores = scores.masked_fill(keys[None] > rows[:, None] + first, float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), vd)
    return out.to(torch.bfloat16), scores.logsumexp(-1).t().float()


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, fp8: bool) -> Tensor:
        q16, k16, v16 = (t.to(torch.bfloat16).contiguous() for t in (q, k, v))
        if fp8:
            k16, v16 = kv_cache.rounded(k16, v16)
        serves = serving_attention(q)
        if serves == flash3.FLASH3:
            out, lse = flash3.attention_varlen(q16, k16, v16, cu_seqlens.to(torch.int32), scale)
        elif serves == "triton" and v.shape[2] != q.shape[2]:
            out, lse = _latent().attention_varlen(q16, k16, v.shape[2], cu_seqlens.to(torch.int32), scale)
        elif serves == "triton":
            from jetrl_patch.kernels import attention

            out, lse = attention.attention_varlen(q16, k16, v16, cu_seqlens.to(torch.int32), scale)
        elif serves == "native":
            cu = cu_seqlens.to(torch.int32)
            k_cache, v_cache = k16.unsqueeze(1), v16.unsqueeze(1)  # blocks of one token: [T, 1, KH, D or V]
            longest = int((cu[1:] - cu[:-1]).max())
            table = cu[:-1, None] + torch.arange(longest, dtype=torch.int32)
            out, lse = ops.attention(q16, k_cache, v_cache, table, cu[1:] - cu[:-1], cu, scale, want_lse=True)
            assert lse is not None
        else:
            ends = itertools.pairwise(cu_seqlens.tolist())
            pieces = [_reference(q16[a:b], k16[a:b], v16[a:b], scale) for a, b in ends]
            out, lse = map(torch.cat, zip(*pieces, strict=True))
        ctx.save_for_backward(q16, k16, v16, out, lse, cu_seqlens)
        ctx.scale, ctx.dtypes = scale, (q.dtype, k.dtype, v.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu = ctx.saved_tensors
        grad = grad_outputs[0].to(torch.bfloat16)
        if implementation(q) == "triton" and v.shape[2] != q.shape[2]:
            dq, dk = _latent().attention_backward(q, k, out, lse, grad, cu.to(torch.int32), ctx.scale)
            return dq.to(ctx.dtypes[0]), dk.to(ctx.dtypes[1]), None, None, None, None
        if implementation(q) == "triton":
            from jetrl_patch.kernels.attention_backward import attention_backward

            dq, dk, dv = attention_backward(q, k, v, out, lse, grad, cu.to(torch.int32), ctx.scale)
        else:
            dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
            lengths = cu.diff()
            longest = int(lengths.max())
            batched = lengths.numel() * q.shape[1] * longest * longest <= _BATCHED_SCORES
            ranges = [(cu, longest)] if batched else [(cu[r : r + 2], int(n)) for r, n in enumerate(lengths)]
            for part, width in ranges:
                _backward_batch(q, k, v, out, lse, grad, part, width, ctx.scale, (dq, dk, dv))
        return dq.to(ctx.dtypes[0]), dk.to(ctx.dtypes[1]), dv.to(ctx.dtypes[2]), None, None, None


def _backward_batch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, cu: Tensor, width: int, scale: float,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Gradients of the sequences in ``cu``, padded to ``width``, in FP32 (FlashAttention, arXiv 2205.14135, section B).

    P = exp(scale QK^T - lse); dV = P^T dO; dP = dO V^T; dS = P (dP - rowsum(dO O)); dQ = scale dS K; dK = scale dS^T Q.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    per = heads // kv_heads
    steps = torch.arange(width, device=q.device)
    index = cu[:-1, None].long() + steps  # [R, width]
    valid = steps < (cu[1:] - cu[:-1])[:, None]
    index = index.clamp(max=q.shape[0] - 1)

    def padded(t: Tensor) -> Tensor:  # [T, h, D] -> FP32 [R, h, width, D], zero outside
        return (t[index].float() * valid[..., None, None]).transpose(1, 2)

    Q, dO, O = padded(q), padded(grad), padded(out)
    K, V = (padded(t).repeat_interleave(per, 1) for t in (k, v))
    seen = steps[None, :] <= steps[:, None]
    mask = seen & valid[:, None, :, None] & valid[:, None, None, :]
    L = lse[index].transpose(1, 2).unsqueeze(-1)  # [R, H, width, 1]
    P = torch.where(mask, torch.exp(Q @ K.transpose(-1, -2) * scale - L), 0.0)
    dV = P.transpose(-1, -2) @ dO
    dS = P * (dO @ V.transpose(-1, -2) - (dO * O).sum(-1, keepdim=True)) * scale
    grads = (dS @ K, dS.transpose(-1, -2) @ Q, dV)
    rows = index[valid]
    for target, value in zip(into, grads, strict=True):
        if target.shape[1] != heads:
            value = value.unflatten(1, (kv_heads, per)).sum(2)
        target[rows] = value.transpose(1, 2)[valid].to(target.dtype)


def attention_varlen(
    q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, cu_seqlens: Tensor, scale: float, fp8: bool = False
) -> Tensor:
    """Causal attention of packed sequences, differentiable.

    Args:
        q_THD: [T, H, D], converted to BF16.
        k_TKD, v_TKV: [T, KH, D] and [T, KH, V], converted to BF16; KH divides H.
        cu_seqlens: int32 [R + 1], from 0 to T.
        scale: usually D ** -0.5.
        fp8: round keys and values as an FP8 cache does (``exact.kv_cache``).

    Returns:
        BF16 [T, H, V]. Gradients are computed in FP32 and rounded to the inputs' dtypes.
    """
    result: Tensor = _VarlenAttention.apply(q_THD, k_TKD, v_TKV, cu_seqlens, scale, fp8)
    return result
