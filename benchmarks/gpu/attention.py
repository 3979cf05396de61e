"""Attention: forward, forward and backward, and decoding over long contexts, exact and as BF16 installations have it.

T tokens of a batch, B sequences, L tokens of context, H query heads, KH key/value heads, D head width. FLOPs of a causal forward
pass: 4 D H for each pair of a query and a key that it sees; a backward pass has 2.5 times as many. Decoding reads 4 B L KH D
bytes of cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.memory import peak_mib
from benchmarks.gpu.piece import Piece, named
from benchmarks.gpu.shapes import MODELS, Model
from benchmarks.gpu.timing import Call, copies
from jetrl_patch.exact import dispatch, flash3, ops

#: (sequences, tokens of each) of a training batch
TRAINED = ((4, 4096), (2, 8192), (1, 32768))
#: decode batches, and tokens of context of each sequence
BATCHES, CONTEXTS = (64, 16, 1), (8192, 16384, 32768)
#: tokens in a block of the cache
PAGE = 16
EXACT, SDPA, FLASH3 = "exact", "SDPA", "FlashAttention-3"
#: exact attention by the library, in the one configuration of ``exact.flash3``
EXACT3 = "exact, FlashAttention-3"


class _Cache(NamedTuple):
    """One layer's cache: pages [B L / PAGE, PAGE, KH, D] of keys and values, and each sequence's, int32 [B, L / PAGE]."""

    keys: Tensor
    values: Tensor
    table: Tensor

    def whole(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, KH, L, D] as SDPA takes them. Views, since the pages lie in order."""
        B = self.table.shape[0]
        k, v = (t.view(B, -1, *t.shape[2:]).transpose(1, 2) for t in (self.keys, self.values))
        return k, v


def attention(
    machine: Machine,
    models: Sequence[Model] = MODELS[1:2],
    trained: Sequence[tuple[int, int]] = TRAINED,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
) -> Iterator[Piece]:
    """Rows per way; the speed-up is over the fastest way of the same row that is not exact."""
    for model in models:
        for L in contexts:
            for B in batches:
                yield Piece(named(model.name, "decode", B, L), partial(_decoded, machine, model, B, L))
        for B, T in trained:
            yield Piece(named(model.name, "training", B, T), partial(_trained, machine, model, B, T))


def _decoded(machine: Machine, model: Model, B: int, L: int) -> Iterator[dict[str, object]]:
    return _rows(machine, model, "decode", (B, L), _decode(machine, model, B, L), _read(model, B, L))


def _trained(machine: Machine, model: Model, B: int, T: int) -> Iterator[dict[str, object]]:
    flops = 4 * model.head_dim * model.heads * B * T * (T + 1) / 2
    for what, calls, factor in _training(machine, model, B, T):
        yield from _rows(machine, model, what, (B, T), calls, factor * flops)


def _read(model: Model, B: int, L: int) -> float:
    return 4.0 * B * L * model.kv_heads * model.head_dim


def _rows(
    machine: Machine, model: Model, what: str, shape: tuple[int, int], calls: dict[str, Call], work: float
) -> Iterator[dict[str, object]]:
    times = machine.timer(calls)
    others = [timed.seconds for name, timed in times.items() if name not in (EXACT, EXACT3) and not math.isnan(timed.seconds)]
    for name, timed in times.items():
        speed = work / timed.seconds / 1e9
        yield {
            "model": model.name, "what": what, "sequences": shape[0], "tokens": shape[1], "way": name,
            "us": timed.seconds * 1e6, "TFLOP/s": math.nan if what == "decode" else speed / 1e3,
            "GB/s": speed if what == "decode" else math.nan,
            "fastest other / this": min(others, default=math.nan) / timed.seconds,
            "peak MiB": "" if timed.error else peak_mib(machine.device, calls[name]), "note": timed.note,
        }  # fmt: skip


def _training(machine: Machine, model: Model, B: int, T: int) -> Iterator[tuple[str, dict[str, Call], float]]:
    """Forward, and forward with backward, of B sequences of T tokens; with how many times the forward's FLOPs."""
    D, scale = model.head_dim, model.head_dim**-0.5
    q, g = (machine.random(B * T, model.heads, D) for _ in range(2))
    k, v = (machine.random(B * T, model.kv_heads, D) for _ in range(2))
    ends = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=machine.device)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention_varlen(q, k, v, ends, scale)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (t.view(B, T, -1, D).transpose(1, 2) for t in (q, k, v))
        out: Tensor = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(B * T, -1, D)

    def exact3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with dispatch.attention_by(flash3.FLASH3, q.device.type, D):
            return exact(q, k, v)

    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {EXACT: exact, SDPA: sdpa}
    if flash3.find()[0] is not None:
        ways[EXACT3] = exact3
    forward: dict[str, Call] = {name: lambda i, f=f: _without_gradient(f, q, k, v) for name, f in ways.items()}
    if (flash := flash_attention_3()) is not None:  # vLLM's build has no backward
        forward[FLASH3] = lambda i: flash(
            q, k, v, T, ends, T, cu_seqlens_k=ends, softmax_scale=scale, causal=True, fa_version=3
        )
    yield "forward", forward, 1.0
    yield "forward and backward", {name: lambda i, f=f: _backward(f, q, k, v, g) for name, f in ways.items()}, 3.5


@torch.no_grad()
def _without_gradient(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return run(*inputs)


def _backward(run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> None:
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    torch.autograd.grad(run(*inputs), inputs, g)


def _decode(machine: Machine, model: Model, B: int, L: int) -> dict[str, Call]:
    """One new token for each of B sequences over L tokens; other memory is read in each turn, as layers follow one another."""
    D, scale, device = model.head_dim, model.head_dim**-0.5, machine.device
    turns, pages = copies(int(_read(model, B, L)), machine.cache), B * (L // PAGE)
    table = torch.arange(pages, dtype=torch.int32, device=device).view(B, -1)
    caches = [_Cache(*(machine.random(pages, PAGE, model.kv_heads, D) for _ in range(2)), table) for _ in range(turns)]
    q, starts = machine.random(B, model.heads, D), torch.arange(B + 1, dtype=torch.int32, device=device)
    seen = torch.full((B,), L, dtype=torch.int32, device=device)

    def exact(i: int) -> Tensor:
        c = caches[i % turns]
        return ops.attention_paged(q, c.keys, c.values, c.table, seen, starts, scale)

    def sdpa(i: int) -> Tensor:
        k, v = caches[i % turns].whole()
        out: Tensor = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, scale=scale, enable_gqa=True)
        return out

    calls: dict[str, Call] = {EXACT: exact, SDPA: sdpa}
    if (flash := flash_attention_3()) is not None:

        def exact3(i: int) -> Tensor:
            with dispatch.attention_by(flash3.FLASH3, q.device.type, D):
                return exact(i)

        def three(i: int) -> Tensor:
            c, where = caches[i % turns], {"seqused_k": seen, "block_table": table}
            out: Tensor = flash(q, c.keys, c.values, 1, starts, L, **where, softmax_scale=scale, causal=True, fa_version=3)
            return out

        calls |= {FLASH3: three, EXACT3: exact3}
    return calls


def flash_attention_3() -> Any:
    """vLLM's FlashAttention-3 as it is, or None where there is none."""
    return flash3.find()[0]
