"""Modules of a Megatron-Core model that compute as the exact rollout does.

Parameters have the names of Megatron's TransformerEngine layers (``linear_qkv.layer_norm_weight``, ...), so both bridges convert
checkpoints. Each class is bound to a ``Run`` before Megatron builds it.

A column-parallel layer splits the rows of W, so each element of Y is one rank's alone and has the rollout's bits. A row-parallel
layer adds FP32 sums in rank order (``fp8.parallel``). Hidden states are [T, B, H]: T tokens of B sequences, or one packed row.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn

from jetrl_patch.adapters.megatron.exchange import HeadExchange
from jetrl_patch.exact import ops
from jetrl_patch.exact.modules import ExactRotary
from jetrl_patch.fp8.linear import Fp8State, fp8_linear
from jetrl_patch.fp8.mixture import WHOLE, ExpertSplit
from jetrl_patch.fp8.parallel import RowRanks


class Places(NamedTuple):
    """cos and sin [T, 1, D] of the tokens of a packed row, and how ranks exchange them for heads (None: they hold all)."""

    cos: Tensor
    sin: Tensor
    exchange: HeadExchange | None


class Positions(ExactRotary):
    """The positions of a packed row's tokens, looked up in the rollout's table. All layers of a pass share the last result."""

    def __init__(self, text_config: Any) -> None:
        self.config = text_config
        self._of: weakref.ref[Tensor] | None = None
        self._places: Places | None = None

    def places(self, cu_seqlens: Tensor, query: Tensor, group: Any) -> Places:
        """Args: where the sequences begin, int [S + 1]; the rank's queries [t, h, D]; the context-parallel ranks, or None."""
        if self._places is None or self._of is None or self._of() is not cu_seqlens:
            exchange = None if group is None else HeadExchange(group, cu_seqlens, len(query))
            total = len(query) * (1 if group is None else dist.get_world_size(group))
            at = torch.arange(total, device=query.device)
            begins = cu_seqlens[torch.searchsorted(cu_seqlens, at, right=True) - 1]
            cos, sin = self.forward(query, at - begins)
            self._of, self._places = weakref.ref(cu_seqlens), Places(cos.unsqueeze(1), sin.unsqueeze(1), exchange)
        return self._places


class Routing(NamedTuple):
    """How a token's experts are chosen (``exact.route``).

    Attributes:
        renormalize: whether their weights add up to 1.
        groups, kept, scale: as in ``Sigmoid``, for routers with a correction bias; no groups for all others.
    """

    renormalize: bool = True
    groups: int = 0
    kept: int = 0
    scale: float = 1.0


SOFTMAX = Routing()


@dataclass(frozen=True)
class Run:
    """What the layers of a model need to know.

    Attributes:
        scale_format, backend: as in ``Fp8State``.
        rollout_tp: tensor-parallel size of the rollout, a multiple of the trainer's.
        positions: those of the last packed row.
        fp8_cache: whether the rollout rounds keys and values to FP8.
        fp32_head: whether logits are FP32.
        experts: how the rollout splits experts. routing: how it chooses a token's.
        latent_scale: of the scores of latent attention.
    """

    scale_format: Any
    backend: str
    rollout_tp: int
    positions: Positions = field(repr=False)
    fp8_cache: bool = False
    fp32_head: bool = False
    experts: ExpertSplit = WHOLE
    routing: Routing = SOFTMAX
    latent_scale: float = 1.0


def bound(kind: type, run: Run) -> type:
    """A class like ``kind`` whose instances belong to ``run``, because Megatron's constructors have arguments of their own.

    Megatron-Bridge looks up by the name of a class how to convert its parameters, so it has the name of its counterpart there.
    """
    return type(kind.counterpart, (kind,), {"run": run, "__module__": kind.__module__})  # type: ignore[attr-defined]


class Norm(nn.Module):
    """RMSNorm of queries, of keys, or after the last layer: [..., K] -> BF16 [..., K]."""

    def __init__(self, hidden_size: int, config: Any, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = _norm_weight(hidden_size, config)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


def matrix(config: Any, *shape: int) -> nn.Parameter:
    """A parameter with Megatron's initial values, on the default device: whoever builds the model moves it to its own."""
    weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
    if config.perform_initialization:
        config.init_method(weight)
    return weight


def whole_matrix(config: Any, *shape: int) -> nn.Parameter:
    """The same, for a weight that each rank holds whole and multiplies by its own tokens."""
    weight = matrix(config, *shape)
    weight.sequence_parallel = config.sequence_parallel  # Megatron then adds its ranks' gradients
    return weight


def _norm_weight(size: int, config: Any, device: Any = None) -> nn.Parameter:
    """Ones, on the default device: whoever builds the model moves it to its own."""
    weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=device))
    weight.sequence_parallel = config.sequence_parallel  # Megatron then adds its ranks' gradients
    return weight


class Column(ColumnParallelLinear):
    """A column-parallel FP8 layer: [T, B, K] (or this rank's tokens of it) -> BF16 [T, B, N / ranks]."""

    counterpart: ClassVar[str] = "TEColumnParallelLinear"
    run: ClassVar[Run]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fp8 = Fp8State(self.run.scale_format, self.run.backend)

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """The bias is part of the result, because the rollout adds it to each layer's rounded product."""
        return self.product(whole_sequence(self, input_)), None

    def product(self, x: Tensor) -> Tensor:
        """All tokens [T, B, K] -> BF16 [T, B, N / ranks]."""
        return fp8_linear(x, self.weight, self.bias, self.fp8)


