"""Experts in FP8: a token's bits in any batch, gradients against FP64, saved tensors, errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from jetrl_patch.backends.row_equality import Verdict
from jetrl_patch.errors import ModelError
from jetrl_patch.exact import ops
from jetrl_patch.fp8 import grouped
from jetrl_patch.fp8.experts import experts_forward
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.fp8.mixture import groups_of

from ..dispatched import dispatched
from .mixture import BF16, Layer
from .thresholds import SAVED_BYTES_RATIO, SQNR_EXPERTS, SQNR_EXPERTS_BF16, sqnr


@pytest.fixture(params=["native", "torch"])
def backend(request):
    with dispatched(request.param):
        yield request.param


@pytest.mark.parametrize(("hidden", "width"), [(256, 128), (320, 200), (128, 96)])
def test_a_token_has_the_same_bits_in_every_company(backend, hidden, width):
    layer = Layer(150, hidden=hidden, width=width, backend=backend)
    whole = layer.run()
    assert whole.dtype == BF16 and whole.abs().mean() > 0.1
    for rows in (slice(0, 1), slice(149, 150), slice(3, 10), slice(40, 72)):
        assert torch.equal(layer.run(rows), whole[rows])
    order = torch.randperm(150, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer.run(order), whole[order])


def test_one_token_or_a_thousand_at_its_expert():
    layer = Layer(1001, experts=4, hidden=256, width=128, k=1)
    layer.ids = torch.zeros(1001, 1, dtype=torch.int64)
    alone = layer.run(slice(700, 701))
    assert torch.equal(layer.run()[700:701], alone)
    layer.ids = torch.arange(1001)[:, None] % 4
    layer.ids[700] = 0
    assert torch.equal(layer.run()[700:701], alone)


def test_the_order_in_which_a_token_lists_its_experts_does_not_count():
    layer = Layer(64)
    whole = layer.run()
    turned = torch.tensor([2, 0, 1])
    again = experts_forward(layer.x, layer.gate_up, layer.down, layer.weights[:, turned], layer.ids[:, turned], layer.own)
    assert torch.equal(again, whole)


def test_an_expert_is_three_linear_layers():
    """The same bytes and products as ``Fp8Linear``: with one expert of weight 1, only the last rounding is the mixture's."""
    layer = Layer(33, experts=1, k=1)
    parts = (layer.gate_up[0, :200], layer.gate_up[0, 200:], layer.down[0])

    def linear(weight):
        made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=BF16)
        made.weight.data.copy_(weight.detach())
        made.__class__, made.fp8 = Fp8Linear, Fp8State("pow2", "native")
        return made

    gate, up, down = map(linear, parts)
    assert torch.equal(layer.run(), down(ops.silu_mul(gate(layer.x), up(layer.x))))
    names = dict(layer.own.matrices())
    assert list(names) == ["0.gate_proj", "0.up_proj", "0.down_proj"]
    for made, name in ((gate, "0.gate_proj"), (up, "0.up_proj"), (down, "0.down_proj")):
        ours, theirs = names[name].fp8.quantized(made.weight), made.fp8.quantized(made.weight)
        assert torch.equal(ours.q.view(torch.uint8), theirs.q.view(torch.uint8)) and torch.equal(ours.s_blocks, theirs.s_blocks)


