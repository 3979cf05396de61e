"""Two nodes with an empty environment: the driver's settings reach both, or the driver stops."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl_patch.patching.identity import identity
from tests.ray.cluster import Cluster

SCRIPT = Path(__file__).with_name("driver_script.py")
ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster():
    ours = Cluster()
    try:
        ours.start("head")
        ours.start("clean")
        yield ours
    finally:
        ours.stop()


def drive(cluster: Cluster, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("JETRL_", "RAY_", "COV"))}
    return subprocess.run(
        [sys.executable, str(SCRIPT), cluster.address],
        env={**environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, cwd=cwd, timeout=200,
    )  # fmt: skip


def test_every_node_and_its_children_are_patched_alike(cluster, tmp_path):
    done = drive(cluster, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    reports = json.loads(done.stdout.splitlines()[-1])
    assert {report["node"] for report in reports} == {"head", "clean"}
    assert len({report["pid"] for report in reports}) == 2
    for report in reports:
        assert report["enabled"] and report["hook"] is True and report["mine"] == "kept"
        config = report["config"]
        assert config["precision"] == "fp8-rollout" and config["sync_timeout"] == 77
        assert config["exclude"] == ["layers.0"]
    assert reports[0]["config"] == reports[1]["config"]
    (child,) = (report["child"] for report in reports if report["node"] == "clean")
    assert child == reports[0]["config"]


def test_nodes_without_the_plugin_or_with_another_one_stop_the_driver_by_name(cluster, tmp_path):
    block = tmp_path / "block"
    block.mkdir()
    (block / "sitecustomize.py").write_text(
        """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "jetrl_patch":
            raise ModuleNotFoundError("No module named 'jetrl_patch'", name="jetrl_patch")

sys.meta_path.insert(0, Blocked())
"""
    )
    old = tmp_path / "old" / "jetrl_patch"
    old.mkdir(parents=True)
    (old / "__init__.py").write_text("__version__ = '0.0.9'\n")
    cluster.start("bare", PYTHONPATH=str(block))
    cluster.start("old", PYTHONPATH=str(old.parent))
    other = tmp_path / "other" / "jetrl_patch"  # the same version, with one more comment
    shutil.copytree(ROOT / "jetrl_patch", other, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "adapters", other / "adapters", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "fp8" / "linear.py").open("a") as file:
        file.write("# another commit\n")
    cluster.start("other", PYTHONPATH=str(other.parent))
    done = drive(cluster, tmp_path)
    assert done.returncode == 1
    assert "CONNECTED" not in done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("jetrl_patch.errors.NotPatchedError: node ")
    assert re.search(r"node [\d.]+ \([^,]+, named bare\): .*No module named 'jetrl_patch'", last)
    assert re.search(
        r"node [\d.]+ \([^,]+, named old\): required jetrl_patch [\d.]+\+\w{12}, as in the driver, found 0\.0\.9", last
    )
    found = re.search(r"named other\): required jetrl_patch ([\d.]+\+\w{12}), as in the driver, found ([\d.]+\+\w{12})\.", last)
    assert found is not None and found[1] == identity() != found[2]
    assert "named head" not in last and "named clean" not in last
