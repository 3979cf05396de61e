"""A stand-in for vLLM's FP8 kernel on CPUs, which needs a processor with AMX: the same product in plain torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def product(kernels: ModuleType) -> Any:
    """A kernel class for block FP8; ``calls`` counts its products.

    Args:
        kernels: ``vllm.model_executor.kernels.linear``.
    """

    class Plain(kernels.CPUFp8BlockScaledMMKernel):  # type: ignore[name-defined,misc]
        calls = 0

        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        def process_weights_after_loading(self, layer):
            pass

        def apply_weights(self, layer, x, bias=None, **_):
            Plain.calls += 1
            params = self._get_layer_params(layer)
            assert params.weight.dtype == torch.float8_e4m3fn
            scale = params.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
            N, K = params.weight.shape
            weight = (params.weight.float() * scale[:N, :K]).to(x.dtype)
            return torch.nn.functional.linear(x, weight, bias)

    return Plain
