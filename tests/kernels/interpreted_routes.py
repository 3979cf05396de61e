"""Which experts a token has, in the interpreter: the routes, the plan of a batch, and the weighted sum that follows it."""

from __future__ import annotations

import pytest
import torch

from jetrl_patch.exact.route import Sigmoid, _formula
from jetrl_patch.fp8.mixture import added, weighted_sums
from jetrl_patch.kernels import gemm_grouped
from jetrl_patch.kernels.mixture import ROWS, route

from .interpreted_grouped import BF16, FP32, chosen


@pytest.mark.parametrize(("T", "k", "E"), [(257, 1, 4), (40, 8, 9), (1, 1, 3), (3, 2, 40), (700, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_plan_sorts_pairs_by_expert(T, k, E, dtype):
    ids = chosen(T, k, E).to(dtype)
    plan = gemm_grouped.plan(ids, E)
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


@pytest.mark.parametrize(("T", "k", "E", "H"), [(1, 1, 4, 64), (37, 3, 6, 1030), (20, 8, 9, 200)])
def test_the_combined_rows_are_the_weighted_sum(T, k, E, H):
    ids, plan = chosen(T, k, E), gemm_grouped.plan(chosen(T, k, E), E)
    out = torch.randn(T * k, H, generator=torch.Generator().manual_seed(1))
    weights = torch.rand(T, k, generator=torch.Generator().manual_seed(2))
    expected = added(weighted_sums(ids, weights, (E, H), lambda group: [(0, out[group.span])]))
    assert torch.equal(gemm_grouped.combine(out, plan, weights, BF16), expected)
    unrounded = gemm_grouped.combine(out, plan, weights, FP32)
    assert unrounded.dtype == FP32 and torch.equal(unrounded.to(BF16), expected)
    ones = gemm_grouped.combine(out, plan, torch.ones(T, k), FP32)
    assert torch.equal(gemm_grouped.combine(out, plan, None, FP32), ones)
    turned = torch.arange(k).flip(0)
    other = gemm_grouped.combine(out, gemm_grouped.plan(ids[:, turned].contiguous(), E), weights[:, turned].contiguous(), FP32)
    assert torch.equal(other, unrounded)


def test_a_wrong_index_is_seen():
    ids, out = chosen(10, 2, 4), torch.randn(20, 64)
    for wrong in (4, -1):
        ids[3, 1] = wrong
        found = gemm_grouped.combine(out, gemm_grouped.plan(ids, 4), torch.rand(10, 2), FP32)
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
    same(route(logits, k, renormalize, rule), _formula(logits, k, renormalize, rule))
    same(route(logits[8:9], k, renormalize, rule), [t[8:9] for t in route(logits, k, renormalize, rule)])
