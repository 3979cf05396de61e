"""Every Triton kernel with representative arguments, with which the tests compile it for Hopper."""

from __future__ import annotations

from .aot import Spec
from .specs_attention import ATTENTION_ALL, ATTENTION_BACKWARD, CHUNKS, DELTA_NET, LATENT
from .specs_gemm import GEMM_ALL, GEMM_COMMON, GEMM_DGRAD, GEMM_GROUPED, GEMM_GROUPED_WGRAD, GEMM_WGRAD
from .specs_rows import (
    COMBINE,
    DIGEST,
    ELEMENTWISE_ALL,
    HEAD_ALL,
    NORM,
    NORM_BACKWARD,
    NORM_ROWS,
    PLAN,
    QUANTIZE_ALL,
    RANK_SUM,
    ROUTE,
    SILU,
    SILU_BACKWARD,
)

#: every kernel of ``jetrl_patch.kernels`` for Hopper
ALL = (
    *ATTENTION_ALL, *CHUNKS, *ATTENTION_BACKWARD, *DELTA_NET, *DIGEST, *RANK_SUM, *ELEMENTWISE_ALL, *GEMM_ALL, *GEMM_DGRAD,
    *GEMM_WGRAD, *GEMM_COMMON, *GEMM_GROUPED, *GEMM_GROUPED_WGRAD, *HEAD_ALL, *LATENT, *PLAN, *COMBINE, *NORM, *NORM_ROWS,
    *NORM_BACKWARD, *QUANTIZE_ALL, *ROUTE, *SILU, *SILU_BACKWARD,
)  # fmt: skip


def specs() -> dict[str, Spec]:
    """All kernels by name.

    Raises:
        ValueError: two kernels have the same name.
    """
    found: dict[str, Spec] = {}
    for spec in ALL:
        if spec.name in found:
            raise ValueError(f"two kernels are registered as {spec.name}")
        found[spec.name] = spec
    return found
