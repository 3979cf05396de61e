"""A lock left by a killed build of a C++ extension stops a run with an error, not with an endless wait."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest
from torch.utils.file_baton import FileBaton

import jetrl_patch
from jetrl_patch.adapters.openrlhf import settings, startup
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError
from tests.openrlhf.test_settings import arguments

ORIGINAL = FileBaton.wait


@pytest.fixture(params=["TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"])
def lock(tmp_path, monkeypatch, request):
    """The lock of a build, in a folder that the variable chooses, with all files an hour old."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv(request.param, str(tmp_path))
    inner = "" if request.param == "TORCH_EXTENSIONS_DIR" else "torch_extensions/py311_cpu"
    folder = tmp_path / inner / "deepspeed_shm_comm"
    folder.mkdir(parents=True)
    assert FileBaton(str(folder / "lock")).try_acquire()
    (folder / "build.ninja").touch()
    for path in (folder / "lock", folder / "build.ninja", folder):
        os.utime(path, (time.time() - 3600,) * 2)
    return folder / "lock"


@pytest.fixture
def baton(lock, monkeypatch):
    """PyTorch's lock as an actor of a patched run waits for it, with half a second for ten minutes."""
    monkeypatch.setattr(startup, "LIMIT", 0.5)
    jetrl_patch.enable(precision="bf16", platform="cpu", upstream_fixes=True)
    return FileBaton(str(lock), wait_seconds=0.02)


def test_the_folders_are_pytorchs_own(lock, monkeypatch):
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    found = cpp_extension._get_build_directory("deepspeed_shm_comm", verbose=False)
    assert found.startswith(root) and len(lock.parent.parts) == len(found.split("/"))


@pytest.mark.parametrize("precision", ["fp8-unified", "bf16"])
def test_a_run_does_not_start_beside_an_old_lock(lock, precision):
    with pytest.raises(ConfigError, match=f"found {lock}, the lock of a build that changed no file for 60 minutes. Delete"):
        settings.check(arguments(), Config(precision=precision))
    assert lock.exists()


def test_a_build_in_progress_is_no_problem(lock):
    (lock.parent / "shm.o").touch()
    settings.check(arguments(), Config(precision="bf16"))


def test_waiting_ends_with_an_error_once_nothing_changes(baton, lock):
    with pytest.raises(ConfigError, match=f"extension deepspeed_shm_comm: .*{lock}"):
        baton.wait()


def test_waiting_goes_on_while_files_change(baton, lock, monkeypatch):
    """In all three times as long as a wait without changes may take. The clock moves only while the process sleeps."""
    clock = SimpleNamespace(now=0.0, time=time.time, monotonic=lambda: clock.now, sleep=lambda seconds: build())

    def build():
        clock.now += 0.8 * startup.LIMIT
        made = len(list(lock.parent.glob("*.o")))
        if made == 4:
            lock.unlink()
        else:
            (lock.parent / f"{made}.o").touch()
            os.utime(lock.parent / f"{made}.o", (clock.now + time.time(),) * 2)

    monkeypatch.setattr(startup, "time", clock)
    baton.wait()
    assert clock.now > 3 * startup.LIMIT


def test_disable_gives_back_pytorchs_wait(baton):
    assert FileBaton.wait is not ORIGINAL
    jetrl_patch.disable()
    assert FileBaton.wait is ORIGINAL
