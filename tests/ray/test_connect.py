"""The patched ``ray.init``: what reaches the original, and what happens around it. Without a cluster; test_cluster.py has one."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ray
from ray.job_config import JobConfig

import jetrl_patch
from jetrl_patch.adapters.ray import adapter
from jetrl_patch.errors import ConfigError, ConflictError, NotPatchedError
from tests.patches import applied


class Original:
    """Replaces ``ray.init``: records the call and its environment."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args, **kwargs):
        job = os.environ.get(adapter.JOB_CONFIG)
        self.calls.append((args, kwargs, job and json.loads(job)))
        return "context"


@pytest.fixture
def original(monkeypatch):
    """After ``enable()``, with nodes that all answer."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(adapter, "require_nodes", lambda config, installs: [])
    jetrl_patch.enable(precision="bf16")
    return Original()


def test_the_callers_arguments_and_ours(original):
    assert adapter.init(original)("local", num_cpus=3, runtime_env={"env_vars": {"A": "1"}}) == "context"
    ((args, kwargs, _),) = original.calls
    assert args == ("local",) and kwargs["num_cpus"] == 3
    assert kwargs["runtime_env"]["env_vars"]["A"] == "1"
    assert kwargs["runtime_env"]["env_vars"]["JETRL_PRECISION"] == "bf16"
    assert callable(kwargs["runtime_env"]["worker_process_setup_hook"])


def test_the_runtime_env_of_a_job_config_is_kept(original):
    adapter.init(original)(job_config=JobConfig(runtime_env={"env_vars": {"A": "1"}}))
    assert original.calls[0][1]["runtime_env"]["env_vars"]["A"] == "1"


def test_switched_off_or_connected_already_it_is_ray_alone(original, monkeypatch):
    given = {"env_vars": {"A": "1"}}
    with monkeypatch.context() as patch:
        patch.setattr(ray, "is_initialized", lambda: True)
        adapter.init(original)(runtime_env=given)
    jetrl_patch.disable()
    applied(adapter.init, [adapter.INIT], original)(runtime_env=given)
    assert [kwargs["runtime_env"] is given for _, kwargs, _ in original.calls] == [True, True]


def test_under_ray_job_submit_the_job_and_the_driver_agree(original, monkeypatch):
    job = {"runtime_env": {"env_vars": {"JETRL_PRECISION": "bf16", "B": "2"}}, "metadata": {"m": "n"}}
    monkeypatch.setenv(adapter.JOB_CONFIG, json.dumps(job))
    adapter.init(original)()
    _, kwargs, seen = original.calls[0]
    assert seen == {"runtime_env": {"env_vars": {"B": "2"}}, "metadata": {"m": "n"}}
    assert "B" not in kwargs["runtime_env"]["env_vars"]
    assert json.loads(os.environ[adapter.JOB_CONFIG]) == job
    monkeypatch.setenv(
        adapter.JOB_CONFIG, json.dumps({"runtime_env": {"env_vars": {"JETRL_PRECISION": "fp8-unified"}}})
    )
    with pytest.raises(ConflictError, match="JETRL_PRECISION='fp8-unified'"):
        adapter.init(original)()


def test_what_a_job_installs_counts_for_the_time_that_nodes_get(original, monkeypatch):
    given = []
    monkeypatch.setattr(adapter, "require_nodes", lambda config, installs: given.append(installs))
    monkeypatch.setenv(adapter.JOB_CONFIG, json.dumps({"runtime_env": {"pip": ["x"]}}))
    adapter.init(original)(runtime_env={"py_modules": ["y"]})
    assert given[0]["pip"] == ["x"] and given[0]["py_modules"] == ["y"]


def test_two_hooks_of_the_users_are_a_conflict_as_in_ray(original, monkeypatch):
    monkeypatch.setenv(adapter.JOB_CONFIG, json.dumps({"runtime_env": {"worker_process_setup_hook": "os.getcwd"}}))
    with pytest.raises(ConflictError, match="RAY_OVERRIDE_JOB_RUNTIME_ENV"):
        adapter.init(original)(runtime_env={"worker_process_setup_hook": "os.getpid"})
    adapter.init(original)(runtime_env={"worker_process_setup_hook": "os.getcwd"})
    monkeypatch.setenv("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    adapter.init(original)(runtime_env={"worker_process_setup_hook": "os.getpid"})
    assert len(original.calls) == 2


@pytest.mark.parametrize(("address", "variable"), [("ray://head:1", ""), (None, "ray://head:1"), ("auto", "ray://h:1")])
def test_ray_client_is_refused_before_it_connects(original, monkeypatch, address, variable):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    with pytest.raises(ConfigError, match="ray job submit"):
        adapter.init(original)(address)
    assert original.calls == []


def test_a_driver_whose_nodes_are_not_patched_is_disconnected(original, monkeypatch):
    def refuse(config, installs):
        raise NotPatchedError("node 10.0.0.2 (gpu-7)")

    closed = []
    monkeypatch.setattr(adapter, "require_nodes", refuse)
    monkeypatch.setattr(ray, "shutdown", lambda: closed.append(1))
    with pytest.raises(NotPatchedError, match="gpu-7"):
        adapter.init(original)()
    assert closed == [1]


def test_ray_init_is_patched_and_comes_back():
    before = ray.init
    status = jetrl_patch.enable(precision="bf16")
    assert ray.init is not before and "num_cpus" in inspect.signature(ray.init).parameters
    assert "ray.init" in {patch.target for patch in status.patches if patch.state == "applied"}
    jetrl_patch.disable()
    assert ray.init is before


@pytest.mark.parametrize(("mode", "raises"), [(ray.SCRIPT_MODE, True), (ray.WORKER_MODE, False)])
def test_enable_after_ray_init_is_an_error_in_a_driver_and_none_in_a_worker(monkeypatch, mode, raises):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(runtime_env={}))
    monkeypatch.setattr(ray._private.worker.global_worker, "mode", mode)
    assert adapter.is_connected_driver() is raises
    with pytest.raises(NotPatchedError, match=r"before ray\.init") if raises else contextlib.nullcontext():
        jetrl_patch.enable(precision="bf16")
    assert jetrl_patch.status().enabled is not raises


DRIVER = """
import jetrl_patch, ray
from jetrl_patch.errors import NotPatchedError

LOCAL = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80_000_000, "log_to_driver": False}

def enable(**settings):
    try:
        return jetrl_patch.enable(precision="fp8-rollout", **settings).enabled
    except NotPatchedError as error:
        assert not jetrl_patch.status().enabled
        return str(error)

@ray.remote(num_cpus=0)
def worker():
    return jetrl_patch.status().enabled

ray.init(**LOCAL)
print("late:", enable())
ray.shutdown()
print("in time:", enable())
ray.init(**LOCAL)
print("worker:", ray.get(worker.remote()))
jetrl_patch.disable()
print("other settings:", enable(sync_timeout=77))
print("the same settings:", enable())
"""


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_real_connection_is_that_of_the_settings_or_none(tmp_path):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JETRL_")}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], capture_output=True, text=True, cwd=tmp_path, timeout=280,
        env={**environ, "RAY_AUTH_MODE": "disabled"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    late = (
        "enable() in a Ray driver: required a call before ray.init, which passes these settings to the workers, found a "
        "connection that was made without them. Call enable() before ray.init and before `from ray import init`, or close the "
        "connection with ray.shutdown()."
    )
    expected = {"late": late, "in time": "True", "worker": "True", "other settings": late, "the same settings": "True"}
    assert {name: found[name] for name in expected} == expected
