"""Linears of vLLM that the plugin replaces: row-parallel ones, which round their sum over the ranks once, and routers.

vLLM rounds each rank's partial sum to BF16 before its all-reduce, which may add in any order. Here the partial sums stay
FP32: every rank gathers all of them, adds them in rank order and rounds once. The trainer accumulates over the same
splits of K.

Some models of vLLM build the router of a mixture without the quantization, which then cannot give it rows that are independent.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear, UnquantizedLinearMethod

from jetrl_patch.adapters.vllm.head import ExactLinearMethod
from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod

__all__ = ["ExactReplicatedLinear", "JetrlRowParallelLinear"]


class JetrlRowParallelLinear(RowParallelLinear):
    """Replaces ``RowParallelLinear``. Other quantizations and single-rank runs are unchanged."""

    def forward(self, input_: torch.Tensor) -> Any:
        """``input_ [..., K / ranks]`` BF16 -> ``[..., N]`` BF16, the same on every rank."""
        method = self.quant_method
        ours = isinstance(method, (QuantizedLinearMethod, ExactLinearMethod))
        if not ours or self.tp_size == 1 or not self.reduce_results:
            return super().forward(input_)
        if not self.input_is_parallel:
            input_ = input_.chunk(self.tp_size, dim=-1)[self.tp_rank].contiguous()
        partial_MN = method.partial_sum(self, input_.reshape(-1, input_.shape[-1]))
        parts_RMN = tensor_model_parallel_all_gather(partial_MN.unsqueeze(0), dim=0)
        total_MN = parts_RMN[0]
        for part_MN in parts_RMN[1:]:
            total_MN = total_MN + part_MN
        output = total_MN.to(input_.dtype).view(*input_.shape[:-1], -1)
        if self.bias is not None and not self.skip_bias_add:
            output = output + self.bias
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None


class ExactReplicatedLinear(ReplicatedLinear):
    """Replaces ``ReplicatedLinear`` in exact mode: one that no quantization has seen gets independent rows too."""

    quant_method: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.quant_method) is UnquantizedLinearMethod:
            self.quant_method = ExactLinearMethod()