def test_the_sum_runs_over_ascending_experts_in_fp32_and_is_rounded_once():
    layer = Layer(40)
    backend = layer.own.backend
    rows = []
    for t in range(40):
        total = torch.zeros(320)
        for expert, weight in sorted(zip(layer.ids[t].tolist(), layer.weights[t].tolist(), strict=True)):
            w = layer.own.quantized(expert, layer.gate_up, layer.down)
            a, b = (backend.fprop(layer.x.detach()[t : t + 1], m) for m in (w.gate, w.up))
            out = backend.fprop(ops.silu_mul(a, b), w.down, torch.float32)
            total = total + torch.tensor(weight) * out[0]
        rows.append(total.to(BF16))
    assert torch.equal(layer.run(), torch.stack(rows))


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("tokens", [1, 37, 400])
def test_value_and_gradients(backend, scale_format, dtype, tokens):
    layer = Layer(tokens, dtype=dtype, scale_format=scale_format, backend=backend)
    g = torch.randn(tokens, 320, generator=torch.Generator().manual_seed(5)).to(BF16)
    sources = (layer.x, layer.gate_up, layer.down, layer.weights)
    y = layer.run()
    found = torch.autograd.grad(y, sources, g)
    assert [t.dtype for t in found] == [dtype, dtype, dtype, torch.float32]
    exact = [t.detach().double().requires_grad_() for t in sources]
    expected_y = layer.exact(*exact)
    expected = torch.autograd.grad(expected_y, exact, g.double())
    assert sqnr(y.detach(), expected_y.detach()) > SQNR_EXPERTS["y"]
    for name, ours, theirs in zip(("x", "gate_up", "down", "weights"), found, expected, strict=True):
        if name != "weights" or tokens > 1:
            assert sqnr(ours, theirs) > SQNR_EXPERTS[name], name


def test_an_expert_without_a_token_has_a_gradient_of_zero():
    layer = Layer(20, experts=5, k=2)
    layer.ids = torch.tensor([[0, 3]]).expand(20, 2).clone()
    gate_up, down = torch.autograd.grad(layer.run(), (layer.gate_up, layer.down), torch.ones(20, 320, dtype=BF16))
    for grad in (gate_up, down):
        assert (grad[[1, 2, 4]] == 0).all() and grad[0].abs().sum() > 0 and grad[3].abs().sum() > 0


