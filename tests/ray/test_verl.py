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
        assert run.wait(TIMEOUT) == 0, run.text[-6000:]
    finally:
        cluster.stop()
    assert "2 Ray nodes answered" in run.text
    steps = run.metrics()
    assert {step["training/global_step"] for step in steps} == {1, 2}
    for step in steps:
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["jetrl/tokens"] >= 16
        assert step["jetrl/quantized_layers"] == 21
