"""What cuBLASLt is given for the linears of published models, in every number of tokens: no product that torch refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from jetrl_patch.backends.cublaslt import CublasLtBackend
from jetrl_patch.backends.gpu import TritonBackend
from jetrl_patch.kernels.formats import FP8

from . import scaled_mm_double

#: (N, K) of a model's linears
WIDTHS = {
    "SmolLM2-135M": [(576, 576), (192, 576), (1536, 576), (576, 1536)],
    "Qwen2.5-0.5B": [(896, 896), (128, 896), (4864, 896), (896, 4864)],
    "DeepSeek-V3": [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384), (7168, 18432), (2048, 7168)],
    "Qwen3-Next-80B": [(12288, 2048), (64, 2048), (2048, 4096), (512, 2048), (2048, 512)],
    "one of eight ranks of Qwen2.5-7B": [(576, 3584), (3584, 448), (4736, 3584), (3584, 2368)],
}
TOKENS = (1, 7, 100, 128, 129, 4096)


@pytest.mark.parametrize("model", WIDTHS)
def test_published_models(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """On tensors without values. The scales are laid out as the kernels write them."""
    products = []

    def checked(a, b, *scales, output_dtype):  # type: ignore[no-untyped-def]
        scaled_mm_double.check(a, b, *scales, output_dtype)
        products.append((a.shape[0], b.shape[1]))
        return a.new_empty(a.shape[0], b.shape[1], dtype=output_dtype)

    monkeypatch.setattr(F, "scaled_mm", checked)
    monkeypatch.setattr("jetrl_patch.backends.gpu.check_cublaslt", lambda: (True, "CUDA 13.0"))
    for backend in (CublasLtBackend(), TritonBackend()):
        monkeypatch.setattr(type(backend), "quantizers", lambda self, x: None)
        for N, K in WIDTHS[model]:
            w = backend.quantize_weight(torch.empty(N, K, dtype=torch.bfloat16, device="meta"), "pow2")
            w.transposed = torch.empty(K, N, dtype=FP8, device="meta")
            for M in TOKENS:
                x, dy = (torch.empty(M, width, dtype=torch.bfloat16, device="meta") for width in (K, N))
                quantized = backend.quantize_activation(x, "pow2")
                if backend.name == "cublaslt":
                    backend.gemm(quantized, w, torch.bfloat16)
                dx, dw = backend.gradients(dy, quantized, w, (torch.bfloat16, torch.bfloat16))
                assert dx is not None and dw is not None and (dx.shape, dw.shape) == ((M, K), (N, K))
    assert len(products) == len(WIDTHS[model]) * len(TOKENS) * (3 + 2)  # Triton's own FProp is not cuBLASLt's
