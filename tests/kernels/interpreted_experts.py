"""The experts of a layer on a GPU, in the interpreter: against a loop over experts, FP64, and the parts of a rollout's ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from jetrl_patch.backends import get_backend
from jetrl_patch.backends.gpu import TritonBackend
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.errors import ModelError
from jetrl_patch.fp8.experts import run_experts
from jetrl_patch.fp8.grouped import Stacks, compare_experts, require_expert_equality, run_grouped
from jetrl_patch.fp8.linear import Promise
from jetrl_patch.fp8.mixture import ExpertSplit, added
from jetrl_patch.kernels import gemm_grouped

from ..fp8.mixture import Layer, matrices_of
from ..fp8.thresholds import SQNR_EXPERTS, sqnr
from .interpreted_grouped import BF16, FP32, rand
from .traffic import Traffic

#: the loop's gradient of the activation has another exponential, which moves a rounding here and there
SQNR_LOOP = 40.0


@pytest.fixture
def loop(monkeypatch):
    """Makes the Triton backend compute expert by expert."""
    return lambda: monkeypatch.setattr(TritonBackend, "grouped", lambda self, x: None)


def gradients(layer):
    y = layer.run()
    g = rand(*y.shape, seed=5)
    return y.detach(), torch.autograd.grad(y, (layer.x, layer.gate_up, layer.down, layer.weights), g)


SIZES = {"hidden": 200, "width": 136}


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "dtype", "scale_format"),
    [(70, 4, 2, BF16, "pow2"), pytest.param(9, 9, 8, FP32, "fp32", marks=pytest.mark.slow)],
)
def test_a_layer_is_the_loop_over_its_experts(tokens, experts, k, dtype, scale_format, loop):
    """Value and gradients: against FP64, and against the products of one expert after the other."""
    layer = Layer(tokens, experts, **SIZES, k=k, dtype=dtype, scale_format=scale_format, backend="triton")
    y, found = gradients(layer)
    sources = (layer.x, layer.gate_up, layer.down, layer.weights)
    exact = [t.detach().double().requires_grad_() for t in sources]
    exact_y = layer.exact(*exact)
    assert sqnr(y, exact_y.detach()) > SQNR_EXPERTS["y"]
    exact_gradients = torch.autograd.grad(exact_y, exact, rand(*y.shape, seed=5).double())
    for name, ours, theirs in zip(("x", "gate_up", "down", "weights"), found, exact_gradients, strict=True):
        assert sqnr(ours, theirs) > SQNR_EXPERTS[name], name
    loop()
    expected_y, expected = gradients(layer)
    assert torch.equal(y, expected_y) and torch.equal(found[2], expected[2])
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert sqnr(ours, theirs) > SQNR_LOOP


def test_a_watch_sees_what_it_sees_in_the_loop(loop):
    """The operands of each product with their experts, row by row; what backward computes differs as the gradients do."""
    found = []
    for prepare in (lambda: None, loop):
        prepare()
        layer, seen = Layer(20, 3, **SIZES, k=2, backend="triton"), {}

        def watch(kind, part, experts_P, take, seen=seen):
            seen[kind, part] = (experts_P, take(torch.arange(len(experts_P))))

        with torch.no_grad():
            layer.own.watch = watch
            layer.run()
        assert layer.own.watch is watch and not seen
        gradients(layer)
        assert layer.own.watch is None
        found.append(seen)
    assert list(found[0]) == list(found[1]) and len(found[0]) == 5
    for (kind, part), (experts, values) in found[0].items():
        others, expected = found[1][kind, part]
        assert torch.equal(experts, others) and values.shape == expected.shape
        assert torch.equal(values, expected) if kind == "activation" else sqnr(values, expected) > SQNR_LOOP


@pytest.mark.slow
def test_a_token_alone_and_among_a_thousand():
    layer = Layer(1001, experts=2, hidden=128, width=64, k=1, backend="triton")
    whole = layer.run().detach()
    for rows in (slice(700, 701), slice(3, 10)):
        assert torch.equal(layer.run(rows), whole[rows])


def test_no_token_at_all():
    layer = Layer(0, 2, **SIZES, k=2, backend="triton")
    y = layer.run()
    assert y.shape == (0, 200)
    grads = torch.autograd.grad(y.sum(), (layer.x, layer.gate_up, layer.down, layer.weights))
    assert all((grad == 0).all() for grad in grads)


def test_gradients_are_the_same_whether_a_tensor_is_wanted_or_not():
    layer = Layer(3, 1, hidden=128, width=64, k=1, backend="triton")
    g = torch.ones(3, 128, dtype=BF16)
    sources = (layer.x, layer.gate_up, layer.down)
    everything = torch.autograd.grad(layer.run(), sources, g)
    for source, expected in zip(sources, everything, strict=True):
        assert torch.equal(torch.autograd.grad(layer.run(), source, g)[0], expected)


def test_the_bytes_are_those_that_a_sync_sends():
    layer = Layer(4, 2, **SIZES, k=2, backend="triton")
    stacks, width = layer.own.stacks(layer.gate_up, layer.down), layer.down.shape[2]
    for name, matrix in layer.own.matrices():
        expert, part = int(name.split(".")[0]), name.split(".")[1]
        half = slice(0, width) if part == "gate_proj" else slice(width, None)
        one = layer.down[expert] if part == "down_proj" else layer.gate_up[expert, half]
        w, s = stacks.down if part == "down_proj" else stacks.gate_up
        index = expert if part == "down_proj" else 2 * expert + (part == "up_proj")
        sent = matrix.fp8.quantized(one)
        assert torch.equal(sent.q.view(torch.uint8), w[index].view(torch.uint8)) and torch.equal(sent.s_blocks, s[index])


def test_held_matrices_are_not_transposed_again(monkeypatch):
    layer = Layer(20, 3, **SIZES, k=2, backend="triton")
    expected, promise = gradients(layer), Promise(gradients=True)
    for state in layer.own.states():
        state.promised(promise)
    monkeypatch.setattr(gemm_grouped, "transposed", None)
    monkeypatch.setattr("jetrl_patch.fp8.linear.PROMISES", {promise})
    for _ in range(2):
        y, found = gradients(layer)
        assert torch.equal(y, expected[0]) and all(torch.equal(a, b) for a, b in zip(found, expected[1], strict=True))


def launches(experts, backward):
    layer = Layer(4, experts, hidden=128, width=64, k=2, backend="triton")
    y = layer.run()
    dy = torch.ones_like(y)
    with Traffic() as seen:
        if backward:
            torch.autograd.grad(y, (layer.x, layer.gate_up, layer.down, layer.weights), dy)
        else:
            layer.run()
    return seen.launches


@pytest.mark.parametrize(("backward", "most"), [(False, 9), (True, 19)])
def test_launches_do_not_grow_with_the_number_of_experts(backward, most):
    few, many = launches(2, backward), launches(5, backward)
    assert few == many <= most


def test_the_trial_passes_here_and_fails_where_rows_depend_on_their_batch(monkeypatch):
    backend = get_backend("triton")
    verdict = compare_experts(backend, 128, 96, "cpu", counts=(0, 3, 25))
    assert verdict.ok, verdict.found

    def by_number(q, s, w, sw, plan, *rest, **options):
        y = gemm_grouped.grouped(q, s, w, sw, plan, *rest, **options)
        return y * (1 + 2**-6) if len(plan.ids) < 20 else y

    def unless_power_of_two(q, s, w, sw, plan, *rest, **options):
        y = gemm_grouped.grouped(q, s, w, sw, plan, *rest, **options)
        return y * 1.5 if not options and (s.view(torch.int32) & 0x7FFFFF).any() else y

    broken = SimpleNamespace(**{name: getattr(gemm_grouped, name) for name in gemm_grouped.__all__} | {"grouped": by_number})
    monkeypatch.setattr(TritonBackend, "grouped", lambda self, x: broken)
    verdict = compare_experts(backend, 128, 96, "cpu", counts=(0, 3, 25))
    assert not verdict.ok and "differ from those among 28" in verdict.found
    broken.grouped = lambda *args, **options: gemm_grouped.grouped(*args, **options) * 1.5
    verdict = compare_experts(backend, 128, 96, "cpu", counts=(0, 3, 25))
    assert not verdict.ok and "differ from the dense product" in verdict.found
    broken.grouped = unless_power_of_two  # of the product for down
    for scale_format in ("pow2", "fp32"):
        assert compare_experts(backend, 128, 96, "cpu", scale_format, (0, 3, 25)).ok == (scale_format == "pow2")


def test_a_machine_that_fails_the_trial_is_refused(monkeypatch):
    gpu = SimpleNamespace(type="cuda")
    backend = SimpleNamespace(name="triton", grouped=lambda x: None)
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)
    with pytest.raises(ModelError, match=r"experts of 768 x 2048 with backend='triton': required grouped FP8.*found none"):
        require_expert_equality(backend, 8, 2, (2048, 768), gpu)
    assert not require_expert_equality(backend, 8, 2, (2048, 768), torch.device("cpu"))


def test_the_sum_of_a_rank_unrounded_and_rounded():
    layer = Layer(9, 3, hidden=128, width=96, k=2, backend="triton")
    kernels = layer.own.backend.grouped(layer.x)
    tokens = layer.own.backend.quantize_activation(layer.x.detach(), "pow2")
    stacks = layer.own.stacks(layer.gate_up, layer.down)
    total, *_ = run_grouped(kernels, tokens, layer.weights.detach(), layer.ids, stacks, part=torch.float32)
    assert total.dtype == FP32 and torch.equal(total.to(BF16), layer.run())
    rounded, *_ = run_grouped(kernels, tokens, layer.weights.detach(), layer.ids, stacks, part=BF16)
    assert rounded.dtype == BF16 and torch.equal(rounded, layer.run())


@pytest.mark.parametrize("by", ["columns", "experts"])
def test_the_trainer_adds_the_parts_that_a_rollouts_ranks_compute(by):
    """Each rank holds half of the matrices. Both are the loop's parts, too."""
    layer = Layer(9, 4, hidden=128, width=256, k=2, backend="triton")
    backend, weights, ids, split = layer.own.backend, layer.weights.detach(), layer.ids, ExpertSplit(2, by)
    kernels, tokens = backend.grouped(layer.x), backend.quantize_activation(layer.x.detach(), "pow2")
    stacks = layer.own.stacks(layer.gate_up, layer.down)
    found, *_ = run_grouped(kernels, tokens, weights, ids, stacks, split)
    (up, up_s), (down, down_s) = stacks
    parts = []
    for rank in range(2):
        if by == "experts":
            two, four = slice(2 * rank, 2 * rank + 2), slice(4 * rank, 4 * rank + 4)
            mine = (up[four], up_s[four]), (down[two], down_s[two])
            own = torch.where(ids // 2 == rank, ids - 2 * rank, -1)
        else:
            at, one, own = slice(128 * rank, 128 * rank + 128), slice(rank, rank + 1), ids
            mine = (up[:, at].contiguous(), up_s[:, one]), (down[:, :, at].contiguous(), down_s[:, :, one])
        mine = Stacks(*(Quantized(q, s, "blocks", "pow2") for q, s in mine))
        parts.append(run_grouped(kernels, tokens, weights, own, mine, part=torch.float32)[0])
    assert found.dtype == BF16 and torch.equal(found, added(torch.stack(parts)))

    loop = run_experts(tokens, weights, ids, matrices_of(stacks), (4, 128), backend, split=split)
    assert torch.equal(found, added(loop))
