"""What holds in every scale format without square blocks: FProp, a layer and its gradients, and what is refused."""

from __future__ import annotations

import pytest
import torch

from jetrl_patch.backends import get_backend, quantize
from jetrl_patch.config import Config
from jetrl_patch.config.formats import FORMATS
from jetrl_patch.errors import ConfigError, ModelError
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.models.structure import check_structure

from ..models import config_of
from .test_gemm import operands
from .thresholds import NATIVE_EQUALS_ORACLE, SQNR_GEMM, SQNR_UNQUANTIZED, sqnr

BF16 = torch.bfloat16
#: elements that share a scale
WIDTH = {"mxfp8": 32, "nvfp4": 16}
OTHERS = list(WIDTH)
SHAPES = [(1, 32, 32), (5, 64, 320), (33, 320, 1000), (130, 1000, 257), (200, 17, 33), (257, 31, 65)]  # M, N, K
BACKENDS = ["native", "torch"]


def quantized(t):
    """q * s in FP64, from the layout of the scales."""
    return t.q.double() * t.s.double().repeat_interleave(WIDTH[t.scale_format], 1)[:, : t.shape[1]]


def test_every_such_format_is_tried():
    assert [name for name, form in FORMATS.items() if not form.square] == OTHERS


@pytest.mark.parametrize("scale_format", OTHERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fprop(shape, backend, scale_format):
    x, w = operands(*shape)
    b = get_backend(backend)
    wq, xq = b.quantize_weight(w, scale_format), b.quantize_activation(x, scale_format)
    y = b.gemm(xq, wq, BF16)
    assert sqnr(y, x.double() @ w.double().t()) > SQNR_UNQUANTIZED["fprop", scale_format]
    assert sqnr(y, quantized(xq) @ quantized(wq).t()) > SQNR_GEMM
    equal = y == quantize.fprop(*xq, *wq, BF16, block=WIDTH[scale_format])
    assert equal.float().mean() >= NATIVE_EQUALS_ORACLE
    wq.packed = b.pack(wq)
    assert torch.equal(b.gemm(xq, wq, BF16), y)
    for rows in (slice(0, 1), slice(shape[0] // 2, shape[0])):  # a row depends on itself alone
        assert torch.equal(b.fprop(x[rows], wq), y[rows])


@pytest.mark.parametrize("scale_format", OTHERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_has_the_gradients_of_the_three_products(backend, scale_format):
    x, w = operands(40, 96, 160)
    layer = torch.nn.Linear(160, 96, bias=False, dtype=BF16)
    layer.__class__, layer.fp8 = Fp8Linear, Fp8State(scale_format, backend)
    layer.weight.data.copy_(w)
    x.requires_grad_()
    g = torch.randn(40, 96, generator=torch.Generator().manual_seed(1)).to(BF16)
    y = layer(x)
    y.backward(g)
    b = get_backend(backend)
    wq, xq = b.quantize_weight_transposed(w, scale_format), b.quantize_activation(x.detach(), scale_format)
    assert torch.equal(y, b.gemm(xq, wq, BF16))
    assert torch.equal(x.grad, b.dgrad(g, wq, BF16)) and torch.equal(layer.weight.grad, b.wgrad(g, xq, BF16))
    q, s = layer.fp8.quantized(layer.weight)  # what the weight sync sends
    assert torch.equal(q.view(torch.uint8), wq.q.view(torch.uint8)) and torch.equal(s, wq.s)


@pytest.mark.parametrize("scale_format", OTHERS)
def test_a_compiled_layer_computes_the_same(scale_format):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(100, 96, dtype=BF16)
        layer.__class__, layer.fp8 = Fp8Linear, Fp8State(scale_format, "torch")
        x = torch.randn(7, 100, dtype=BF16, requires_grad=True)
        y = (torch.compile(layer, backend="aot_eager") if compiled else layer)(x)
        y.float().square().sum().backward()
        results.append((y, x.grad, layer.weight.grad, layer.bias.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


# ---- What is refused -----------------------------------------------------------------------------

@pytest.mark.parametrize("scale_format", OTHERS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp8-rollout"}, "only an FP8 trainer has it on both sides"),
        ({"precision": "bf16"}, "only an FP8 trainer has it on both sides"),
        ({"backend": "triton"}, "multiplies other blocks"),
        ({"backend": "te"}, "multiplies other blocks"),
        ({"fp8_all_gather": True}, "fp8_all_gather=True"),
    ],
)
def test_settings_that_contradict_it(settings, message, scale_format):
    with pytest.raises(ConfigError, match=message):
        Config(scale_format=scale_format, **settings)


@pytest.mark.parametrize("scale_format", OTHERS)
def test_experts_are_refused(scale_format):
    with pytest.raises(ModelError, match=f"scale_format='{scale_format}' does not quantize experts"):
        check_structure(config_of("qwen3_moe"), Config(scale_format=scale_format))
