"""Fused norms and activations in a model: only the number of quantizations changes."""

from __future__ import annotations

import copy

import pytest
import torch
import triton

from jetrl_patch.backends import get_backend
from jetrl_patch.exact import dispatch, modules
from jetrl_patch.fp8 import fused, producers
from jetrl_patch.fp8.convert import swap_linears
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.kernels import quantize

from ..fp8.thresholds import sqnr
from ..models import build

assert triton.knobs.runtime.interpret
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
IDS = torch.tensor([[5, 17, 200, 31, 8, 9, 301], [7, 7, 300, 12, 4, 99, 2]])


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Use the Triton ops, not the C kernels, and enable fusion."""
    monkeypatch.setitem(dispatch._chosen, "cpu", "triton")
    monkeypatch.setattr(producers, "available", lambda backend, device_type: True)


@pytest.fixture
def quantized(monkeypatch):
    """The shapes of activations quantized in a separate launch."""
    shapes = []
    original = quantize.quantize_rows
    monkeypatch.setattr(quantize, "quantize_rows", lambda x, *a, **k: shapes.append(tuple(x.shape)) or original(x, *a, **k))
    return shapes


@pytest.fixture
def both(monkeypatch):
    """The shapes of output gradients quantized in a separate launch."""
    shapes = []
    original = quantize.quantize_both
    monkeypatch.setattr(quantize, "quantize_both", lambda x, *a, **k: shapes.append(tuple(x.shape)) or original(x, *a, **k))
    return shapes


def models(family: str, scale_format: str = "pow2", layers: int = 1, **options):
    """The same FP8 model twice: unfused, with the exact operations, and fused."""
    plain = build(family, num_hidden_layers=layers, **options).train()
    swap_linears(plain, scale_format=scale_format, backend="triton")
    ours = copy.deepcopy(plain)
    names = fused.fuse(ours, "triton", "cuda")
    for name in names:
        module = plain.get_submodule(name)
        modules.swap(module, modules.ExactMLP if name.endswith("mlp") else modules.ExactNorm)
    return plain, ours, names


def run(model):
    for parameter in model.parameters():
        parameter.grad = None
    out = model(input_ids=IDS, use_cache=False).logits
    (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "scale_format", "options"),
    [
        ("qwen2", "fp32", {}),
        pytest.param("qwen3", "pow2", {"layers": 2}, marks=pytest.mark.slow),
        pytest.param("llama", "pow2", {"intermediate_size": 200, "mlp_bias": True}, marks=pytest.mark.slow),
    ],
)
def test_outputs_and_gradients_are_the_same(family, scale_format, options, quantized, both):
    plain, ours, names = models(family, scale_format, **options)
    leaves, layers = ("input_layernorm", "post_attention_layernorm", "mlp"), len(ours.model.layers)
    assert sorted(names) == sorted(f"model.layers.{i}.{leaf}" for i in range(layers) for leaf in leaves)
    expected = run(plain)
    separate, gradients = len(quantized), len(both)
    assert gradients == layers * 7
    assert separate == layers * 4  # of a block's forward: before q, o, gate and down (backward writes both layouts at once)
    out, grads = run(ours)
    assert len(quantized) - separate == layers * 1  # before o
    assert len(both) - gradients == layers * 5  # not those of gate and up
    assert torch.equal(out, expected[0])
    for name, grad in expected[1].items():
        assert grad is not None and torch.equal(grads[name], grad), name


CHANGES = {
    "a hook that changes it": lambda grad: grad * 2,
    "a hook that changes it in place": lambda grad: grad.mul_(2),
    "a hook that looks": lambda grad: None,
}


def gated(scale_format="pow2"):
    """gate, up and down of a small MLP, and a call with or without quantized gradients."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(128, 128, bias=i == 0).bfloat16() for i in range(3))
    for layer in layers:
        layer.__class__, layer.fp8 = Fp8Linear, Fp8State(scale_format, "triton")

    def call(quantize_gradients, hook=None):
        layers.zero_grad()
        x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        gate, up = layers[0](x), layers[1](x)
        if hook is not None:
            gate.register_hook(hook)
        layers[2](producers.silu_mul(gate, up, layers[2].fp8, quantize_gradients)).sum().backward()
        return [x.grad, *(p.grad for p in layers.parameters())]

    return layers, call


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_a_gradient_that_was_changed_is_quantized_again(change, both):
    """The layer's backward reads the gradient that a hook returns."""
    _, call = gated()
    expected = call(False, CHANGES.get(change))
    before = len(both)
    found = call(True, CHANGES.get(change))
    assert before == 3 and len(both) - before == (2 if "changes" in str(change) else 1)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_bytes_that_nobody_takes_are_dropped(both):
    layers, call = gated()
    layers[1].weight.requires_grad_(False)  # a layer that computes DGrad alone, and asks for its bytes all the same
    expected, found = call(False), call(True)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_only_layers_that_read_them_get_quantized_gradients():
    layer, state = gated()[0][0], Fp8State("pow2", "triton")
    assert fused._has_both_gradients(layer, state)
    assert not fused._has_both_gradients(layer, Fp8State("fp32", "triton"))
    assert not fused._has_both_gradients(layer, Fp8State("pow2", "deep_gemm"))
    assert not fused._has_both_gradients(torch.nn.Linear(2, 2), state)
    layer.weight.requires_grad_(False)
    assert not fused._has_both_gradients(layer, state)


