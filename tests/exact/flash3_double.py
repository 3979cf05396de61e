"""A test double of vLLM's FlashAttention-3 without a GPU, with the library's assertions and its tiles of keys.

Written after Dao-AILab/flash-attention, ``hopper/flash_api.cpp`` (mha_fwd), ``hopper/heuristics.h``, ``hopper/tile_size.h`` and
``hopper/softmax.h``, and after ``vllm/vllm_flash_attn/flash_attn_interface.py``. Where the library silently reads invalid memory,
the double raises. Products are summed in FP64, then rounded to FP32, so that a row's bits depend on its tiles alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container

import torch
from torch import Tensor

SMS = 132


class Refused(RuntimeError):
    """An assertion of the library or of vLLM's wrapper."""


def need(ok: bool, what: str) -> None:
    if not ok:
        raise Refused(what)


def tile(width: int, per: int, longest: int, paged: bool, page: int) -> tuple[int, int]:
    """Rows and keys of a tile on sm_90 in BF16, causal as asked unless the library drops it."""
    causal = not (longest == 1 and (width <= 64 or width > 128 or not paged))
    few = longest * per <= 64
    rows = 64 if few else 192 if width <= 64 else 128
    whole = 192 if width <= 64 else 176  # keys without a mask and without scattered pages
    keys = (192 if few and width <= 64 else 128) if causal else whole  # with few: seen in vLLM 0.25.1 (vllm#51902)
    by_tma = paged and page % keys == 0 and longest * per > rows
    if paged and not by_tma and not causal:
        keys = 160 if width <= 64 else 128
    return rows, keys


def splits(asked: int, tiles: int, blocks: int) -> int:
    if asked > 0:
        return asked
    if tiles >= 0.8 * SMS or blocks <= 4:
        return 1
    efficiency = [(n := tiles * s / SMS) / math.ceil(n) for s in range(1, min(blocks, SMS) + 1)]
    return next(s for s, e in enumerate(efficiency, 1) if e >= 0.85 * max(efficiency))


