"""Real verl with delta syncs: twenty steps, every token equal, an engine that loses its base, a damaged record, a lost one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verl.run_verl import A, Run, make_task
from tests.verl.test_async_runs import APART

TIMEOUT = 1200
STEPS = 20
DELTA = {"JETRL_PRECISION": "fp8-unified", "JETRL_SYNC": "delta"}
RATE = f"{A}.optim.lr=1e-6"
#: the tensor whose record is hit by a fault, and the error of a run that ends
HIT = "model.layers.1.mlp.down_proj.weight"
FAULTS = [("DAMAGED", f"weights changed on the way: {HIT}"), ("LOST", f"weights missing from the sync: {HIT}")]

#: the vLLM worker prints its share of every sync; at the syncs of RESTARTS it has forgotten what came before, as a new process
#: has, and at that of DAMAGED a byte of a record flips, or the record of LOST does not arrive
HOOK = """
import os, wrapt

@wrapt.when_imported("jetrl_patch.sync.receive")
def _(module):
    from jetrl_patch.sync.delta import PREFIX, Received

    numbers = lambda name: [int(word) for word in os.environ.get(name, "").split(",") if word]
    restarts, damaged, lost = (numbers(name) for name in ("RESTARTS", "DAMAGED", "LOST"))
    Receiver = module.Receiver
    held, on_bucket, finish = Receiver.held, Receiver.on_bucket, Receiver.finish

    def now_held(self):
        if self.__dict__.setdefault("syncs", 0) in restarts and self.base.identity:
            self.base = Received()
        return held(self)

    def now_on_bucket(self, weights):
        weights = [(name, tensor.clone()) for name, tensor in weights]
        self.deltas = self.__dict__.get("deltas", 0) + sum(name.startswith(PREFIX) for name, _ in weights)
        for name, tensor in weights:
            if self.syncs in damaged and name == PREFIX + HIT:
                tensor[16] ^= 1
        on_bucket(self, [pair for pair in weights if self.syncs not in lost or pair[0] != PREFIX + HIT])

    def now_finish(self):
        number, deltas, self.syncs, self.deltas = self.syncs, self.deltas, self.syncs + 1, 0
        report = finish(self)
        print(f"RECEIVED sync {number} deltas {deltas} bytes {report['bytes']}", flush=True)
        return report

    Receiver.held, Receiver.on_bucket, Receiver.finish = now_held, now_on_bucket, now_finish
"""

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT)]


def add_hook(folder: Path) -> Path:
    """Write the hook where a run's processes import it. Returns the folder."""
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(f"HIT = {HIT!r}\n{HOOK}")
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return add_hook(make_task(tmp_path_factory.mktemp("task"), fill=True))


def environ(task: Path, **more: str) -> dict[str, str]:
    return {**DELTA, "PYTHONPATH": str(task / "hook"), **more}


def assert_deltas(found: list[dict[str, float]], full: set[int], steps: int = STEPS) -> None:
    """Every step is exact; the syncs that end these steps (from 1) sent everything, the others less than a tenth."""
    assert len(found) == steps
    for number, step in enumerate(found, start=1):
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["jetrl/logp_abs_diff_max"] == 0.0, step
        share = step["jetrl/sync_bytes_total"] / step["jetrl/sync_bytes_full"]
        assert share == 1.0 if number in full else share < 0.1, (number, share)
        assert (step["jetrl/sync_changed_fraction"] == 1.0) == (number in full)


def assert_one_sent_everything(found: list[dict[str, float]]) -> None:
    """One of the steps' syncs sent everything, the others less than a tenth."""
    shares = [step["jetrl/sync_bytes_total"] / step["jetrl/sync_bytes_full"] for step in found]
    assert shares.count(1.0) == 1 and sum(share < 0.1 for share in shares) == len(found) - 1, shares


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_twenty_syncs_to_a_colocated_engine_that_forgets_twice(task, strategy):
    """Sync 0 precedes the first step."""
    run = Run(task, RATE, environ=environ(task, RESTARTS="7,13"), steps=STEPS, strategy=strategy)
    assert run.wait(TIMEOUT) == 0, run.failure
    assert_deltas(run.metrics(), {7, 13})
    assert run.text.count("RECEIVED sync") == STEPS + 1


def test_two_ranks_with_a_tensor_parallel_engine(task):
    run = Run(task, RATE, environ=environ(task, RESTARTS="3"), steps=5, processes=2)
    assert run.wait(TIMEOUT) == 0, run.failure
    assert_deltas(run.metrics(), {3}, steps=5)


def test_twenty_syncs_over_a_checkpoint_engine(task):
    run = Run(task, RATE, *APART, environ=environ(task, RESTARTS="7"), steps=STEPS)
    assert run.wait(TIMEOUT) == 0, run.failure
    steps = run.metrics()
    assert len(steps) == STEPS
    assert_one_sent_everything(steps)
    assert all(step.get("jetrl/bit_equal_fraction_current", 1.0) == 1.0 for step in steps)


@pytest.mark.parametrize(("fault", "said"), FAULTS)
def test_a_fault_ends_the_run(task, fault, said):
    run = Run(task, RATE, environ=environ(task, **{fault: "3"}), steps=8)
    assert run.wait(TIMEOUT) != 0
    assert "SyncError" in run.text and said in run.text
    assert len(run.metrics()) == 2 and "RECEIVED sync 3" not in run.text
