"""``Fp8Linear`` as frameworks train it: main gradients, activation checkpointing, compiled graphs, no host sync."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

from jetrl_patch import backends
from jetrl_patch.backends.gpu import GpuBackend
from jetrl_patch.backends.quantize import Regrouped, dequantize_activation, dequantize_weight, fprop
from jetrl_patch.fp8.convert import swap_linears
from jetrl_patch.fp8.gather import Fp8Gathered
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State, keep_gathered_out_of_graphs
from jetrl_patch.kernels.formats import BLOCK
from tests.models import build

from ..waits import NothingIsReadBack
from .thresholds import SQNR_GEMM, sqnr


class PlainGpu(GpuBackend):
    """The code path of the GPU backends with plain FP32 products, on any device."""

    name = "plain-gpu"

    def gemm(self, x, w, out_dtype, splits=1):
        return fprop(*x, w.q, w.s_rows, out_dtype, splits)

    def dgrad_product(self, dy, w, out_dtype):
        w_NK = dequantize_weight(self.transposed(w).t().contiguous(), w.s)
        return (dequantize_activation(*dy) @ w_NK).to(out_dtype)

    def wgrad_product(self, dy, x, out_dtype):
        g, x = (q.float() * s.t().repeat_interleave(BLOCK, 1) for q, s in (dy, x))
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
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.bfloat16  # exists only to run the hooks


def test_main_gradients_of_a_layer_whose_input_needs_none():
    layer, other = make(), make(dtype=torch.float32)
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    with torch.no_grad():
        other.weight.copy_(layer.weight)
    for x, g in batches(1):
        layer(x.detach()).backward(g)
        other(x.detach()).backward(g)
    assert layer.weight.grad is None  # no hook needs a dummy gradient
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


class Gated(nn.Module):
    """Two layers that read the same input, and a third after them."""

    def __init__(self, backend, dtype=torch.bfloat16):
        super().__init__()
        self.gate, self.up = (make(256, 256, dtype=dtype, backend=backend) for _ in range(2))
        self.down = make(256, 256, bias=False, dtype=dtype, backend=backend, splits=2)
        self.up.fp8.inputs = self.gate.fp8.inputs

    def forward(self, x):
        return self.down(self.gate(x) * self.up(x)) + x


def results(model, call, count=2):
    """Outputs and gradients of a few micro-batches."""
    found = []
    for x, g in batches(count, 256, 256):
        y = call(x)
        y.backward(g)
        found += [y.detach(), x.grad]
    return found + [p.grad for p in model.parameters()]


def same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(backend, dtype, reentrant):
    model, other = Gated(backend, dtype), Gated(backend, dtype)
    same(results(model, lambda x: checkpoint(model, x, use_reentrant=reentrant)), results(other, other))


class Counting(PlainGpu):
    """Keeps a weak reference to each operand of WGrad that it makes from a saved input."""

    def __init__(self):
        self.made = []

    def regrouped(self, x):
        operand = super().regrouped(x)
        self.made.append(weakref.ref(operand.q))
        return operand


@pytest.fixture
def counting(monkeypatch):
    backend = Counting()
    monkeypatch.setitem(backends._LOADED, "plain-gpu", backend)
    return backend


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_an_input_is_regrouped_once_for_the_layers_that_read_it(reentrant, counting, monkeypatch):
    calls = {None: lambda m: m, **{kind: lambda m, k=kind: lambda x: checkpoint(m, x, use_reentrant=k) for kind in (True, False)}}
    model, other = Gated("plain-gpu"), Gated("plain-gpu")
    found = results(model, calls[reentrant](model))
    assert len(counting.made) == 2 * 2 and not any(operand() is not None for operand in counting.made)
    monkeypatch.setattr(Regrouped, "get", lambda self, make: make())
    same(found, results(other, other))
    assert len(counting.made) == 2 * 2 + 2 * 3  # without sharing: gate, up and down each


def test_a_pass_that_stops_half_way_leaves_nothing_wrong(counting):
    model = Gated("plain-gpu")
    (x, g), (_, h) = batches(2, 256, 256)
    y = model(x)
    expected = torch.autograd.grad(y, [model.gate.weight, model.up.weight], g, retain_graph=True)
    torch.autograd.grad(y, [model.up.weight], h, retain_graph=True)  # the operand waits for gate
    found = torch.autograd.grad(y, [model.gate.weight, model.up.weight], g, retain_graph=True)
    same(found, expected)
    assert not any(operand() is not None for operand in counting.made)  # although the graph is there for another pass


def test_layers_without_a_weight_gradient_are_not_waited_for(counting):
    model = Gated("plain-gpu")
    model.gate.weight.requires_grad_(False)
    for x, g in batches(1, 256, 256):
        y = model(x)
        y.backward(g)
        assert len(counting.made) == 2 and not any(operand() is not None for operand in counting.made)


@pytest.mark.parametrize("reentrant", [True, False])
def test_main_gradients_under_checkpointing(reentrant):
    totals = []
    for use in (False, True):
        model = Gated("plain-gpu")
        for layer in (model.gate, model.up, model.down):
            layer.weight.main_grad = torch.zeros(layer.weight.shape)
            layer.weight.grad_added_to_main_grad = False
        results(model, lambda x, m=model: checkpoint(m, x, use_reentrant=reentrant)) if use else results(model, model)
        totals.append([layer.weight.main_grad for layer in (model.gate, model.up, model.down)])
    same(*totals)
    assert all(total.any() for total in totals[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_hugging_face(reentrant):
    found = []
    for use in (False, True):
        model = build("qwen2", num_hidden_layers=2)
        swap_linears(model, backend="native")
        model.train()
        if use:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        ids = torch.arange(2, 50).view(2, 24)
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        found.append([out.logits.detach(), *(p.grad for p in model.parameters())])
    same(*found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_compiled_graph_is_whole_and_computes_the_same(backend, dtype):
    model, other = Gated(backend, dtype), Gated(backend, dtype)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    same(results(model, compiled), results(other, other))
    with torch.no_grad():
        (x, _), *_ = batches(1, 256, 256)
        assert torch.equal(compiled(x), other(x))


def test_a_weight_gathered_in_fp8_breaks_the_graph_and_nothing_else():
    model, other = Gated("plain-gpu"), Gated("plain-gpu")
    for layer in (model.gate, model.up, model.down):
        w = layer.fp8.quantized(layer.weight)
        layer.weight = nn.Parameter(Fp8Gathered(w.q, w.s_blocks, torch.bfloat16))
    keep_gathered_out_of_graphs()
    torch._dynamo.reset()
    same(results(model, torch.compile(model, backend="aot_eager")), results(other, other))


@pytest.mark.slow
def test_a_graph_compiled_to_machine_code():
    model, other = Gated("plain-gpu"), Gated("plain-gpu")
    torch._dynamo.reset()
    with torch.no_grad():  # the product between the layers is rounded to BF16 in both
        (x, _), *_ = batches(1, 256, 256)
        assert torch.equal(torch.compile(model, fullgraph=True)(x), other(x))
    grads = results(model, torch.compile(model, fullgraph=True)), results(other, other)
    for a, b in zip(*grads):
        assert torch.equal(a, b) or sqnr(a, b) > SQNR_GEMM


def test_a_compiled_graph_quantizes_a_shared_input_once():
    seen = []

    def count(graph, inputs):
        seen.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    model = Gated("plain-gpu")
    compiled = torch.compile(
        model, backend=aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    )
    compiled(torch.randn(8, 256, dtype=torch.bfloat16, requires_grad=True))
    assert sum("fp8_quantize" in name for name in seen[0]) == 2  # of gate and up together, and of down
    assert sum("fp8_linear" in name for name in seen[0]) == 3


def test_the_rollouts_product_is_one_operator():
    """A compiled rollout sees ``fprop`` as one operator, with the same results."""
    layer = make()
    w = layer.fp8.quantized(layer.weight)
    (x, _), *_ = batches(1)
    x, expected = x.detach(), PlainGpu().fprop(x.detach(), w)
    nodes = []

    def keep(graph, inputs):
        nodes.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    run = torch.compile(lambda t: PlainGpu().fprop(t, w), backend=keep, fullgraph=True)
    assert torch.equal(run(x), expected)
    assert nodes == ["jetrl_patch.fp8_fprop.default"]


@pytest.mark.parametrize("main_grad", [False, True])
def test_nothing_waits_for_the_device(main_grad):
    layer = make()
    if main_grad:
        layer.weight.main_grad, layer.weight.grad_added_to_main_grad = torch.zeros(layer.weight.shape), False
    with NothingIsReadBack():
        for x, g in batches(2):
            layer(x).backward(g)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NothingIsReadBack():
        layer.weight.sum().item()