class FlashAttention3:
    """A double of ``vllm.vllm_flash_attn``. ``calls`` holds the tile of keys and the splits of each call."""

    widths: Container[int] = (64, 128)

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def is_fa_version_supported(self, version: int) -> bool:
        return version == 3

    def fa_version_unsupported_reason(self, version: int) -> str | None:
        return None if version == 3 else "the double has version 3 alone"

    def flash_attn_varlen_func(self, q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, softmax_scale=None, causal=False, block_table=None, return_softmax_lse=False, out=None, num_splits=0, fa_version=2):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
        need(fa_version == 3, "the default is FlashAttention-2")
        need((cu_seqlens_k is None) != (seqused_k is None), "cu_seqlens_k or seqused_k, not both")
        need(block_table is None or seqused_k is not None, "seqused_k must be provided if block_table is provided")
        need(causal, "the project masks")
        need(all(t.dtype == torch.bfloat16 for t in (q, k, v)), "BF16")
        need(all(t.stride(-1) == 1 for t in (k, v)), "contiguous last dimension")
        for t in (cu_seqlens_q, seqused_k):
            need(t is None or (t.dtype == torch.int32 and t.is_contiguous()), "int32, contiguous")
        need(isinstance(max_seqlen_q, int) and isinstance(max_seqlen_k, int), "bounds on the host")
        R, (T, H, D), KH = cu_seqlens_q.numel() - 1, q.shape, k.shape[-2]
        need(D in self.widths and H % KH == 0, "shapes")
        paged = block_table is not None
        if paged:
            need(block_table.dtype == torch.int32 and block_table.stride(-1) == 1, "page_table")
            need(k.dim() == 4 and v.shape == k.shape and block_table.shape[0] == R == seqused_k.numel(), "shapes of pages")
            need(all(s % 8 == 0 for t in (k, v) for s in t.stride()[:-1]), "16 bytes for cp.async")
        rows, keys = tile(D, H // KH, max_seqlen_q, paged, k.shape[1] if paged else 1)
        blocks = -(-max_seqlen_k // keys)
        parts = splits(num_splits, R * KH * -(-max_seqlen_q * (H // KH) // rows), blocks)
        self.calls.append((keys, parts))
        out = torch.empty_like(q) if out is None else out
        need(out.dtype == torch.bfloat16 and out.shape == q.shape and out.stride(-1) == 1, "out")
        lse = torch.empty(H, T, device=q.device)
        scale = D**-0.5 if softmax_scale is None else softmax_scale
        self.compute(out, lse, (q, k, v), (cu_seqlens_q, cu_seqlens_k, seqused_k), block_table, max_seqlen_q, scale, keys, parts)
        return (out, lse) if return_softmax_lse else out

    def compute(self, out, lse, qkv, lengths, block_table, longest, scale, keys, parts):  # type: ignore[no-untyped-def]
        """Write every sequence's rows. A double for tensors without values overrides this."""
        (q, k, v), (cu_seqlens_q, cu_seqlens_k, seqused_k) = qkv, lengths
        starts = cu_seqlens_q.tolist()
        need(starts[-1] == len(q), "cu_seqlens_q ends with the queries")
        need(max(b - a for a, b in itertools.pairwise(starts)) <= longest, "max_seqlen_q is a bound")
        for r, (a, b) in enumerate(itertools.pairwise(starts)):
            if block_table is not None:
                seen = int(seqused_k[r])
                table = block_table[r, : -(-seen // k.shape[1])].long()
                need(not seen or 0 <= int(table.min()) <= int(table.max()) < k.shape[0], "a page outside of the cache")
                K, V = (t[table].flatten(0, 1)[:seen] for t in (k, v))
            else:
                ends = cu_seqlens_k.tolist()
                K, V = (t[ends[r] : ends[r + 1]] for t in (k, v))
            if b > a:
                need(len(K) >= b - a, "queries have keys")
                out[a:b], lse[:, a:b] = attend(q[a:b], K, V, scale, keys, parts)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, keys: int, parts: int) -> tuple[Tensor, Tensor]:
    """One sequence: each part of its tiles by online softmax from the last tile to the first, parts combined in FP32."""
    first, per = len(k) - len(q), q.shape[1] // k.shape[1]
    K, V = (t.double().repeat_interleave(per, 1) for t in (k, v))
    sees = torch.arange(len(q))[:, None] + first >= torch.arange(len(k))  # [Tq, Tk]
    tiles = range(0, len(k), keys)
    size = -(-len(tiles) // parts)
    done = [
        part(q.double(), K, V, sees, scale, keys, list(tiles[n : n + size])[::-1]) for n in range(0, len(tiles), size)
    ]
    top = torch.stack([m for m, _, _ in done]).amax(0)
    weights = [torch.exp2((m - top) * (scale * math.log2(math.e))) for m, _, _ in done]
    total = sum(w * s for w, (_, s, _) in zip(weights, done))
    acc = sum(w[..., None] * o for w, (_, _, o) in zip(weights, done))
    return (acc / total[..., None]).to(torch.bfloat16), (top * scale + total.log()).t()


def part(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float, keys: int, tiles: list[int]) -> tuple[Tensor, ...]:
    """Maximum and sum FP32 [Tq, H], and the unnormalized output FP32 [Tq, H, D]."""
    Tq, H, D = q.shape
    top, total, acc = torch.full((Tq, H), -math.inf), torch.zeros(Tq, H), torch.zeros(Tq, H, D)
    factor = scale * math.log2(math.e)
    for at in tiles:
        here = slice(at, at + keys)
        scores = torch.einsum("qhd,khd->qhk", q, k[here]).float()
        scores = scores.masked_fill(~sees[:, None, here], -math.inf)
        new = torch.maximum(top, scores.amax(-1))
        safe = torch.where(new == -math.inf, 0.0, new)
        weights, before = torch.exp2((scores - safe[..., None]) * factor), torch.exp2((top - safe) * factor)
        total = total * before + weights.double().sum(-1).float()
        product = torch.einsum("qhk,khd->qhd", weights.to(torch.bfloat16).double(), v[here])
        acc = acc * before[..., None] + product.float()
        top = new
    return torch.where(top == -math.inf, 0.0, top), total, acc
