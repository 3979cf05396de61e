"""A real OpenRLHF run with ill-conditioned layers: named, moved to BF16 on both sides, and every token still equal."""

from __future__ import annotations

import re

import pytest

from tests.monitor.ill import ACTIVATION_ILL, FLOOR, WEIGHT_ILL, make_ill
from tests.openrlhf.run_openrlhf import Run, make_task

TIMEOUT = 500
UNIFIED = {"JETRL_PRECISION": "fp8-unified", "CUDA_VISIBLE_DEVICES": "", "JETRL_MONITOR_EVERY": "1"}
GENTLY = ("--actor.adam.lr", "1e-6")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT + 100)]


@pytest.fixture(scope="module")
def ill_task(tmp_path_factory):
    task = make_task(tmp_path_factory.mktemp("ill"))
    make_ill(task / "model")
    return task


def assert_guarded(run: Run) -> None:
    assert run.wait(TIMEOUT) == 0, run.failure
    found = run.metrics()
    assert len(found) == 3, run.failure
    for step in found:
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["jetrl/logp_abs_diff_max"] == 0.0, found
        assert step["jetrl/tokens"] >= 16 and step["jetrl/guard_layers"] == 3 and step["jetrl/quantized_layers"] == 18
    events = re.findall(r"precision guard: (\d+) layers run in BF16 .*?, (\d+) in all; floor 22 dB: (.*)", run.text)
    assert [(int(new), int(total)) for new, total, _ in events] == [(2, 2), (1, 3)], events
    assert f"{WEIGHT_ILL}: weight" in events[0][2] and f"{ACTIVATION_ILL}: activation" in events[1][2]
    assert found[0]["jetrl/scale/activation_slice_sqnr_min"] < FLOOR
    assert found[2]["jetrl/scale/activation_slice_sqnr_min"] > FLOOR


@pytest.mark.slow
def test_ill_layers_leave_fp8_on_both_sides_zero2_with_a_reference_model(ill_task):
    """KL to the reference is 0 before the policy changes: two layers of the reference left FP8 with the policy's."""
    run = Run(ill_task, *GENTLY, environ={**UNIFIED, "JETRL_GUARD_SQNR": str(FLOOR)}, steps=3)
    assert_guarded(run)
    assert run.metrics()[0]["kl"] == 0, [step["kl"] for step in run.metrics()]


@pytest.mark.slow
def test_zero3_on_two_ranks(ill_task):
    environ = {**UNIFIED, "JETRL_GUARD_SQNR": str(FLOOR)}
    assert_guarded(Run(ill_task, *GENTLY, environ=environ, stage=3, actors=2, steps=3))


@pytest.mark.slow
def test_a_threshold_stops_the_run(ill_task):
    run = Run(ill_task, *GENTLY, environ={**UNIFIED, "JETRL_MONITOR_ACTION": "stop"}, steps=3)
    assert run.wait(TIMEOUT) != 0
    assert re.search(rf"{WEIGHT_ILL}: weight sqnr \d+\.\d+ dB < 20 dB", run.text) and not run.metrics()
