"""``ray job submit -- jetrl run ...`` on a real job server."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.ray.cluster import BIN, Cluster

PROGRAM = """
import builtins, os, sys
import jetrl_patch, ray

ray.init()

@ray.remote
def work():
    config = jetrl_patch.status().config
    return config.precision, config.exclude, os.environ["MINE"], os.listdir(), builtins.MARK

print("REPORT", (sys.argv[1:], ray.get(work.remote())))
"""


def submit(cluster: Cluster, runtime_env: dict, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("JETRL_", "RAY_", "COV"))}
    return subprocess.run(
        [str(BIN / "ray"), "job", "submit", "--address", cluster.jobs, "--runtime-env-json", json.dumps(runtime_env),
         "--", str(BIN / "jetrl"), "run", *words],
        env={**environ, "RAY_AUTH_MODE": "disabled"}, capture_output=True, text=True, timeout=150,
    )  # fmt: skip


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_runtime_env_of_a_job_is_kept_and_ours_is_in_it(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "own.py").write_text("def hook():\n    import builtins\n    builtins.MARK = 'own hook'\n")
    (work / "program.py").write_text(PROGRAM)
    runtime_env = {
        "env_vars": {"MINE": "kept", "JETRL_EXCLUDE": "layers.0"},
        "working_dir": str(work),
        "worker_process_setup_hook": "own.hook",
    }
    cluster = Cluster()
    try:
        cluster.start("head", jobs=True)
        done = submit(cluster, runtime_env, "--fp8-unified", "program.py", "x", "--", "--fp8-unified")
    finally:
        cluster.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    arguments, report = ast.literal_eval(line.removeprefix("REPORT "))
    assert arguments == ["x", "--", "--fp8-unified"]
    assert report[:3] == ("fp8-unified", ("layers.0",), "kept") and report[4] == "own hook"
    assert {"own.py", "program.py"} <= set(report[3])
    assert "jetrl: precision fp8-unified" in done.stdout + done.stderr
