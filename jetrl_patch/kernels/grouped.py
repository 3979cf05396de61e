"""The kernels of a mixture's experts: each takes all experts in one launch, whatever their number.

| kernel            | in                                     | out                                   |
| plan              | experts of each token                  | the sorted pairs                      |
| grouped           | rows, a stack of matrices              | FProp; with turned matrices, DGrad    |
| silu_mul_quantize | gate and up of each pair               | their product in FP8                  |
| combine           | an output for each pair, weights       | a row for each token                  |
| pair_backward     | gradients of a pair's output           | those of gate, up and its weight      |
| group_tokens, ... | gradients and saved rows of each pair  | WGrad's operands, grouped by expert   |
| grouped_wgrad     | these                                  | dW [E, N, K]                          |
"""

from __future__ import annotations

from jetrl_patch.kernels.combine import combine, pair_backward
from jetrl_patch.kernels.gemm_dgrad import turned
from jetrl_patch.kernels.gemm_grouped import block_view, grouped
from jetrl_patch.kernels.gemm_grouped_wgrad import group_tokens, grouped_wgrad, regroup
from jetrl_patch.kernels.plan import Plan, plan
from jetrl_patch.kernels.quantize import quantize_rows
from jetrl_patch.kernels.silu import silu_mul_quantize_rows

__all__ = [
    "Plan",
    "block_view",
    "combine",
    "group_tokens",
    "grouped",
    "grouped_wgrad",
    "pair_backward",
    "plan",
    "quantize_rows",
    "regroup",
    "silu_mul_quantize_rows",
    "turned",
]
