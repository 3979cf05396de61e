"""The functions sent to nodes, and the verdict on their reports."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys

import pytest
import ray.cloudpickle

from jetrl_patch import session
from jetrl_patch.adapters.ray import hook, nodes, worker
from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError, NotPatchedError
from jetrl_patch.patching.identity import identity

VERSION = identity()
CONFIG = Config(precision="bf16")


def elsewhere(function, *, blocked: bool) -> subprocess.CompletedProcess[str]:
    """Call a function in a fresh process, where ``jetrl_patch`` may be missing."""
    block = "import sys; sys.modules['jetrl_patch'] = None\n" if blocked else ""
    code = f"{block}import sys, pickle\nprint(pickle.load(sys.stdin.buffer)())"
    data = ray.cloudpickle.dumps(function)
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, cwd="/")
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_the_hook_travels_by_value_and_says_what_is_missing():
    done = elsewhere(hook.make_hook(VERSION, CONFIG.to_env(), None), blocked=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: jetrl_patch on node ") and f"required version {VERSION}" in last
    assert ", found none (" in last and "Install that version on the node" in last


def test_the_probe_travels_by_value_and_reports_what_is_missing():
    done = elsewhere(hook.make_probe(VERSION, CONFIG.to_env(), attempt=True), blocked=True)
    assert "'version': None" in done.stdout and "ModuleNotFoundError" in done.stdout


def test_the_hook_patches_then_runs_the_users_own(monkeypatch):
    for name, value in CONFIG.to_env().items():
        monkeypatch.setenv(name, value)
    seen = []
    travelled = hook.make_hook(VERSION, CONFIG.to_env(), lambda: seen.append(session.is_active()))
    travelled()
    travelled()  # the process already has its settings
    assert seen == [True, True]
    report = hook.make_probe(VERSION, CONFIG.to_env(), attempt=False)()
    assert report["enabled"] and report["settings"] == CONFIG.to_env() and report["error"] == ""
    pickle.dumps(report)


def test_a_hook_given_by_its_path_is_run(monkeypatch):
    ran = []
    monkeypatch.setattr("os.sync", lambda: ran.append(1))
    worker.run_hook("os.sync")
    worker.run_hook(None)
    assert ran == [1]


def test_another_version_or_other_settings_stop_the_worker(monkeypatch):
    with pytest.raises(ConflictError, match=f"required 9.9.*found {re.escape(VERSION)}"):
        worker.start("9.9", CONFIG.to_env())
    with pytest.raises(NotPatchedError, match="switches the plugin off"):
        worker.start(VERSION, CONFIG.to_env())
    monkeypatch.setenv("JETRL_PRECISION", "fp8-rollout")
    with pytest.raises(ConflictError, match="settings of Ray worker on node"):
        worker.start(VERSION, CONFIG.to_env())


def test_a_worker_that_is_not_patched_is_not_repaired_by_the_probe():
    report = hook.make_probe(VERSION, CONFIG.to_env(), attempt=False)()
    assert not report["enabled"] and not session.is_active()
    status = nodes._status(NODE, report, None)
    assert "not patched" in str(nodes.judge(status, CONFIG))


NODE = {"NodeID": "ab", "NodeManagerAddress": "10.0.0.2", "NodeManagerHostname": "gpu-7", "NodeName": "10.0.0.2"}
GOOD = {"version": VERSION, "python": "/p", "error": "", "enabled": True, "failure": "", "settings": CONFIG.to_env()}


@pytest.mark.parametrize(
    ("answer", "reason", "kind", "says"),
    [
        (GOOD, None, None, ""),
        ({**GOOD, "version": "0.0.9"}, None, ConflictError, "found 0.0.9"),
        ({**GOOD, "version": f"{VERSION[:-1]}x"}, None, ConflictError, f"found {VERSION[:-1]}x. Install the same sources"),
        ({**GOOD, "settings": {**GOOD["settings"], "JETRL_BACKEND": "torch"}}, None, ConflictError, "'torch'"),
        ({**GOOD, "enabled": False, "failure": "VersionError: x"}, None, NotPatchedError, "VersionError: x"),
        (
            "WorkerCrashedError: died",
            {**GOOD, "version": None, "error": "No module"},
            NotPatchedError,
            "No module in /p",
        ),
        ("WorkerCrashedError: died", {**GOOD, "error": "VersionError: torch"}, NotPatchedError, "VersionError: torch"),
        ("WorkerCrashedError: died", GOOD, NotPatchedError, "WorkerCrashedError: died"),
        ("no answer within 1 s", "no answer within 1 s", NotPatchedError, "no answer"),
    ],
)
def test_the_verdict_on_a_node_names_it(answer, reason, kind, says):
    problem = nodes.judge(nodes._status(NODE, answer, reason), CONFIG)
    if kind is None:
        assert problem is None
    else:
        assert type(problem) is kind
        assert str(problem).startswith("node 10.0.0.2 (gpu-7): required ") and says in str(problem)
