"""``Fp8Linear`` in training as frameworks run it: main gradients, checkpointing, compiled graphs, no waiting on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jetrl_patch.fp8 import backends
from jetrl_patch.fp8.backends.gpu import GpuBackend
from jetrl_patch.fp8.formats import BLOCK
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.fp8.quantize import dequantize_activation, dequantize_weight
from jetrl_patch.fp8.reference import fprop


class PlainGpu(GpuBackend):
    """The code path of the GPU backends with plain FP32 products, on any device."""

    name = "plain-gpu"

    def gemm(self, q_MK, s_MG, w_NK, s_NG, out_dtype, splits=1):
        return fprop(q_MK, s_MG, w_NK, s_NG, out_dtype, splits)

    def dgrad_product(self, g_MN, s_MG, w_NK, s_blocks, out_dtype):
        return (dequantize_activation(g_MN, s_MG) @ dequantize_weight(w_NK, s_blocks)).to(out_dtype)

    def wgrad_product(self, g_NM, sg, x_KM, sx, out_dtype):
        g, x = (q.float() * s.t().repeat_interleave(BLOCK, 1) for q, s in ((g_NM, sg), (x_KM, sx)))
        return (g @ x.t()).to(out_dtype)


@pytest.fixture(autouse=True)
def plain_gpu(monkeypatch):
    monkeypatch.setitem(backends._LOADED, "plain-gpu", PlainGpu())


BACKENDS = ["native", "torch", "plain-gpu"]


def make(K=256, N=128, bias=True, dtype=torch.bfloat16, backend="plain-gpu", splits=1):
    torch.manual_seed(0)
    layer = nn.Linear(K, N, bias=bias).to(dtype)
    layer.__class__ = Fp8Linear
    layer.fp8 = Fp8State("pow2", backend, splits)
    return layer


def batches(count, K=256, N=128, M=96):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x, g = (torch.randn(M, width, generator=generator).to(torch.bfloat16) for width in (K, N))
        yield x.requires_grad_(), g


@pytest.mark.parametrize("backend", BACKENDS)
def test_main_gradients_are_fp32_sums(backend):
    reference, layer = make(dtype=torch.float32, backend=backend), make(backend=backend)
    with torch.no_grad():
        reference.weight.copy_(layer.weight)
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    layer.weight.grad_added_to_main_grad = False
    total, inputs = torch.zeros(layer.weight.shape), []
    for x, g in batches(3):
        layer(x).backward(g)
        assert layer.weight.grad_added_to_main_grad
        other = x.detach().clone().requires_grad_()
        reference.weight.grad = None
        reference(other).backward(g)
        total += reference.weight.grad
        inputs.append(torch.equal(x.grad, other.grad))
    assert torch.equal(layer.weight.main_grad, total) and all(inputs)
    assert not torch.equal(total, total.to(torch.bfloat16).float())
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.bfloat16  # only there to run the hooks


def test_main_gradients_of_a_layer_whose_input_needs_none():
    layer, other = make(), make(dtype=torch.float32)
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    with torch.no_grad():
        other.weight.copy_(layer.weight)
    for x, g in batches(1):
        layer(x.detach()).backward(g)
        other(x.detach()).backward(g)
    assert layer.weight.grad is None  # nobody asked for a stand-in
    assert torch.equal(layer.weight.main_grad, other.weight.grad)


def test_zeros_are_returned_where_the_framework_adds_them():
    layer = make()
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    layer.weight.grad_added_to_main_grad, layer.weight.zero_out_wgrad = False, True
    for x, g in batches(2):
        layer(x).backward(g)
    assert not layer.weight.grad.any() and layer.weight.main_grad.any()


@pytest.mark.parametrize("kind", ["bfloat16", "fsdp"])
def test_other_main_gradients_are_left_to_the_framework(kind):
    layer, plain = make(), make()
    layer.weight.main_grad = torch.zeros(layer.weight.shape, dtype=torch.bfloat16 if kind == "bfloat16" else None)
    layer.weight.grad_added_to_main_grad = False
    if kind == "fsdp":
        layer.weight.__fsdp_param__ = True
    for x, g in batches(1):
        layer(x).backward(g)
        plain(x).backward(g)
    assert not layer.weight.grad_added_to_main_grad and not layer.weight.main_grad.any()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