def test_gradients_where_the_tokens_need_none():
    layer, found = Layer(20), []
    for x in (layer.x, layer.x.detach()):
        layer.x = x
        found.append(torch.autograd.grad(layer.run(), (layer.gate_up, layer.down), torch.ones(20, 320, dtype=BF16)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_no_token_at_all():
    layer = Layer(0)
    y = layer.run()
    assert y.shape == (0, 320)
    assert all((grad == 0).all() for grad in torch.autograd.grad(y.sum(), (layer.gate_up, layer.down)))


def test_what_is_saved():
    """Less than 0.55 of what transformers' own grouped form saves, and no weight but the parameters themselves."""
    layer = Layer(512, experts=4, hidden=256, width=128, k=2)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer.run()
    parameters = {layer.gate_up.data_ptr(), layer.down.data_ptr()}
    activations = sum(t.nbytes for t in saved if t.data_ptr() not in parameters)
    assert len(parameters & {t.data_ptr() for t in saved}) == 2
    pairs = 512 * 2
    # tokens of each pair, gate and up, SiLU, product, weighted product and output, in BF16
    stock = pairs * 2 * (256 + 2 * 128 + 128 + 128 + 256)
    assert activations / stock < SAVED_BYTES_RATIO


def test_gradients_are_the_same_whether_a_tensor_is_wanted_or_not():
    layer = Layer(50)
    g = torch.ones(50, 320, dtype=BF16)
    everything = torch.autograd.grad(layer.run(), (layer.x, layer.gate_up, layer.down), g)
    for source, expected in zip((layer.x, layer.gate_up, layer.down), everything, strict=True):
        assert torch.equal(torch.autograd.grad(layer.run(), source, g)[0], expected)


def test_an_index_beyond_the_experts():
    layer = Layer(5)
    layer.ids[3, 1] = 6
    with pytest.raises(ModelError, match="required indices below 6, found 6"):
        layer.run()


def test_a_watch_sees_the_operands_of_every_product_once():
    """Row by row with their experts, as a test forms them: expert by expert, tokens ascending."""
    layer, seen = Layer(40), {}

    def watch(kind, part, experts_P, take):
        seen[kind, part] = (experts_P.tolist(), take(torch.arange(len(experts_P))))

    layer.own.watch = watch
    with torch.no_grad():
        layer.run()
    Layer(0).run()
    assert layer.own.watch is watch and not seen
    dy = torch.randn(40, 320, generator=torch.Generator().manual_seed(5)).to(BF16)
    layer.run().backward(dy)
    expected: dict = {key: [] for key in seen}
    backend, experts = layer.own.backend, []
    for group in groups_of(layer.ids, 6):
        experts += [group.expert] * len(group.tokens)
        w = layer.own.quantized(group.expert, layer.gate_up, layer.down)
        x, g = layer.x.detach()[group.tokens], dy[group.tokens]
        a, b = (backend.fprop(x, m).requires_grad_() for m in (w.gate, w.up))
        h = ops.silu_mul(a, b)
        u = backend.dgrad(g, w.down, torch.float32)
        weight = layer.weights.detach()[group.tokens, group.slots, None]
        da, db = torch.autograd.grad(h, (a, b), (weight * u).to(BF16))
        rows = {("activation", "gate_proj"): x, ("activation", "down_proj"): h}
        rows |= {("gradient", "gate_proj"): da, ("gradient", "up_proj"): db, ("gradient", "down_proj"): g}
        assert rows.keys() == seen.keys()
        for key, value in rows.items():
            expected[key].append(value.detach())
    for key, (found, values) in seen.items():
        assert found == experts and torch.equal(values, torch.cat(expected[key])), key
    layer.run()
    assert layer.own.watch is None


class Plain(Layer):
    """The same experts after they left FP8."""

    def __init__(self, tokens, exact=True, **options):
        super().__init__(tokens, **options)
        self.own.to_bf16(exact)


def test_experts_in_bf16_have_the_same_bits_in_every_company(backend):
    layer = Plain(150, backend=backend)
    whole = layer.run()
    assert whole.dtype == BF16 and not torch.equal(whole, Layer(150, backend=backend).run())
    for rows in (slice(0, 1), slice(149, 150), slice(3, 10), slice(40, 72), torch.arange(149, -1, -1)):
        assert torch.equal(layer.run(rows), whole[rows])
    rows = []
    for t in range(150):
        total, x = torch.zeros(320), layer.x.detach()[t : t + 1]
        for expert, weight in sorted(zip(layer.ids[t].tolist(), layer.weights[t].tolist(), strict=True)):
            a, b = (ops.linear(x, layer.gate_up[expert, at]) for at in (slice(0, 200), slice(200, None)))
            total = total + torch.tensor(weight) * ops.partial_sum(ops.silu_mul(a, b), layer.down[expert])[0]
        rows.append(total.detach().to(BF16))
    assert torch.equal(whole, torch.stack(rows))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_value_and_gradients_in_bf16(dtype, exact):
    layer = Plain(100, exact=exact, dtype=dtype)
    g = torch.randn(100, 320, generator=torch.Generator().manual_seed(5)).to(BF16)
    sources = (layer.x, layer.gate_up, layer.down, layer.weights)
    y = layer.run()
    found = torch.autograd.grad(y, sources, g)
    exactly = [t.detach().double().requires_grad_() for t in sources]
    expected_y = layer.exact(*exactly)
    expected = torch.autograd.grad(expected_y, exactly, g.double())
    assert [t.dtype for t in found] == [dtype, dtype, dtype, torch.float32]
    for ours, theirs in zip((y, *found), (expected_y, *expected), strict=True):
        assert sqnr(ours.detach(), theirs.detach()) > SQNR_EXPERTS_BF16


def test_experts_that_left_fp8_keep_no_bytes():
    layer = Layer(20)
    layer.run()
    assert any(state._cached is not None for state in layer.own.states())
    layer.own.to_bf16(True)
    assert not list(layer.own.states()) and not list(layer.own.matrices())


def test_the_trial_runs_while_vllm_loads(monkeypatch):
    """Inside the load torch's default dtype is BF16, and the memory comes from vLLM's own pool, where torch frees no cache."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("torch cannot empty its cache inside a pool"))
    monkeypatch.setattr(grouped, "compare_experts", lambda *_: Verdict(True, ""))
    monkeypatch.setattr(grouped, "_PROVEN", set())
    torch.set_default_dtype(BF16)
    try:
        device = torch.device("meta")
        monkeypatch.setattr(grouped, "compare_routes", lambda *_, own=grouped.compare_routes: own(8, 2, torch.device("cpu")))
        backend = SimpleNamespace(name="triton", grouped=lambda x: object())
        assert grouped.require_expert_equality(backend, 8, 2, (256, 128), device)
    finally:
        torch.set_default_dtype(torch.float32)
