"""Doubles of the operators of vLLM's compiled libraries: they check tensors and compute nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.cuda_double import graphs, peers
from tests.cuda_double.checks import Unsupported, launches, need
from tests.cuda_wheels.h100_double import SUPPORTS
from tests.exact.flash3_double import FlashAttention3

#: namespaces in ``torch.ops``
NAMESPACES = ("_C", "_moe_C", "_C_cache_ops", "_vllm_fa3_C", "_C_custom_ar")


class Attention(FlashAttention3):
    """FlashAttention-3 as vLLM's Python calls it, below ``vllm.vllm_flash_attn``."""

    widths = range(8, 257, 8)

    def compute(self, out, lse, qkv, lengths, block_table, *more) -> None:  # type: ignore[no-untyped-def]
        pass

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, **named: Any) -> list[Tensor]:
        if q.shape[-1] > 256:
            raise Unsupported("FlashAttention forward only supports head dimension at most 256")
        used = {
            "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "softmax_scale",
            "is_causal", "num_splits", "window_size_left", "window_size_right", "softcap", "is_rotary_interleaved", "sm_margin",
            "cp_world_size", "cp_rank", "scheduler_metadata", "q_descale", "k_descale", "v_descale", "cp_tot_seqused_k",
        }  # fmt: skip
        others = [name for name, value in named.items() if name not in used and value is not None]
        need(not others and named["softcap"] == 0, "FlashAttention-3: this double does not know", others)
        lengths = {name: named[name] for name in ("max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "cu_seqlens_k", "seqused_k")}
        options = {"causal": named["is_causal"], "softmax_scale": named["softmax_scale"], "num_splits": named["num_splits"]}
        found = self.flash_attn_varlen_func(
            q, k, v, **lengths, **options, block_table=named["page_table"], return_softmax_lse=True, out=out, fa_version=3
        )
        none = torch.empty(0, device=q.device)
        return [*found, none, none]


#: "namespace::name" -> the Python that an operator runs on the device
PYTHON: dict[str, Callable[..., Any]] = {}


def record_python() -> None:
    """Record what is registered from now on. FakeTensorMode would run the description of the result in its place."""
    original = torch.library.Library.impl

    def impl(self: Any, name: Any, function: Any, dispatch_key: str = "", **named: Any) -> Any:
        key = dispatch_key or self.dispatch_key
        if key in ("CUDA", "CompositeExplicitAutograd") and isinstance(name, str) and callable(function):
            PYTHON[f"{self.ns}::{name.rpartition('::')[2]}"] = function
        return original(self, name, function, dispatch_key, **named)

    torch.ops._vllm_fa3_C.get_scheduler_metadata = get_scheduler_metadata
    torch.library.Library.impl = impl  # type: ignore[method-assign]


def get_scheduler_metadata(batch_size: int, *more: Any, **named: Any) -> Tensor:
    """FlashAttention-3's plan. Its schema has a type that only the library declares, so it is no operator here."""
    return torch.empty(batch_size + 1, dtype=torch.int32, device="cuda")


def weak_ref_tensor(input: Tensor) -> Tensor:
    """A graph's output. It may be read after a replay."""
    graphs.is_output(input)
    return torch.ops.aten.detach.default(input)


def get_cuda_view_from_cpu_tensor(cpu_tensor: Tensor) -> Tensor:
    """Page-locked memory of the host as the device sees it."""
    return torch.empty(cpu_tensor.shape, dtype=cpu_tensor.dtype, device="cuda")


COMPUTES: dict[str, Callable[..., Any]] = {
    "fwd": Attention().fwd,
    "weak_ref_tensor": weak_ref_tensor,
    "get_cuda_view_from_cpu_tensor": get_cuda_view_from_cpu_tensor,
} | peers.OPERATORS


def call(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check the tensors of a call, count it, and return tensors without values."""
    schema = operator._schema
    named = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs
    for name, value in named.items():
        here = not isinstance(value, Tensor) or value.is_cuda or name in ("cpu_tensor", "mem_handle")
        need(here, schema.name, name, "is on the host")
    name = schema.name.partition("::")[2]
    if name in SUPPORTS:
        return SUPPORTS[name]
    if name not in peers.OPERATORS:
        launches[name] += 1
    need(not schema.returns or name in COMPUTES, schema.name, "has no double")
    return COMPUTES[name](**named) if name in COMPUTES else None
