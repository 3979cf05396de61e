"""A mixture of experts in a Megatron-Core model that computes as the exact rollout does.

Megatron's own experts cannot: they multiply by the routing weight before the second product, the rollout after it. Here a rank
holds whole experts (``expert_tensor_parallel_size=1``): all of them, or a range, and then ranks exchange tokens
(``fp8.expert_ranks``). Parameters have the names of Megatron's grouped MLP (``experts.linear_fc1.weight3``), which both bridges
convert.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from megatron.core.parallel_state import (
    get_expert_data_parallel_rank,
    get_expert_model_parallel_group,
    get_tensor_model_parallel_group,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.core.utils import make_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from jetrl_patch.adapters.megatron.layers import Column, GatedMLP, Row, Run, bound, matrix, whole_matrix
from jetrl_patch.exact import ops
from jetrl_patch.fp8.expert_ranks import ExpertRanks, ranked_experts_forward
from jetrl_patch.fp8.experts import Experts, experts_forward


class Router(nn.Module):
    """Chooses experts: tokens [T, H] -> logits [T, E], weights FP32 [T, k] and experts int64 [T, k]."""

    counterpart: ClassVar[str] = "TopKRouter"
    run: ClassVar[Run]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = whole_matrix(config, config.num_moe_experts, config.hidden_size)
        self.chosen = config.moe_router_topk

    def forward(self, tokens_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = ops.linear(tokens_TH, self.weight)
        return logits_TE, *ops.route(logits_TE, self.chosen, self.run.routing.renormalize)


class SigmoidRouter(Router):
    """The same by the sigmoid of FP32 logits, a correction bias and groups. The bias stays as the checkpoint has it, in FP32."""

    expert_bias: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("expert_bias", torch.zeros(config.num_moe_experts))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.expert_bias = self.expert_bias.float()  # Megatron makes the built model BF16, and loads the checkpoint after that
        return self

    def forward(self, tokens_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = self.run.routing
        rule = ops.Sigmoid(self.expert_bias, own.groups, own.kept, own.scale)
        logits_TE = ops.head_linear_fp32(tokens_TH, self.weight)
        return logits_TE, *ops.route(logits_TE, self.chosen, own.renormalize, rule)


class _GradientOf(torch.autograd.Function):
    """Return a tensor unchanged, and let the backward pass reach ``other`` too, with zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.zeros = torch.zeros_like(other)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        return grad_outputs[0], ctx.zeros


class Balance(TopKRouter):
    """Megatron's load-balancing loss and z-loss of a router's logits. Its weights and its choice of experts are not used.

    Megatron attaches these losses to a router's output: they are no part of the loss, and the backward pass adds their gradients.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config, pg_collection=get_default_pg_collection())
        del self.weight

    @staticmethod
    def is_on(config: Any) -> bool:
        """Whether a configuration has one of these losses."""
        balances = config.moe_router_load_balancing_type != "none" and config.moe_aux_loss_coeff
        return bool(balances or config.moe_z_loss_coeff)

    def forward(self, logits_TE: Tensor, weights_Tk: Tensor) -> Tensor:
        """The routing weights, with the gradients of the losses behind them."""
        return _GradientOf.apply(weights_Tk, self.routing(logits_TE.float().unsqueeze(1))[0])


class Matrices(nn.Module):
    """One matrix of each expert, under Megatron's names ``weight0``, ``weight1``, …"""

    counterpart: ClassVar[str]
    dim: ClassVar[int]

    def __init__(self, config: Any, count: int, *shape: int) -> None:
        super().__init__()
        for expert in range(count):
            weight = matrix(config, *shape)
            weight.allreduce = False  # Megatron then adds its gradients over the ranks that hold the same experts
            # as TransformerEngine marks it; otherwise the gradients' norm would miss what the optimizer shards to other ranks
            set_tensor_model_parallel_attributes(weight, True, self.dim, 1)
            self.register_parameter(f"weight{expert}", weight)

    def stacked(self) -> Tensor:
        """[E, …]"""
        return torch.stack(list(self.parameters()))


class GateUp(Matrices):
    """gate and up of each expert, [2I, H]."""

    counterpart, dim = "TEColumnParallelGroupedLinear", 0


