"""The kernels of a mixture's experts in the interpreter: against the dense products, the loop over experts, and FP64.

``test_grouped.py`` runs this in its own process, because ``TRITON_INTERPRET=1`` must be set before triton is imported.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton

from jetrl_patch.errors import ModelError
from jetrl_patch.exact.route import Sigmoid, _formula
from jetrl_patch.fp8 import expert_trial, quantize, reference
from jetrl_patch.fp8.backends import get_backend
from jetrl_patch.fp8.backends.triton import TritonBackend
from jetrl_patch.fp8.expert_trial import compare_experts
from jetrl_patch.fp8.experts import Operands, run_experts
from jetrl_patch.fp8.grouped import Stacks, run_grouped
from jetrl_patch.fp8.mixture import weighted_sums
from jetrl_patch.fp8.quantize import expand_weight_scale
from jetrl_patch.fp8.ranks import ExpertSplit, added
from jetrl_patch.kernels import gemm_dgrad, gemm_wgrad, grouped
from jetrl_patch.kernels.gemm import fprop
from jetrl_patch.kernels.plan import ROWS
from jetrl_patch.kernels.quantize import quantize_rows, quantize_tokens, quantize_weight
from jetrl_patch.kernels.requantize import requantize_tokens
from jetrl_patch.kernels.route import route

from ..fp8.test_experts import Layer
from ..fp8.thresholds import SQNR_EXPERTS, SQNR_GEMM, SQNR_KERNEL_FP32, sqnr
from .interpreted_gemm import exact_dot  # noqa: F401  # a fixture for every test here
from .traffic import Traffic

assert triton.knobs.runtime.interpret

BF16, FP32 = torch.bfloat16, torch.float32
LEAST = {BF16: SQNR_GEMM, FP32: SQNR_KERNEL_FP32}
#: the loop's gradient of the activation has another exponential, which moves a rounding here and there
SQNR_LOOP = 40.0
#: tokens of each expert
COUNTS = (1, 0, 127, 129)
#: N and K, scales, dtype of the result
CASES = [((128, 256), "pow2", BF16), ((200, 129), "fp32", FP32), ((70, 320), "pow2", FP32)]


def rand(*shape, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def routes(counts=COUNTS):
    """One expert a token, in random order."""
    ids = torch.repeat_interleave(torch.tensor(counts))
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))][:, None]


def chosen(T, k, E, seed=0):
    """k different experts of E for each of T tokens, in random order."""
    return torch.rand(T, E, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :k].contiguous()


def stack(S, N, K, scale_format="pow2"):
    return quantize_weight(rand(S, N, K, seed=S, scale=K**-0.5), scale_format)


def dense(operand, matrix, out_dtype):
    (q, s), (w, blocks) = operand, matrix
    return fprop(q, s, w, quantize.expand_weight_scale(blocks, w.shape[0]), out_dtype)


@pytest.mark.parametrize(("T", "k", "E"), [(257, 1, 4), (40, 8, 9), (1, 1, 3), (3, 2, 40), (700, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_plan_sorts_pairs_by_expert(T, k, E, dtype):
    ids = chosen(T, k, E).to(dtype)
    plan = grouped.plan(ids, E)
    flat = ids.flatten().long()
    assert torch.equal(plan.order.long(), torch.argsort(flat, stable=True))
    assert torch.equal(plan.order[plan.place.long()].long(), torch.arange(T * k))
    counts = torch.bincount(flat, minlength=E)
    assert plan.offsets.tolist() == [0, *counts.cumsum(0).tolist()]
    for table, size in ((plan.tiles, ROWS), (plan.groups, 128)):
        expected = [
            [e, int(start) + i, int(min(start + i + size, start + n))]
            for e, (start, n) in enumerate(zip(plan.offsets.tolist(), counts.tolist(), strict=False))
            for i in range(0, n, size)
        ]
        total = int(table.first[-1])
        assert total == len(expected) <= len(table.entries) and table.entries[:total].tolist() == expected
        assert table.first.tolist() == [0, *(-(-counts // size)).cumsum(0).tolist()]


@pytest.mark.parametrize(("shape", "scale_format", "out_dtype"), CASES)
def test_rows_are_those_of_the_dense_product(shape, scale_format, out_dtype):
    (N, K), ids = shape, routes()
    x, (w, s) = quantize_rows(rand(len(ids), K), scale_format), stack(2 * len(COUNTS), N, K, scale_format)
    plan = grouped.plan(ids, len(COUNTS))
    y = grouped.grouped(*x, w, s, plan, out_dtype, tokens=True)[plan.place.long()]
    assert y.shape == (len(ids), 2 * N) and y.dtype == out_dtype
    for expert, count in enumerate(COUNTS):
        rows = ids[:, 0] == expert
        assert rows.sum() == count
        for half in (0, 1):
            found, m = y[rows, half * N : (half + 1) * N], 2 * expert + half
            assert torch.equal(found, dense([t[rows] for t in x], (w[m], s[m]), out_dtype))


def test_eight_experts_a_token():
    ids, (w, s) = chosen(33, 8, 9), stack(9, 130, 128)
    x = quantize_rows(rand(33, 128), "pow2")
    plan = grouped.plan(ids, 9)
    y = grouped.grouped(*x, w, s, plan, tokens=True)[plan.place.long()].view(33, 8, 130)
    by_position = grouped.grouped(*(t[plan.order.long() // 8] for t in x), w, s, plan)
    assert torch.equal(by_position[plan.place.long()].view(33, 8, 130), y)
    for t, j in ((0, 0), (5, 7), (32, 3)):
        m = int(ids[t, j])
        assert torch.equal(y[t, j : j + 1], dense([q[t : t + 1] for q in x], (w[m], s[m]), BF16))


def test_a_row_among_a_thousand_of_its_expert():
    x, (w, s) = quantize_rows(rand(1000, 200), "pow2"), stack(3, 64, 200)
    alone = [t[700:701] for t in x]
    expected = grouped.grouped(*alone, w, s, grouped.plan(torch.tensor([[1]]), 3), FP32)
    for experts in (torch.ones(1000, 1, dtype=torch.int64), torch.arange(1000)[:, None] % 3):
        plan = grouped.plan(experts.roll(1 - int(experts[700]), 0), 3)
        assert plan.ids[700] == 1
        y = grouped.grouped(*x, w, s, plan, FP32, tokens=True)[plan.place.long()]
        assert torch.equal(y[700:701], expected)


def test_layouts_change_nothing():
    ids, (w, s) = routes((1, 0, 40, 70)), stack(4, 140, 200)
    q, sx = quantize_rows(rand(len(ids), 200), "fp32")
    plan = grouped.plan(ids, 4)
    y = grouped.grouped(q, sx, w, s, plan, tokens=True)
    columns = quantize_rows(rand(len(ids), 200), "fp32", columns=True)
    assert columns[1].stride(0) == 1 and torch.equal(grouped.grouped(*columns, w, s, plan, tokens=True), y)
    per_row = s.repeat_interleave(128, 1)[:, :140].contiguous()
    assert torch.equal(grouped.block_view(per_row), s) and not grouped.block_view(per_row).is_contiguous()
    assert torch.equal(grouped.grouped(q, sx, w, grouped.block_view(per_row), plan, tokens=True), y)


@pytest.mark.parametrize("shape", [(128, 256), (200, 129)])
def test_a_stack_is_quantized_and_turned_matrix_by_matrix(shape):
    w = rand(3, *shape)
    q, s = quantize_weight(w.float(), "pow2")
    turned = grouped.turned(q)
    assert turned.stride(1) % 16 == 0
    for one, ours, scales, other in zip(w, q, s, turned, strict=True):
        expected = quantize_weight(one, "pow2")
        assert torch.equal(ours.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scales, expected[1])
        assert torch.equal(other.view(torch.uint8), ours.view(torch.uint8).t())


@pytest.mark.parametrize(("shape", "scale_format", "out_dtype"), CASES)
def test_dgrad(shape, scale_format, out_dtype):
    """Of one matrix an expert == the dense kernel; summed over two, FP64."""
    (N, K), ids = shape, routes()
    plan, (w, s) = grouped.plan(ids, 4), stack(8, N, K, scale_format)
    g = quantize_rows(rand(len(ids), N, scale=1e-5), scale_format)
    turned, blocks = grouped.turned(w), s.transpose(1, 2)
    single = grouped.grouped(*g, turned[:4], blocks[:4], plan, out_dtype, tokens=True)[plan.place.long()]
    both = quantize_rows(rand(2 * len(ids), N, seed=2), scale_format)
    pairs = [t.view(len(ids), -1) for t in both]
    total = grouped.grouped(*pairs, turned, blocks, plan, FP32, summed=2)
    for expert in range(4):
        rows, at = ids[:, 0] == expert, slice(*plan.offsets[expert : expert + 2].tolist())
        if not rows.any():
            continue
        own = [t[rows] for t in g]
        assert torch.equal(single[rows], gemm_dgrad.dgrad(*own, w[expert], s[expert], out_dtype))
        assert sqnr(single[rows], reference.dgrad(*own, w[expert], s[expert])) > LEAST[out_dtype]
        expected = sum(
            reference.dgrad(*(t[i::2][at] for t in both), w[2 * expert + i], s[2 * expert + i]) for i in (0, 1)
        )
        assert sqnr(total[at], expected) > SQNR_KERNEL_FP32


@pytest.mark.parametrize(("shape", "scale_format", "out_dtype"), CASES)
def test_wgrad_is_the_dense_one_over_an_experts_own_tokens(shape, scale_format, out_dtype):
    (N, K), ids = shape, routes()
    plan, T = grouped.plan(ids, 4), len(ids)
    g_TN, weights = rand(T, N, scale=1e-5), torch.rand(T, 1, generator=torch.Generator().manual_seed(9))
    x = quantize_rows(rand(T, K), scale_format)
    dw = grouped.grouped_wgrad(
        grouped.group_tokens(g_TN, plan, scale_format, weights), grouped.regroup(*x, plan, scale_format, True), plan, out_dtype
    )
    order = plan.order.long()
    by_position = grouped.grouped_wgrad(
        grouped.group_tokens((weights * g_TN).to(BF16)[order], plan, scale_format),
        grouped.regroup(*(t[order] for t in x), plan, scale_format, False),
        plan,
        out_dtype,
    )
    assert dw.shape == (4, N, K) and dw.dtype == out_dtype and torch.equal(by_position, dw)
    for expert in range(4):
        rows = (ids[:, 0] == expert).nonzero()[:, 0]
        if not len(rows):
            assert (dw[expert] == 0).all()
            continue
        g = (weights[rows] * g_TN[rows]).to(BF16)
        operand = requantize_tokens(*(t[rows] for t in x), scale_format, pad=True)
        expected = gemm_wgrad.wgrad(*quantize_tokens(g, scale_format, turned=True, pad=True), *operand, out_dtype)
        assert torch.equal(dw[expert], expected)
        again = quantize.dequantize_activation(*(t[rows] for t in x), BF16)
        exact = reference.wgrad(*quantize.quantize_tokens(g, scale_format), *quantize.quantize_tokens(again, scale_format))
        assert sqnr(dw[expert], exact) > LEAST[out_dtype]


@pytest.mark.parametrize(("T", "k", "E", "H"), [(1, 1, 4, 64), (37, 3, 6, 1030), (20, 8, 9, 200)])
def test_the_combined_rows_are_the_weighted_sum(T, k, E, H):
    ids, plan = chosen(T, k, E), grouped.plan(chosen(T, k, E), E)
    out = torch.randn(T * k, H, generator=torch.Generator().manual_seed(1))
    weights = torch.rand(T, k, generator=torch.Generator().manual_seed(2))
    expected = added(weighted_sums(ids, weights, (E, H), lambda group: [(0, out[group.span])]))
    assert torch.equal(grouped.combine(out, plan, weights, BF16), expected)
    unrounded = grouped.combine(out, plan, weights, FP32)
    assert unrounded.dtype == FP32 and torch.equal(unrounded.to(BF16), expected)
    ones = grouped.combine(out, plan, torch.ones(T, k), FP32)
    assert torch.equal(grouped.combine(out, plan, None, FP32), ones)
    turned = torch.arange(k).flip(0)
    other = grouped.combine(out, grouped.plan(ids[:, turned].contiguous(), E), weights[:, turned].contiguous(), FP32)
    assert torch.equal(other, unrounded)


def test_a_wrong_index_is_seen():
    ids, out = chosen(10, 2, 4), torch.randn(20, 64)
    for wrong in (4, -1):
        ids[3, 1] = wrong
        found = grouped.combine(out, grouped.plan(ids, 4), torch.rand(10, 2), FP32)
        assert found[3].isnan().all() and found.isnan().sum() == 64


def logits_of(T, E, dtype):
    g = torch.Generator().manual_seed(E)
    logits = torch.randn(T, E, generator=g).mul(3).to(dtype)
    logits[1] = 0.0  # ties
    logits[2, : E // 2] = logits[2, E // 2 : E // 2 * 2]
    logits[3, 1], logits[4, 2], logits[5, 0] = float("nan"), float("inf"), float("-inf")
    logits[6] = float("nan")
    logits[7] = -200.0
    return logits


def same(found, expected):
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0].isnan(), expected[0].isnan()) and torch.equal(found[0].nan_to_num(), expected[0].nan_to_num())


@pytest.mark.parametrize(
    ("E", "k", "dtype", "renormalize"),
    [(4, 1, BF16, True), (60, 4, BF16, False), (128, 8, FP32, True), (16, 16, FP32, False)],
)
def test_routes_of_a_softmax(E, k, dtype, renormalize):
    logits = logits_of(20, E, dtype)
    same(route(logits, k, renormalize), _formula(logits, k, renormalize, None))


@pytest.mark.parametrize(("E", "k", "groups", "kept"), [(16, 4, 1, 1), (60, 6, 4, 2), (8, 8, 4, 4)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_routes_of_a_sigmoid(E, k, groups, kept, renormalize):
    logits = logits_of(20, E, FP32)
    bias = torch.randn(E, generator=torch.Generator().manual_seed(0)) * 0.3
    rule = Sigmoid(bias, groups, kept, 2.5)
    same(route(logits, k, renormalize, *rule), _formula(logits, k, renormalize, rule))
    same(route(logits[8:9], k, renormalize, *rule), [t[8:9] for t in route(logits, k, renormalize, *rule)])


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
        y = grouped.grouped(q, s, w, sw, plan, *rest, **options)
        return y * (1 + 2**-6) if len(plan.ids) < 20 else y

    broken = SimpleNamespace(**{name: getattr(grouped, name) for name in grouped.__all__} | {"grouped": by_number})
    monkeypatch.setattr(TritonBackend, "grouped", lambda self, x: broken)
    verdict = compare_experts(backend, 128, 96, "cpu", counts=(0, 3, 25))
    assert not verdict.ok and "differ from those among 28" in verdict.found
    broken.grouped = lambda *args, **options: grouped.grouped(*args, **options) * 1.5
    verdict = compare_experts(backend, 128, 96, "cpu", counts=(0, 3, 25))
    assert not verdict.ok and "differ from the dense product" in verdict.found


def test_a_machine_that_fails_the_trial_is_refused(monkeypatch):
    gpu = SimpleNamespace(type="cuda")
    backend = SimpleNamespace(name="triton", grouped=lambda x: None)
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)
    with pytest.raises(ModelError, match=r"experts of 768 x 2048 with backend='triton': required grouped FP8.*found none"):
        expert_trial.require_expert_equality(backend, 8, 2, (2048, 768), gpu)
    assert not expert_trial.require_expert_equality(backend, 8, 2, (2048, 768), torch.device("cpu"))


def test_wrong_operands():
    ids, (w, s) = chosen(5, 2, 4), stack(4, 64, 256)
    plan, x = grouped.plan(ids, 4), quantize_rows(rand(5, 256), "pow2")
    with pytest.raises(ValueError, match="does not fit 10 rows"):
        grouped.grouped(*x, w, s, plan)
    with pytest.raises(ValueError, match="of 4 experts"):
        grouped.grouped(*x, w[:3], s[:3], plan, tokens=True)
    with pytest.raises(ValueError, match=r"W: expected .* with FP32 scales \[4, 1, 2\]"):
        grouped.grouped(*x, w, s[:, :, :1], plan, tokens=True)
    with pytest.raises(TypeError, match="indices of experts"):
        grouped.plan(ids.float(), 4)
    with pytest.raises(ValueError, match=r"contiguous torch.float32 \[10, H\]"):
        grouped.combine(torch.zeros(5, 64), plan, None, FP32)
    operand = grouped.regroup(*x, plan, "pow2", True)
    with pytest.raises(ValueError, match="groups of this plan"):
        grouped.grouped_wgrad(operand, operand, grouped.plan(chosen(200, 2, 4), 4), FP32)


def test_the_unrounded_sum_of_a_rank():
    layer = Layer(9, 3, hidden=128, width=96, k=2, backend="triton")
    kernels = layer.own.backend.grouped(layer.x)
    tokens = layer.own.backend.quantize_activation(layer.x.detach(), "pow2")
    stacks = layer.own.stacks(layer.gate_up, layer.down)
    total, _ = run_grouped(kernels, tokens, layer.weights.detach(), layer.ids, stacks, "pow2", FP32)
    assert total.dtype == FP32 and torch.equal(total.to(BF16), layer.run())


@pytest.mark.parametrize("by", ["columns", "experts"])
def test_the_trainer_adds_the_parts_that_a_rollouts_ranks_compute(by):
    """Each rank holds half of the matrices. Both are the loop's parts, too."""
    layer = Layer(9, 4, hidden=128, width=256, k=2, backend="triton")
    backend, weights, ids, split = layer.own.backend, layer.weights.detach(), layer.ids, ExpertSplit(2, by)
    kernels, tokens = backend.grouped(layer.x), backend.quantize_activation(layer.x.detach(), "pow2")
    stacks = layer.own.stacks(layer.gate_up, layer.down)
    found, _ = run_grouped(kernels, tokens, weights, ids, stacks, "pow2", split=split)
    (up, up_s), (down, down_s) = stacks
    parts = []
    for rank in range(2):
        if by == "experts":
            two, four = slice(2 * rank, 2 * rank + 2), slice(4 * rank, 4 * rank + 4)
            mine = Stacks((up[four], up_s[four]), (down[two], down_s[two]))
            own = torch.where(ids // 2 == rank, ids - 2 * rank, -1)
        else:
            at, one, own = slice(128 * rank, 128 * rank + 128), slice(rank, rank + 1), ids
            mine = Stacks((up[:, at].contiguous(), up_s[:, one]), (down[:, :, at].contiguous(), down_s[:, :, one]))
        parts.append(run_grouped(kernels, tokens, weights, own, mine, "pow2", part=True)[0])
    assert found.dtype == BF16 and torch.equal(found, added(torch.stack(parts)))

    def operands(expert):
        places = ((stacks.gate_up, 2 * expert), (stacks.gate_up, 2 * expert + 1), (stacks.down, expert))
        return Operands(*((q[i], expand_weight_scale(s[i], q.shape[1])) for (q, s), i in places))

    loop = run_experts(tokens, weights, ids, operands, (4, 128), backend, "pow2", split=split)
    assert torch.equal(found, added(loop))
