"""The estimate of a step's cost: the page is up to date, and each part has the right effect."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import cost as parts
from benchmarks.cost import PAGE, Load, one_token, page, rollout, step, sum_over_ranks, training

WAYS = {way.name: way for way in parts.WAYS}
NETS = {net.block.name: net for net in parts.NETS}
LOAD = Load(samples=256, prompt=128, longest=2048)


def test_the_page_is_what_the_script_computes():
    assert PAGE.read_text() == page()


def test_parameters_are_those_of_the_models():
    billions = {name: net.matrices(net.experts) / 1e9 for name, net in NETS.items()}
    assert billions == pytest.approx({"Qwen3-8B": 6.9, "Qwen3-32B": 31.0, "Llama-3.1-70B": 68.5, "Qwen3-30B-A3B": 29.9}, rel=0.02)


def test_a_forward_pass_is_what_its_products_take():
    """With short sequences, almost all FLOPs are in the linears: two for each parameter and token."""
    net, lengths = NETS["Llama-3.1-70B"], np.full(100, 64)
    products = 2 * lengths.sum() * net.matrices(net.experts) / (parts.H100.peaks.bf16 * 1e12)
    assert products < training(net, WAYS["bf16"], lengths, parts.H100)[0] < 1.25 * products


def test_one_token_of_one_sequence_reads_every_weight_once():
    net = NETS["Qwen3-8B"]
    size = 2 * (net.matrices(net.experts) + net.vocabulary * net.block.hidden)
    assert one_token(net, WAYS["bf16"], 1, 1, parts.H100, 1) == pytest.approx(size / (parts.H100.peaks.bandwidth * 1e9), rel=0.01)


def test_experts_that_no_token_uses_are_not_read():
    net = NETS["Qwen3-30B-A3B"]
    few, many = (one_token(net, WAYS["bf16"], rows, 1, parts.H100, 1) for rows in (1, 512))
    assert 5 * few < many


def test_what_a_mode_does_not_change_costs_the_same():
    bf16, mixed, exact, with_pass = (
        step(NETS["Qwen3-8B"], WAYS[name], LOAD, parts.H100) for name in ("bf16", "fp8-rollout", "exact", "exact, with the pass")
    )
    assert mixed[1:3] == bf16[1:3]
    on_one_rank = (rollout(NETS["Qwen3-8B"], WAYS[name], LOAD, parts.H100, 1) for name in ("fp8-rollout", "bf16"))
    assert next(on_one_rank) < next(on_one_rank)
    assert exact.old_log_probs == 0 and (with_pass.rollout, with_pass.update) == (exact.rollout, exact.update)


@pytest.mark.parametrize("net", parts.NETS, ids=lambda net: net.block.name)
def test_each_mode_has_its_own_best_parallelism(net):
    """Each mode is compared at its best parallelism."""
    for way in parts.WAYS[:3]:
        found = step(net, way, LOAD, parts.H100)
        every = {tp: rollout(net, way, LOAD, parts.H100, tp) for tp in net.sizes(way.samples)}
        assert found.rollout == min(every.values()) == every[found.tp] and len(every) > 1


def test_sizes_cut_no_head_and_no_block():
    """768 inner features are six blocks of 128; BF16 has none to cut."""
    net = NETS["Qwen3-30B-A3B"]
    assert list(net.sizes(fp8=False)) == [1, 2, 4] and list(net.sizes(fp8=True)) == [1, 2]


def test_a_model_that_does_not_fit_is_an_error():
    big = NETS["Llama-3.1-70B"]
    assert rollout(big, WAYS["bf16"], LOAD, parts.H100, 1) == float("inf") and step(big, WAYS["bf16"], LOAD, parts.H100).tp > 2
    with pytest.raises(ValueError, match=r"Llama-3\.1-70B leaves no room"):
        step(big, WAYS["bf16"], LOAD, parts.H100._replace(memory=1e9))


def test_a_sum_over_ranks_moves_what_its_mode_moves():
    """BF16 all-reduces two bytes. Exact mode takes the way of the fewest bytes that pays for a second collective."""
    free = parts.H100._replace(peaks=parts.H100.peaks._replace(bandwidth=float("inf")))
    assert sum_over_ranks(1e6, True, free, 1) == sum_over_ranks(1e6, False, free, 1) == 0
    for tp in (2, 4, 8):
        assert sum_over_ranks(1e6, False, free, tp) == pytest.approx(parts.LATENCY + 4e6 * (tp - 1) / tp / free.link)
        small, large = parts.ONE_SHOT[tp] / 4 - 1, 1e8
        for gpu in (parts.H100, free):  # in one shot no part is stored
            assert sum_over_ranks(small, True, gpu, tp) == pytest.approx(parts.LATENCY + 4 * small * (tp - 1) / gpu.link)
        assert sum_over_ranks(large, True, free, tp) == pytest.approx(2 * parts.LATENCY + 6 * large * (tp - 1) / tp / free.link)
        assert sum_over_ranks(large, True, free, tp) < sum_over_ranks(large, True, parts.H100, tp)
    medium = 2e5  # too large for one shot, too small for two collectives
    assert sum_over_ranks(medium, True, free, 4) == pytest.approx(parts.LATENCY + 4 * medium * 3 / free.link)


def test_its_limits_are_those_of_the_engine():
    ranks = pytest.importorskip("jetrl_patch.adapters.vllm.ranks")
    assert {tp: min(ranks.ONE_STAGE[tp], 8 << 20) for tp in parts.ONE_SHOT} == parts.ONE_SHOT
    pays = parts.LATENCY * parts.H100.link  # bytes that a second collective has to save
    assert 0.9 * pays < ranks.SAVED < 1.1 * pays
