"""FlashAttention-3 as exact attention on Hopper: one configuration of one kernel for training, prefill and decoding.

vLLM's CUDA wheels contain it, so trainer and rollout call the same binary. The bits of a row depend on the tiles in which its
keys are read. The library chooses these from the arguments of a call (Dao-AILab/flash-attention, ``hopper/flash_api.cpp``,
``hopper/heuristics.h`` and ``hopper/tile_size.h``). So every call here

- gives a longest query of at least ``LONGEST``. With 1, the library drops the causal mask; with a few, it uses a smaller tile.
  Either changes the tiles of keys. The value is only a bound: the kernel reads the actual lengths on the device;
- reads keys from pages, in the trainer too, because contiguous keys may get other tiles;
- does not split a row's keys (``num_splits=1``).

The library does not promise that rows are then equal, so ``exact.trial`` tests that on the machine first.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jetrl_patch.native.machine import check_hopper

#: its name in the settings
FLASH3 = "flash3"
MODULE = "vllm.vllm_flash_attn"
#: smallest "longest query": more than 64 rows of packed heads, and more than one tile of 128
LONGEST = 256
#: tokens per page of the trainer's keys, as in vLLM's cache. Less than a tile, because whole tiles are loaded in another way
PAGE = 16
#: the arguments of ``flash_attn_varlen_func`` that are used here
ARGUMENTS = frozenset(
    "q k v max_seqlen_q cu_seqlens_q max_seqlen_k seqused_k softmax_scale causal block_table return_softmax_lse num_splits "
    "out fa_version".split()
)

Kernel = Callable[..., tuple[Tensor, Tensor]]


@functools.cache
def find() -> tuple[Kernel | None, str]:
    """The library's ``flash_attn_varlen_func`` and "", or None and the reason. Launches no kernel."""
    ok, reason = check_hopper()
    if not ok:
        return None, reason
    try:
        module: Any = importlib.import_module(MODULE)
        if not module.is_fa_version_supported(3):
            return None, f"no FlashAttention-3: {module.fa_version_unsupported_reason(3)}"
    except Exception as error:  # an extension that fails to load may raise anything
        return None, f"{MODULE} cannot be imported ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    kernel: Kernel = module.flash_attn_varlen_func
    absent = ARGUMENTS - set(inspect.signature(kernel).parameters)
    if absent:
        return None, f"{MODULE}.flash_attn_varlen_func has no {', '.join(sorted(absent))}"
    return kernel, ""


def attention_paged(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``exact.attention.attention_paged``, and the log-sum-exp FP32 [T, H]. The host does not wait for the device.

    Raises RuntimeError if the library is missing, which ``exact.trial`` checks first.
    """
    kernel, missing = find()
    if kernel is None:
        raise RuntimeError(missing)
    found, lse = kernel(
        q_THD, k_cache, v_cache, cu_seqlens_q=query_start_loc, max_seqlen_q=max(q_THD.shape[0], LONGEST), seqused_k=seq_lens,
        max_seqlen_k=block_table.shape[1] * k_cache.shape[1], block_table=block_table, softmax_scale=scale, causal=True,
        num_splits=1, return_softmax_lse=True, out=out, fa_version=3,
    )  # fmt: skip
    return found, lse.t()


def attention_varlen(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over packed sequences: BF16 [T, H, D] and the log-sum-exp FP32 [T, H], contiguous."""
    k_cache, v_cache, table = pages(k_TKD, v_TKD, cu_seqlens)
    out, lse = attention_paged(q_THD, k_cache, v_cache, table, cu_seqlens.diff(), cu_seqlens, scale)
    return out, lse.contiguous()


def pages(k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copy keys and values into pages, each sequence from the start of a page.

    Sizes depend only on shapes: T tokens of R sequences fill at most T // PAGE + R pages.

    Returns:
        Keys and values [pages, PAGE, KH, D], zero in unused places, and the table of pages int32 [R, ceil(T / PAGE)].
    """
    T, R = k_TKD.shape[0], cu_seqlens.numel() - 1
    lengths = cu_seqlens.diff().long()
    needs = (lengths + PAGE - 1) // PAGE
    firsts = needs.cumsum(0) - needs
    shift = firsts * PAGE - cu_seqlens[:-1]  # from a token's place in the batch to its place in the pages
    places = torch.arange(T, device=k_TKD.device) + shift.repeat_interleave(lengths, output_size=T)
    total = T // PAGE + R
    k_cache, v_cache = (
        t.new_zeros(total * PAGE, *t.shape[1:]).index_copy_(0, places, t).unflatten(0, (total, PAGE)) for t in (k_TKD, v_TKD)
    )
    table = firsts[:, None] + torch.arange(-(-T // PAGE), device=k_TKD.device)
    return k_cache, v_cache, table.clamp_(max=total - 1).to(torch.int32)
