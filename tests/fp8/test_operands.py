"""Every backend that can run here refuses mismatched operands before it reads any memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jetrl_patch.backends import get_backend, quantize
from jetrl_patch.backends.cublaslt import CublasLtBackend
from jetrl_patch.backends.deep_gemm import DeepGemmBackend
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.native import ops

BACKENDS = {
    "native": lambda: get_backend("native"),
    "torch": lambda: get_backend("torch"),
    "cublaslt": CublasLtBackend,
    "deep_gemm": lambda: object.__new__(DeepGemmBackend),  # never calls its library
}


def operands():
    q, s = quantize.quantize_activation(torch.randn(3, 256).to(torch.bfloat16), "pow2")
    w, blocks = quantize.quantize_weight(torch.randn(64, 256), "pow2")
    return q, s, w, quantize.expand_weight_scale(blocks, 64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda q, s, w, t: (q.float(), s, w, t), TypeError, "X: expected torch.float8_e4m3fn .* found torch.float32"),
        (lambda q, s, w, t: (q, s, w, t.double()), TypeError, "W: .* found .* torch.float64"),
        (lambda q, s, w, t: (q, s[:, :1], w, t), ValueError, r"X: \[3, 256\] needs scales of shape .* found \[3, 1\]"),
        (lambda q, s, w, t: (q, s, w, t[:1]), ValueError, r"W: \[64, 256\] .* found \[1, 2\]"),
        (lambda q, s, w, t: (q[:, :128], s[:, :1], w, t), ValueError, "inputs of width 256, .*found width 128"),
        (lambda q, s, w, t: (q, s, w.to("meta"), t.to("meta")), ValueError, "on one device, found cpu, meta"),
        (lambda q, s, w, t: (q, s, w, t, torch.float16), TypeError, "found torch.float16"),
    ],
)
def test_fprop_refuses(backend, change, error, match):
    arguments = change(*operands())
    out = arguments[4:] or (torch.bfloat16,)
    x, w = (Quantized(*arguments[i : i + 2], "rows", "pow2") for i in (0, 2))
    with pytest.raises(error, match=match):
        BACKENDS[backend]().gemm(x, w, *out)


def layer(backend="native", K=256, N=64):
    made = nn.Linear(K, N, dtype=torch.bfloat16)
    made.__class__ = Fp8Linear
    made.fp8 = Fp8State("pow2", backend)
    return made


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_layer_with_the_wrong_width_says_so(backend):
    with pytest.raises(ValueError, match=r"inputs of width 256, .*found width 128"):
        layer(backend)(torch.randn(3, 128))


def test_a_weight_that_is_elsewhere():
    with pytest.raises(TypeError, match="weight: expected a CPU tensor, found one on meta"):
        layer().to("meta")(torch.randn(3, 256))
    with pytest.raises(TypeError, match=r"expected a CPU .* on meta"):
        layer()(torch.randn(3, 256, device="meta"))
    with pytest.raises(ValueError, match="on one device, found cpu, meta"):
        layer("torch").to("meta")(torch.randn(3, 256))


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_odd_shapes_and_strides_are_taken(backend):
    made = layer(backend)
    x = torch.randn(256, 3).t()
    assert torch.equal(made(x), made(x.contiguous()))
    assert made(torch.randn(256)).shape == (64,) and made(torch.randn(0, 256)).shape == (0, 64)
    assert layer(backend, K=7, N=3)(torch.randn(5, 7)).shape == (5, 3)


def test_the_c_kernels_are_told_no_wrong_size():
    x = torch.zeros(4, 256, dtype=torch.bfloat16)
    for call in (
        lambda: ops.bf16_gemm(x, x[:, :128], torch.bfloat16),
        lambda: ops.rms_norm(x, x[0, :9], 1e-6),
        lambda: ops.silu_mul(x, x[:2]),
        lambda: ops.dequantize(x.to(torch.float8_e4m3fn), torch.ones(4, 1), 1, 128, torch.bfloat16),
    ):
        with pytest.raises(ValueError, match="expected shape"):
            call()
