"""Experts split over the rollout's ranks: the trainer's parts are the ranks' sums, gradients against FP64, errors."""

from __future__ import annotations

import pytest
import torch

from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.errors import ConfigError, ModelError
from jetrl_patch.exact import ops
from jetrl_patch.fp8.experts import Experts, ExpertWeights, run_experts
from jetrl_patch.fp8.mixture import WHOLE, ExpertSplit, added

from ..dispatched import dispatched
from .mixture import BF16, Layer
from .thresholds import SQNR_EXPERTS, sqnr

WIDTH = 512
SPLITS = [ExpertSplit.of(2), ExpertSplit.of(4), ExpertSplit.of(2, 2), ExpertSplit.of(3, 3)]


@pytest.fixture(params=["native", "torch"])
def backend(request):
    with dispatched(request.param):
        yield request.param


def layer(tokens, split, backend="native", **options):
    made = Layer(tokens, width=WIDTH, backend=backend, **options)
    made.own = Experts(6, "pow2", backend, split)
    return made


def trainer_parts(made, split):
    """The parts that the trainer forms: FP32 [R, T, H]."""
    own = made.own

    def matrices(expert):
        return own.quantized(expert, made.gate_up.detach(), made.down.detach())

    x = own.backend.quantize_activation(made.x.detach(), "pow2")
    return run_experts(x, made.weights.detach(), made.ids, matrices, (6, 320), own.backend, split=split)


def rank_sum(made, split, rank):
    """One rank's part, from its own matrices: FP32 [1, T, H]."""
    own, by_columns = made.own, split.by == "columns"
    step, each = WIDTH // split.ranks, 6 // split.ranks
    at = slice(rank * step, (rank + 1) * step) if by_columns else slice(0, WIDTH)
    held = range(6) if by_columns else range(rank * each, (rank + 1) * each)

    def matrices(expert):
        assert expert in held
        w = own.quantized(expert, made.gate_up.detach(), made.down.detach())
        mine = (w.gate.rows(at), w.up.rows(at), w.down.columns(at.start, at.stop))
        return ExpertWeights(*(Quantized(m.q.clone(), m.s.clone(), "rows", "pow2") for m in mine))

    x = own.backend.quantize_activation(made.x.detach(), "pow2")
    return run_experts(x, made.weights.detach(), made.ids, matrices, (6, 320), own.backend, held=held)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_trainer_adds_what_the_ranks_add(backend, split):
    made = layer(64, split, backend)
    parts = torch.cat([rank_sum(made, split, rank) for rank in range(split.ranks)])
    assert torch.equal(trainer_parts(made, split), parts)
    assert torch.equal(made.run(), added(parts))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_split_shows_in_the_output(split):
    """A million FP32 sums; in another order, some round to other BF16 values."""
    made = layer(3000, split)
    found = made.run()
    assert torch.equal(found, added(trainer_parts(made, split)))
    assert not torch.equal(found, added(trainer_parts(made, WHOLE)))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_order_of_the_sum(split):
    """Token by token: parts in rank order, in each the chosen experts in ascending order, all in FP32, one rounding."""
    made = layer(30, split)
    own, rows = made.own, []
    for t in range(30):
        parts = torch.zeros(split.ranks, 320)
        for expert, weight in sorted(zip(made.ids[t].tolist(), made.weights[t].tolist(), strict=True)):
            w = own.quantized(expert, made.gate_up, made.down)
            a, b = (own.backend.fprop(made.x.detach()[t : t + 1], m) for m in (w.gate, w.up))
            h, step = ops.silu_mul(a, b), WIDTH // split.ranks
            if split.by == "experts":
                out = own.backend.fprop(h, w.down, torch.float32)
                parts[expert // (6 // split.ranks)] += torch.tensor(weight) * out[0]
                continue
            for rank in range(split.ranks):
                start, stop = rank * step, (rank + 1) * step
                out = own.backend.fprop(h[:, start:stop], w.down.columns(start, stop), torch.float32)
                parts[rank] += torch.tensor(weight) * out[0]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        rows.append(total.to(BF16))
    assert torch.equal(made.run(), torch.stack(rows))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_token_has_the_same_bits_in_every_company(backend, split):
    made = layer(150, split, backend)
    whole = made.run()
    for rows in (slice(0, 1), slice(149, 150), slice(40, 72)):
        assert torch.equal(made.run(rows), whole[rows])
    order = torch.randperm(150, generator=torch.Generator().manual_seed(1))
    assert torch.equal(made.run(order), whole[order])


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_value_and_gradients(backend, split):
    made = layer(200, split, backend)
    g = torch.randn(200, 320, generator=torch.Generator().manual_seed(5)).to(BF16)
    sources = (made.x, made.gate_up, made.down, made.weights)
    y = made.run()
    found = torch.autograd.grad(y, sources, g)
    exact = [t.detach().double().requires_grad_() for t in sources]
    expected_y = made.exact(*exact)
    assert sqnr(y.detach(), expected_y.detach()) > SQNR_EXPERTS["y"]
    for name, ours, theirs in zip(("x", "gate_up", "down", "weights"), found, torch.autograd.grad(expected_y, exact, g.double())):
        assert sqnr(ours, theirs) > SQNR_EXPERTS[name], name
    made.own = Experts(6, "pow2", backend)
    for ours, theirs in zip(found, torch.autograd.grad(made.run(), sources, g), strict=True):
        assert torch.equal(ours, theirs)  # backward computes the same from what is saved


def test_one_rank_splits_nothing():
    assert ExpertSplit.of(1) == ExpertSplit.of(1, 1) == WHOLE and str(WHOLE) == ""
    assert str(ExpertSplit.of(2)) == "2 ranges of columns" and str(ExpertSplit.of(4, 4)) == "4 ranges of experts"


def test_what_does_not_split_evenly():
    with pytest.raises(ConfigError, match=r"required 1, or its tensor parallel size 4, found 2\. Use"):
        ExpertSplit.of(4, 2)
    with pytest.raises(ModelError, match=r"experts: required a number that 4 expert parallel ranks divide, found 6 experts\. "):
        ExpertSplit.of(4, 4).check("experts", 6, 512)
    with pytest.raises(ModelError, match=r"each of 2 tensor parallel ranks holds whole blocks of 128, found 384\. Use expert"):
        ExpertSplit.of(2).check("experts", 6, 384)
    ExpertSplit.of(2).check("experts", 7, 512)
    ExpertSplit.of(2, 2).check("experts", 6, 200)
    WHOLE.check("experts", 7, 200)
