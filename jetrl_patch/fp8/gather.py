"""FP8 all-gather for FSDP2: ``Fp8Linear`` weights travel as FP8 bytes and block scales, about half the traffic of BF16.

Each rank quantizes its shard once per update (or before each gather if a compiled graph updates it), from the BF16 value as the
layer would, and the layer computes with the gathered bytes. No shard cuts a block of 128 rows, so bytes and scales equal those of
the whole weight. Master weights, optimizer, gradients and checkpoints see the full-precision shard. ``fsdp_pre_all_gather`` and
``fsdp_post_all_gather`` are FSDP2's extension point for such tensors.

Shape legend: N output features, K input features, G = ceil(K / 128), n = N / ranks.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from jetrl_patch.backends import get_backend
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.kernels.formats import FP8

_aten = torch.ops.aten
#: operators whose result is an ``Fp8Shard`` again, as is every view
_KEPT = {
    _aten.clone.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
}
#: operators that FSDP2 applies to a gathered weight before the layer reads it
_SAME_VALUE = {_aten.detach.default, _aten.alias.default, _aten.as_strided.default}


class _Writes:
    """The writes to the memory that a tensor and its views share: their number, and whether there may be uncounted ones.

    A compiled graph such as ``torch.compile(optimizer.step)`` unwraps the plain tensor once, when it is traced. From then on it
    writes without an operator and without a count. If inductor compiled it, ``_version`` does not change either.
    """

    count, uncounted = 0, False


class Fp8Shard(torch.Tensor):
    """A full-precision weight [N, K], or a shard of it [n, K], that FSDP2 gathers in FP8.

    Every other operation works on the plain tensor inside. Writes are counted here, because the ``_version`` of a tensor inside a
    DTensor does not advance. It pickles as a plain tensor.
    """

    plain: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, plain: Tensor, *settings: Any) -> Fp8Shard:
        like = {"dtype": plain.dtype, "layout": plain.layout, "device": plain.device}
        place = {"strides": plain.stride(), "storage_offset": plain.storage_offset()}
        shard: Fp8Shard = torch.Tensor._make_wrapper_subclass(cls, plain.size(), **place, **like)
        return shard

    def __init__(
        self, plain: Tensor, scale_format: ScaleFormat, backend_name: str, writes: _Writes | None = None
    ) -> None:
        self.plain, self.scale_format, self.backend_name = plain, scale_format, backend_name
        self.writes = _Writes() if writes is None else writes
        self._cached: tuple[int, Quantized] | None = None

    def quantized(self) -> Quantized:
        """e4m3 [n, K] and block scales [ceil(n/128), G], computed once after each write, or every time if a graph may write."""
        if self._cached is None or self._cached[0] != self.writes.count or self.writes.uncounted:
            w = self.plain.detach().to(torch.bfloat16).contiguous()
            self._cached = self.writes.count, get_backend(self.backend_name).quantize_weight(w, self.scale_format)
        return self._cached[1]

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """This rank's contribution: its bytes and its scales."""
        q, s_blocks = self.quantized()
        return (q.view(torch.uint8), s_blocks), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight. ``out`` is the previous result, in whose memory FSDP2 has gathered again."""
        q_bytes, s_blocks = gathered
        if out is None:
            return Fp8Gathered(q_bytes.view(FP8), s_blocks, param_dtype), (q_bytes, s_blocks)
        if not isinstance(out, Fp8Gathered) or out.q.data_ptr() != q_bytes.data_ptr():
            raise ModelError(
                "FSDP2 gathered an FP8 weight into a buffer that the layer does not read. Set fp8_all_gather=False."
            )
        return None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, cls))
        for t in pytree.tree_leaves(_written(func, args, kwargs)):
            if isinstance(t, cls):
                t.writes.count += 1
        out = func(*pytree.tree_map_only(cls, _plain, args), **pytree.tree_map_only(cls, _plain, kwargs))
        if func.is_view or func in _KEPT:
            writes = first.writes if func.is_view else None
            return pytree.tree_map_only(
                Tensor, lambda t: cls(t, first.scale_format, first.backend_name, writes or _Writes()), out
            )
        return return_and_correct_aliasing(func, args, kwargs, out) if func._schema.is_mutable else out

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        self.writes.uncounted = True  # a graph unwraps the plain tensor
        return ["plain"], (self.scale_format, self.backend_name)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> Fp8Shard:
        return cls(inner["plain"], *context)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.detach().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Fp8Shard({self.plain!r}, {self.scale_format})"


class Fp8Gathered(torch.Tensor):
    """A weight [N, K] of which only bytes and scales exist. Only ``Fp8Linear`` can read it."""

    q: Tensor
    s_blocks: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, q: Tensor, s_blocks: Tensor, dtype: torch.dtype) -> Fp8Gathered:
        made: Fp8Gathered = torch.Tensor._make_wrapper_subclass(
            cls, q.size(), strides=q.stride(), dtype=dtype, device=q.device
        )
        return made

    def __init__(self, q: Tensor, s_blocks: Tensor, dtype: torch.dtype) -> None:
        self.q, self.s_blocks = q, s_blocks

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight = args[0]
        if func in _SAME_VALUE and (len(args) == 1 or tuple(args[1]) == tuple(weight.shape)):
            return cls(weight.q, weight.s_blocks, weight.dtype)
        if func is _aten.zeros_like.default:  # the gradient of a layer that the step did not use
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        what, found = "a weight gathered in FP8", f"the operator {func}"
        fix = "keep the layer in BF16 with exclude=, or set fp8_all_gather=False"
        raise ModelError(explain(what, required="Fp8Linear as its only reader", found=found, fix=fix))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["q", "s_blocks"], self.dtype

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> Fp8Gathered:
        return cls(inner["q"], inner["s_blocks"], context)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Fp8Gathered({tuple(self.shape)})"


_plain = operator.attrgetter("plain")


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes to."""
    return [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
