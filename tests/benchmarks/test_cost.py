"""The estimate of a step's cost: its page is what it computes, and its parts act in the direction that they must."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.cost import parts
from benchmarks.cost.__main__ import PAGE, page
from benchmarks.cost.model import Load, one_token, step, training_forward

WAYS = {way.name: way for way in parts.WAYS}
NETS = {net.block.name: net for net in parts.NETS}
LOAD = Load(samples=256, prompt=128, longest=2048)


def test_the_page_is_what_the_script_computes():
    assert PAGE.read_text() == page()


def test_parameters_are_those_of_the_models():
    billions = {name: net.matrices / 1e9 for name, net in NETS.items()}
    assert billions == pytest.approx({"Qwen3-8B": 6.9, "Qwen3-32B": 31.0, "Llama-3.1-70B": 68.5, "Qwen3-30B-A3B": 29.9}, rel=0.02)


def test_a_forward_pass_is_what_its_products_take():
    """With short sequences almost all FLOPs are those of the linears: two for each parameter and token."""
    net, lengths = NETS["Llama-3.1-70B"], np.full(100, 64)
    products = 2 * lengths.sum() * net.matrices / (parts.H100.peaks.bf16 * 1e12)
    assert products < training_forward(net, WAYS["bf16"], lengths, parts.H100) < 1.25 * products


def test_one_token_of_one_sequence_reads_every_weight_once():
    net = NETS["Qwen3-8B"]
    size = 2 * (net.matrices + net.vocabulary * net.block.hidden)
    assert one_token(net, WAYS["bf16"], 1, 1, parts.H100) == pytest.approx(size / (parts.H100.peaks.bandwidth * 1e9), rel=0.01)


def test_experts_that_no_token_uses_are_not_read():
    net = NETS["Qwen3-30B-A3B"]
    few, many = (one_token(net, WAYS["bf16"], rows, 1, parts.H100) for rows in (1, 512))
    assert 5 * few < many


def test_what_a_mode_does_not_change_costs_the_same():
    bf16, rollout, exact, with_pass = (
        step(NETS["Qwen3-8B"], WAYS[name], LOAD, parts.H100) for name in ("bf16", "fp8-rollout", "exact", "exact, with the pass")
    )
    assert rollout[1:] == bf16[1:] and rollout.rollout < bf16.rollout
    assert exact.old_log_probs == 0 and (with_pass.rollout, with_pass.update) == (exact.rollout, exact.update)


def test_a_model_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=r"Llama-3\.1-70B leaves no room"):
        step(NETS["Llama-3.1-70B"]._replace(tp=1), WAYS["bf16"], LOAD, parts.H100)
