"""A pytest plugin for RL-Kernel's operator contracts: its reference operators compute BF16 operands with our exact ops.

Only where a precision is set. Operands in other dtypes stay with RL-Kernel's own code: a model in exact mode has none.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

BF16 = torch.bfloat16


def pytest_configure(config: pytest.Config) -> None:
    if "JETRL_PRECISION" not in os.environ:
        return
    from rl_engine.kernels.ops.pytorch.activation.swiglu import NativeSwiGLUOp
    from rl_engine.kernels.ops.pytorch.linear.lm_head import NativeLMHeadOp
    from rl_engine.kernels.ops.pytorch.loss.logp import NativeLogpOp
    from rl_engine.kernels.ops.pytorch.norm.rms_norm import NativeRMSNormOp

    _provide(NativeRMSNormOp, "_rms_norm", _rms_norm)
    _provide(NativeSwiGLUOp, "_swiglu", _swiglu)
    _provide(NativeLMHeadOp, "_lm_head", _lm_head)
    _provide(NativeLogpOp, "_selected_logps", _log_probs)


def _provide(owner: Any, name: str, ours: Callable[..., Tensor | None]) -> None:
    """Replace a helper by one of this package, except where ours returns None."""
    raw = owner.__dict__[name]
    theirs = getattr(owner, name)

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = ours(*args, **kwargs)
        return theirs(*args, **kwargs) if found is None else found

    setattr(owner, name, staticmethod(call) if isinstance(raw, staticmethod) else call)


def _rms_norm(x: Tensor, weight: Tensor, *, eps: float, output_dtype: torch.dtype) -> Tensor | None:
    from jetrl_patch.exact.elementwise import rms_norm

    if {x.dtype, weight.dtype, output_dtype} != {BF16} or weight.shape != x.shape[-1:]:
        return None
    return rms_norm(x, weight, eps)


def _swiglu(gate: Tensor, up: Tensor, *, output_dtype: torch.dtype) -> Tensor | None:
    from jetrl_patch.exact.elementwise import silu_mul

    if {gate.dtype, up.dtype, output_dtype} != {BF16} or gate.shape != up.shape:
        return None
    return silu_mul(gate, up)


def _lm_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, compute_dtype: torch.dtype, output_dtype: torch.dtype, **_: Any
) -> Tensor | None:
    from jetrl_patch.exact.logprob import linear

    if {hidden.dtype, weight.dtype, compute_dtype, output_dtype} != {BF16}:
        return None
    return linear(hidden, weight, bias)


def _log_probs(self: Any, logits: Tensor, token_ids: Tensor, *, output_dtype: torch.dtype) -> Tensor | None:
    from jetrl_patch.exact.logprob import token_log_probs

    if logits.shape[:-1] != token_ids.shape:
        return None
    return token_log_probs(logits, token_ids).to(output_dtype)
