"""Real verl runs whose ranks share sequences: every token of the rollout equal to the last bit, and the reference model too."""

from __future__ import annotations

import re

import pytest

from tests.verl.run_verl import A, M, R, Run, make_task
from tests.verl.test_e2e import TIMEOUT, assert_exact, finish

REF = "actor_rollout_ref.ref"
PACKED = f"{M}.use_remove_padding=True"
CHECKPOINTING = f"{M}.enable_gradient_checkpointing=True"
SIZE = "ulysses_sequence_parallel_size"
#: each rank leaves out tokens of its slice
DRAW = (f"{R}.temperature=0.7", f"{R}.top_p=0.9", f"{R}.top_k=50")
UNIFIED = {"JETRL_PRECISION": "fp8-unified"}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


def assert_reference(run: Run) -> None:
    """In the first step the actor still has the reference model's weights: equal log-probs leave no KL."""
    found = [float(value) for value in re.findall(r"actor/kl_loss:(?:np\.\w+\()?([^ )]+)", run.text)]
    assert len(found) == 3 and found[0] == 0.0 < min(found[1:]), found


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize(
    ("processes", "strategy", "extra"),
    [
        (4, "fsdp2", ["trainer.use_v1=False", PACKED, f"{A}.{SIZE}=2", f"{R}.tensor_model_parallel_size=2"]),
        (2, "fsdp", ["trainer.use_v1=True", PACKED, f"{A}.fsdp_config.{SIZE}=2", f"{REF}.{SIZE}=2", *DRAW]),
        (2, "fsdp2", ["trainer.use_v1=False", PACKED, f"{A}.{SIZE}=2", f"{REF}.{SIZE}=1", CHECKPOINTING]),
        (2, "fsdp2", ["trainer.use_v1=False", PACKED, f"{REF}.{SIZE}=2"]),
    ],
    ids=["2x2, both models", "FSDP1 and V1", "actor alone", "reference alone"],
)  # fmt: skip
def test_unified_is_exact(task, processes, strategy, extra):
    run = Run(task, f"{A}.use_kl_loss=True", *extra, processes=processes, strategy=strategy, steps=3, environ=UNIFIED)
    assert_exact(finish(run, 3))
    assert_reference(run)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
def test_padded_batches_are_refused_before_ray_starts(task):
    """verl splits only packed sequences; its workers would report that minutes later."""
    run = Run(task, "trainer.use_v1=False", f"{A}.{SIZE}=2", processes=2, environ=UNIFIED)
    assert run.wait(TIMEOUT) != 0
    assert "required packed sequences, the only ones that verl slices" in run.text and "WorkerDict" not in run.text


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
def test_linear_mode_differs_by_rounding_alone(tmp_path):
    """Within a slice, attention would be off by more than 1. No tokens beyond the tokenizer: verl masks them in vLLM alone."""
    environ = {**UNIFIED, "JETRL_ALIGN": "linear"}
    task = make_task(tmp_path, fill=True)
    run = Run(task, "trainer.use_v1=False", PACKED, f"{A}.{SIZE}=2", processes=2, environ=environ)
    for step in finish(run):
        assert step["jetrl/logp_abs_diff_max"] > 0 and step["jetrl/k3_kl"] < 0.01, step
