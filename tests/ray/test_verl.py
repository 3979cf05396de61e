"""Real verl through ``jetrl verl``: the driver on one node, every worker on another, with nothing set on either."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray.cluster import BIN, Cluster
from tests.verl import run_verl

TIMEOUT = 900


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 200)
def test_a_run_on_another_node_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    plain = run_verl.command

    def command(*args, **kwargs):
        words = [word for word in plain(*args, **kwargs)[3:] if "ray_kwargs" not in word]
        joins = [f"+ray_kwargs.ray_init.address={cluster.address}", "ray_kwargs.ray_init.num_cpus=null"]
        return [str(BIN / "jetrl"), "verl", *words, *joins, "--fp8-unified"]

    monkeypatch.setattr(run_verl, "command", command)
    task = run_verl.make_task(tmp_path)
    machine = {"RAY_memory_monitor_refresh_ms": "0", "HF_HUB_OFFLINE": "1"}
    try:
        cluster.start("head", cpus=0, **machine)
        cluster.start("clean", cpus=16, gpus=1, **machine)
        run = run_verl.Run(task, "trainer.use_v1=False", environ={"RAY_AUTH_MODE": "disabled"})
        assert run.wait(TIMEOUT) == 0, run.failure
    finally:
        cluster.stop()
    assert "all patched (2)" in run.text
    steps = run.metrics()
    assert {step["training/global_step"] for step in steps} == {1, 2}
    for step in steps:
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["jetrl/tokens"] >= 16
        assert step["jetrl/quantized_layers"] == 21


LATE = "found a connection that was made without them. Call enable() before ray.init and before `from ray import init`"
LOCAL = "num_cpus=16, num_gpus=2, include_dashboard=False, object_store_memory=80_000_000, _temp_dir=sys.argv.pop()"
#: first lines of a driver that connects Ray itself -> the error that ends it
OWN_CONNECTION = [
    (f"import ray; ray.init({LOCAL}); jetrl_patch.enable(precision='fp8-unified')", LATE),
    (f"from ray import init; jetrl_patch.enable(precision='fp8-unified'); init({LOCAL})", LATE),
    (
        f"jetrl_patch.enable(precision='fp8-unified'); import ray; ray.init({LOCAL}); "
        "sys.argv.append('trainer.v1.trainer_mode=colocate_async')",
        "required old_log_probs='recompute', which verl's settings need, found Ray workers that were started without it. Call it",
    ),
]


@pytest.mark.e2e
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize(
    ("head", "says"),
    [pytest.param(*one, marks=[] if one is OWN_CONNECTION[1] else pytest.mark.slow) for one in OWN_CONNECTION],
    ids=["before", "by-name", "other-settings"],
)
def test_a_driver_whose_workers_are_not_patched_ends_before_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, says: str
) -> None:
    """Real ``main_ppo`` in a script that connects Ray itself. verl would take that connection and train without the plugin."""
    plain = run_verl.command
    program = tmp_path / "train.py"
    program.write_text(f"import sys\nimport jetrl_patch\n{head}\nfrom verl.trainer.main_ppo import main\nmain()\n")

    def command(folder: Path, ray_dir: str, *extra: str, **options: object) -> list[str]:
        python, _, _, *words = plain(folder, ray_dir, *extra, **options)
        return [python, str(program), *words, ray_dir]

    monkeypatch.setattr(run_verl, "command", command)
    run = run_verl.Run(run_verl.make_task(tmp_path), environ={"RAY_AUTH_MODE": "disabled"})
    assert run.wait(TIMEOUT) != 0
    last = run.text.strip().splitlines()[-1]
    assert "NotPatchedError: enable()" in last and says in last, run.failure
    assert not run.metrics() and "TaskRunner" not in run.text
