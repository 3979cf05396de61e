"""FP8 on a GPU: quantizers bit for bit, every backend's products against the reference, and batch invariance."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.shapes import MODELS, RANKS, SMALL
from jetrl_patch.backends import get_backend, quantize
from jetrl_patch.backends.capability import CHECKS
from jetrl_patch.backends.row_equality import compare_parts, compare_rows
from jetrl_patch.exact import ops
from jetrl_patch.fp8.grouped import compare_experts
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State

from ..dispatched import dispatched
from ..fp8.layer import run_and_compare
from ..fp8.mixture import Layer
from ..fp8.thresholds import SQNR_EXPERTS, SQNR_GEMM, sqnr
from .optional import not_tried

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
FORMATS = ["pow2", "fp32"]
BACKENDS = ["triton", "deep_gemm", "cublaslt"]


@pytest.fixture(params=BACKENDS)
def backend(request, device):
    ok, reason = CHECKS[request.param]()
    if not ok:
        not_tried(request.param, reason)
    return get_backend(request.param)


def rand(device, *shape, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device=device)
    return (x * torch.exp(torch.randn(shape[0], 1, generator=generator, device=device))).to(BF16)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 128), (7, 320), (300, 1024), (4096, 3584)])
def test_quantizers_are_those_of_the_contract(device, backend, shape, scale_format):
    x = rand(device, *shape)
    for name in ("quantize_activation", "quantize_tokens", "quantize_weight"):
        found, expected = getattr(backend, name)(x, scale_format), getattr(quantize, name)(x, scale_format)
        assert torch.equal(found.q.view(torch.uint8), expected.q.view(torch.uint8)), name
        assert torch.equal(found.s, expected.s), name


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", [(4608, 3584), (3584, 18944), (512, 512), (37888, 3584)])
def test_rows_do_not_depend_on_the_batch(device, backend, shape, scale_format):
    verdict = compare_rows(backend, shape, device, scale_format, trained=8200, most=8192)
    if backend.name == "cublaslt" and not verdict.ok:
        pytest.xfail(f"the rollout correctly refuses this backend: {verdict.found}")
    assert verdict.ok, verdict.found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", [SMALL, *MODELS], ids=lambda model: model.name)
def test_rows_do_not_depend_on_what_a_weight_is_fused_with(device, backend, model, ranks):
    """The trial before serving: the tile of a product follows N, which fusing and tensor parallelism change."""
    for (_, *shape), layout in model.layouts(ranks):
        verdict = compare_parts(backend, tuple(shape), layout, device)
        if backend.name == "cublaslt" and not verdict.ok:
            pytest.xfail(f"the rollout correctly refuses this backend: {verdict.found}")
        assert verdict.ok, verdict.found


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("M", [1, 64, 300, 2048])
def test_fprop_against_the_product_of_the_same_bytes(device, backend, M, scale_format):
    x, w = rand(device, M, 1024), rand(device, 768, 1024, seed=1)
    quantized = backend.quantize_weight(w, scale_format)
    y = backend.fprop(x, quantized)
    wide = [
        q.double() * s.double().repeat_interleave(128, 1)
        for q, s in (quantize.quantize_activation(x, scale_format), (quantized.q, quantized.s_rows))
    ]
    assert sqnr(y, wide[0] @ wide[1].t()) > SQNR_GEMM


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize(("hidden", "width"), [(2048, 768), (2048, 1408), (4096, 14336)])
def test_experts_do_not_depend_on_the_batch(device, backend, hidden, width, scale_format):
    verdict = compare_experts(backend, hidden, width, device, scale_format)
    assert verdict.ok, verdict.found


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 128, 8), (700, 60, 4), (4096, 8, 2)])
def test_experts_and_their_gradients(device, backend, tokens, experts, k, scale_format):
    layer = Layer(tokens, experts, hidden=1024, width=768, k=k, scale_format=scale_format, backend=backend.name)
    for name in ("x", "gate_up", "down", "weights"):
        setattr(layer, name, getattr(layer, name).detach().to(device).requires_grad_())
    layer.ids = layer.ids.to(device)
    sources = (layer.x, layer.gate_up, layer.down, layer.weights)
    g = rand(device, tokens, 1024)
    y = layer.run()
    exact = [t.detach().double().requires_grad_() for t in sources]
    expected_y = layer.exact(*exact)
    assert sqnr(y.detach(), expected_y.detach()) > SQNR_EXPERTS["y"]
    names, found = ("x", "gate_up", "down", "weights"), torch.autograd.grad(y, sources, g)
    for name, ours, theirs in zip(names, found, torch.autograd.grad(expected_y, exact, g.double()), strict=True):
        if name != "weights" or tokens > 1:
            assert sqnr(ours, theirs) > SQNR_EXPERTS[name], name


@pytest.mark.parametrize(("experts", "k", "rule"), [(128, 8, None), (60, 4, None), (160, 8, (1, 1, 2.5)), (256, 8, (8, 4, 2.5))])
def test_routes_are_those_of_the_formula(device, experts, k, rule):
    logits = rand(device, 2000, experts).float()
    full = None if rule is None else ops.Sigmoid(torch.linspace(-0.1, 0.1, experts, device=device), *rule)
    with dispatched("auto", "cuda"):
        weights, ids = ops.route(logits, k, True, full)
    with dispatched("torch", "cuda"):
        expected, expected_ids = ops.route(logits, k, True, full)
    assert torch.equal(ids, expected_ids) and torch.equal(weights, expected)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_a_linear_layer_and_its_gradients(device, backend, scale_format):
    torch.manual_seed(0)
    layer = nn.Linear(1024, 768, device=device, dtype=BF16)
    layer.__class__ = Fp8Linear
    layer.fp8 = Fp8State(scale_format, backend.name)
    x = torch.randn(3, 170, 1024, device=device, requires_grad=True)
    g = torch.randn(3, 170, 768, device=device).to(BF16)
    run_and_compare(layer, x, g, scale_format)