def test_exact_mode_fuses_norms_and_activations(quantized, monkeypatch):
    plain, _, names = models("qwen3")
    ours = copy.deepcopy(plain)
    assert fused.fuse(ours, "triton", "cuda") == names and len(names) == 3
    assert fused.fuse(ours, "triton", "cuda") == []  # a second time changes nothing
    out, expected = run(plain)
    separate = len(quantized)
    for left_to_the_ops in (False, True):
        if left_to_the_ops:
            for name in ("rms_norm", "silu_mul"):
                monkeypatch.setattr(producers, name, lambda *_: None)
        before = len(quantized)
        found, grads = run(ours)
        assert len(quantized) - before == (separate if left_to_the_ops else 1)  # before o alone
        assert torch.equal(found, out) and all(torch.equal(grads[name], grad) for name, grad in expected.items())


@pytest.mark.slow
def test_near_what_transformers_computes():
    plain = build("qwen3", num_hidden_layers=1).train()
    swap_linears(plain, backend="triton")
    ours = copy.deepcopy(plain)
    fused.fuse(ours, "triton", "cuda")
    (a, grads_a), (b, grads_b) = run(plain), run(ours)
    assert sqnr(b, a) > 25
    assert sqnr(grads_b["model.layers.0.input_layernorm.weight"], grads_a["model.layers.0.input_layernorm.weight"]) > 15


@pytest.mark.slow
def test_checkpointing_and_no_grad_change_nothing():
    _, ours, _ = models("qwen3")
    out, grads = run(ours)
    with torch.no_grad():
        assert torch.equal(ours(input_ids=IDS, use_cache=False).logits, out)
    with torch.inference_mode():
        assert torch.equal(ours(input_ids=IDS, use_cache=False).logits, out)
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again, repeated = run(ours)
    assert torch.equal(again, out) and all(torch.equal(repeated[name], grad) for name, grad in grads.items())


def test_what_the_kernel_does_not_take_is_left_to_transformers():
    """With FP32 master weights or FP32 hidden states, the original modules compute."""
    _, ours, _ = models("qwen3")
    state = Fp8State("pow2", "triton")
    x, w = torch.randn(3, 256), torch.ones(256)
    assert producers.rms_norm(x, w, 1e-6, state) is None and producers.silu_mul(x, x, state) is None
    assert producers.rms_norm(x.bfloat16(), w, 1e-6, state) is None
    assert producers.rms_norm(torch.zeros(1, 16512).bfloat16(), torch.ones(16512).bfloat16(), 1e-6, state) is None
    assert producers.silu_mul(torch.zeros(1, 16512).bfloat16(), torch.zeros(1, 16512).bfloat16(), state) is not None
    untouched = build("qwen3", num_hidden_layers=1)
    module, original = ours.model.layers[0].input_layernorm.float(), untouched.model.layers[0].input_layernorm.float()
    assert torch.equal(module(x), original(x))


def test_what_is_changed_in_place_is_quantized_again(quantized):
    backend = get_backend("triton")
    layer = torch.nn.Linear(256, 64, bias=False).bfloat16()
    x, w = torch.randn(4, 256).bfloat16(), torch.ones(256).bfloat16()
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"q_proj": layer})])})
    swap_linears(model, backend="triton")
    y = producers.rms_norm(x, w, 1e-6, layer.fp8)
    first = layer(y)
    assert quantized == []
    with torch.no_grad():
        y.mul_(2)
    assert not torch.equal(layer(y), first) and quantized == [(4, 256)]
    weight = backend.quantize_weight(layer.weight.detach(), "pow2")
    assert torch.equal(layer(y), backend.gemm(backend.quantize_activation(y.detach(), "pow2"), weight, torch.bfloat16))
