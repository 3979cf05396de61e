"""Real OpenRLHF with delta syncs: twenty steps, every token equal, engines that lose their base, a damaged record, a lost one."""

from __future__ import annotations

import pytest

from tests.openrlhf.run_openrlhf import Run, make_task
from tests.verl.test_delta_runs import DELTA, FAULTS, STEPS, add_hook, assert_deltas

TIMEOUT = 1200
RATE = ["--actor.adam.lr", "1e-6"]

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT)]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return add_hook(make_task(tmp_path_factory.mktemp("task")))


def run(task, *extra, steps, actors=1, stage=2, **environ):
    environ = {**DELTA, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(task / "hook"), **environ}
    return Run(task, *RATE, *extra, environ=environ, steps=steps, actors=actors, stage=stage)


def test_twenty_syncs_to_two_engines(task):
    """Sync 0 runs when the trainer is built. Both engines forget before syncs 7 and 13."""
    twice = ("--train.num_episodes", "2")  # over the prompts of half the steps
    found = run(task, "--vllm.num_engines", "2", *twice, steps=STEPS // 2, RESTARTS="7,13")
    assert found.wait(TIMEOUT) == 0, found.failure
    assert_deltas(found.metrics(), {7, 13})
    assert found.text.count("RECEIVED sync") == 2 * (STEPS + 1)


@pytest.mark.parametrize(("extra", "options"), [(("--train.colocate_all",), {}), ((), {"actors": 2, "stage": 3})])
def test_colocated_and_two_training_processes(task, extra, options):
    found = run(task, *extra, steps=5, RESTARTS="3", **options)
    assert found.wait(TIMEOUT) == 0, found.failure
    assert_deltas(found.metrics(), {3}, steps=5)


@pytest.mark.parametrize(("fault", "said"), FAULTS)
def test_a_fault_ends_the_run(task, fault, said):
    found = run(task, steps=6, **{fault: "3"})
    assert found.wait(TIMEOUT) != 0
    assert "SyncError" in found.text and said in found.text
    assert len(found.metrics()) == 2 and "RECEIVED sync 3" not in found.text