class Down(Matrices):
    """down of each expert, [H, I]."""

    counterpart, dim = "TERowParallelGroupedLinear", 1


class Grouped(nn.Module):
    """The experts of a layer."""

    def __init__(self, config: Any, run: Run) -> None:
        super().__init__()
        shared = config.expert_model_parallel_size > 1
        self.ranks = ExpertRanks(get_expert_model_parallel_group(), config.num_moe_experts) if shared else None
        count = config.num_moe_experts if self.ranks is None else self.ranks.each
        inner, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.linear_fc1 = bound(GateUp, run)(config, count, 2 * inner, hidden)
        self.linear_fc2 = bound(Down, run)(config, count, hidden, inner)
        self.jetrl_experts = Experts(count, run.scale_format, run.backend, run.experts)

    def forward(self, tokens_TH: Tensor, weights_Tk: Tensor, ids_Tk: Tensor) -> Tensor:
        """BF16 [T, H]."""
        routes, own = (weights_Tk, ids_Tk), self.jetrl_experts
        if self.ranks is None:
            return experts_forward(tokens_TH, self.linear_fc1.stacked(), self.linear_fc2.stacked(), *routes, own)
        gate_up, down = (list(matrices.parameters()) for matrices in (self.linear_fc1, self.linear_fc2))
        return ranked_experts_forward(tokens_TH, gate_up, down, *routes, own, self.ranks)


class Shared(GatedMLP):
    """The experts that see every token, in one MLP [T, B, H] -> BF16 [T, B, H], which tensor-parallel ranks split."""

    def __init__(self, config: Any, run: Run) -> None:
        own = copy.copy(config)
        own.ffn_hidden_size = config.moe_shared_expert_intermediate_size
        parts = MLPSubmodules(linear_fc1=bound(Column, run), linear_fc2=bound(Row, run))
        super().__init__(own, parts, ffn_hidden_size=own.ffn_hidden_size, tp_group=get_tensor_model_parallel_group())


class Mixture(nn.Module):
    """In place of Megatron's ``MoELayer``: hidden states [T, B, H] -> BF16 [T, B, H], and no bias."""

    counterpart: ClassVar[str] = "Mixture"
    run: ClassVar[Run]

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.router = bound(SigmoidRouter if self.run.routing.groups else Router, self.run)(config)
        self.balance = Balance(config) if Balance.is_on(config) else None
        self.experts = Grouped(config, self.run)
        shares = bool(config.moe_shared_expert_intermediate_size)
        self.shared_experts = Shared(config, self.run) if shares else None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        tokens_TH = hidden_states.flatten(0, -2)
        logits_TE, weights_Tk, ids_Tk = self.router(tokens_TH)
        if self.balance is not None and self.training and torch.is_grad_enabled():
            weights_Tk = self.balance(logits_TE, weights_Tk)
        found = self.experts(tokens_TH, weights_Tk, ids_Tk).view_as(hidden_states)
        return found if self.shared_experts is None else found + self.shared_experts(hidden_states)[0], None

    def set_layer_number(self, number: int) -> None:
        """Megatron says which layer of the model this is, under which it collects a loss."""
        if self.balance is not None:
            self.balance.layer_number = number

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For a checkpoint, in which each expert has its number in the layer. Ranks with the same experts are replicas."""
        found = sharded_state_dict_default(self.router, f"{prefix}router.", sharded_offsets, metadata)
        if (shared := self.shared_experts) is not None:
            found |= shared.sharded_state_dict(f"{prefix}shared_experts.", sharded_offsets, metadata)
        ranks, replica = self.experts.ranks, (0, 0, get_expert_data_parallel_rank())
        for name in ("linear_fc1", "linear_fc2"):
            own = f"{prefix}experts.{name}.weight"
            for number, weight in enumerate(getattr(self.experts, name).parameters()):
                key = f"{own}{number if ranks is None else ranks.held[number]}"
                found[f"{own}{number}"] = make_sharded_tensor_for_checkpoint(
                    weight, key, prepend_offsets=sharded_offsets, replica_id=replica
                )
        return found
