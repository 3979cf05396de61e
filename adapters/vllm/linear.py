"""Linears of vLLM that exact mode replaces: row-parallel ones, which round their sum over the ranks once, and routers.

Some models of vLLM build the router of a mixture without the quantization, which then cannot give it rows that are independent.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear, UnquantizedLinearMethod

from jetrl_patch.adapters.vllm.head import ExactLinearMethod
from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod
from jetrl_patch.adapters.vllm.ranks import sum_over_ranks
from jetrl_patch.fp8.carried import Rows

__all__ = ["ExactReplicatedLinear", "ExactRowParallelLinear"]


class ExactRowParallelLinear(RowParallelLinear):
    """Replaces ``RowParallelLinear`` in exact mode. Single-rank runs are unchanged."""

    def forward(self, input_: torch.Tensor | Rows) -> Any:
        """``input_ [..., K / ranks]`` BF16 or quantized -> ``[..., N]`` BF16, the same on every rank."""
        method = self.quant_method
        ours = isinstance(method, (QuantizedLinearMethod, ExactLinearMethod))
        if not ours or self.tp_size == 1 or not self.reduce_results:
            return super().forward(input_)
        if isinstance(input_, Rows):  # of this rank
            output = sum_over_ranks(method.partial_sum(self, input_))
        else:
            if not self.input_is_parallel:
                input_ = input_.chunk(self.tp_size, dim=-1)[self.tp_rank].contiguous()
            partial_MN = method.partial_sum(self, input_.reshape(-1, input_.shape[-1]))
            output = sum_over_ranks(partial_MN).view(*input_.shape[:-1], -1)
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