class NormColumn(Column):
    """RMSNorm before a column-parallel layer, as ``TELayerNormColumnParallelLinear``."""

    counterpart = "TELayerNormColumnParallelLinear"

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(input_size, config, self.weight.device)
        self.eps = config.layernorm_epsilon

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return super().forward(ops.rms_norm(input_, self.layer_norm_weight, self.eps))


class HeadsColumn(NormColumn):
    """``linear_qkv`` of heads narrower than an FP8 block: [queries, key, value] of one group of heads after another.

    In the checkpoint all queries come first, then all keys, then all values, and a block holds rows of neighbors in that order.
    So the product is computed in that order.
    """

    order: Tensor
    back: Tensor

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        per_group = config.num_attention_heads // config.num_query_groups + 2
        rows = torch.arange(len(self.weight), device=self.weight.device).view(-1, per_group, config.kv_channels)
        order = torch.cat([part.flatten() for part in (rows[:, :-2], rows[:, -2], rows[:, -1])])
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("back", order.argsort(), persistent=False)

    def product(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[self.order]
        return fp8_linear(x, self.weight[self.order], bias, self.fp8)[..., self.back]


def whole_sequence(layer: Any, x: Tensor) -> Tensor:
    """The input of a column-parallel layer on all of its ranks. The backward pass adds their gradients."""
    if layer.sequence_parallel:
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=layer.tp_group)
    return copy_to_tensor_model_parallel_region(x, group=layer.tp_group)


class Row(RowParallelLinear):
    """A row-parallel FP8 layer: [T, B, K / ranks] -> BF16 [T, B, N], or this rank's tokens of it."""

    counterpart: ClassVar[str] = "RowParallelLinear"
    run: ClassVar[Run]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ranks = dist.get_world_size(self.tp_group)
        shared = RowRanks(self.tp_group, self.sequence_parallel) if ranks > 1 else None
        self.fp8 = Fp8State(self.run.scale_format, self.run.backend, self.run.rollout_tp // ranks, ranks=shared)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """The bias comes back apart, for Megatron to add. No family of exact mode has one here."""
        return fp8_linear(input_, self.weight, None, self.fp8), self.bias


class GatedMLP(MLP):
    """Megatron's MLP with the rollout's SiLU(gate) * up."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        gate_up, _none = self.linear_fc1(hidden_states)
        return self.linear_fc2(ops.silu_mul(*gate_up.chunk(2, -1)))


class Attention(nn.Module):
    """Megatron's core attention: rotates queries and keys by the rollout's tables, then attends with its kernel.

    Megatron's own rotation is off (``spec.settings``), because it rounds elsewhere.
    """

    counterpart: ClassVar[str] = "DotProductAttention"
    run: ClassVar[Run]

    def __init__(
        self, config: Any, *_: Any, softmax_scale: float | None = None, pg_collection: Any = None, **__: Any
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.group = context_ranks(config, pg_collection)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *_: Any, packed_seq_params: Any, **__: Any
    ) -> Tensor:
        """Heads [T, h, D] of a packed row, or of this rank's part of it -> BF16 [T, 1, h D]."""
        cu_seqlens = boundaries(packed_seq_params)
        cos, sin, exchange = self.run.positions.places(cu_seqlens, query, self.group)
        q, k, v = (query, key, value) if exchange is None else map(exchange.to_heads, (query, key, value))
        q, k = (_rotated(heads, cos, sin) for heads in (q, k))
        attended = ops.attention_varlen(q, k, v, cu_seqlens, self.scale, self.run.fp8_cache)
        if exchange is not None:
            attended = exchange.to_tokens(attended)
        return attended.reshape(query.shape[0], 1, -1)


def context_ranks(config: Any, pg_collection: Any) -> Any:
    """The group of ranks that each hold a part of every sequence; None if there is only one."""
    return None if config.context_parallel_size == 1 else pg_collection.cp


def boundaries(packed_seq_params: Any) -> Tensor:
    """Where the sequences of a packed row begin, int [S + 1]. Each has its own padding at its end."""
    padded: Tensor | None = packed_seq_params.cu_seqlens_q_padded
    return packed_seq_params.cu_seqlens_q if padded is None else padded


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [T, h, D], of which the first R numbers are rotated by cos and sin [T, 1, R]."""
    width = cos.shape[-1]
    low, high = heads[..., :width].chunk(2, -1)
    rotated = heads[..., :width] * cos + torch.cat((-high, low), -1) * sin
    return rotated if width == heads.shape[-1] else torch.cat((rotated, heads[..., width:]), -1)


class Head(ColumnParallelLinear):
    """``output_layer``: logits [T, B, V / ranks] with independent rows. ``spec.finish`` swaps it in after the model is built."""

    counterpart: ClassVar[str] = "ColumnParallelLinear"
    run: ClassVar[Run]

    def forward(self, input_: Tensor, weight: Tensor | None = None, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """``weight`` is that of the embedding, if the two are tied."""
        product = ops.head_linear_fp32 if self.run.fp32_head else ops.linear
        return product(whole_sequence(self, input_), self.weight if weight is None else weight), None
