"""Isolate every test: no user settings, no network, no session left over from another test."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from jetrl_patch.config.environment import without_settings
from tests.cpu_seconds import CpuSeconds
from tests.pairs import mark_others_slow

hypothesis.settings.register_profile("house", deadline=None)  # a busy machine may be slow
hypothesis.settings.load_profile("house")

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # torch 2.13's keys of graphs on disk ignore what a DTensor holds, so a graph of another subclass would run on FP8 shards
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}.items():
    os.environ.setdefault(name, value)
for name in os.environ.keys() - without_settings().keys():
    del os.environ[name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", type=Path, metavar="FILE", help="write the CPU-seconds of each test file to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.cpu_seconds is not None:
        config.pluginmanager.register(CpuSeconds(config.option.cpu_seconds))


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with real runs first, so that parallel workers finish at about the same time."""
    mark_others_slow(items)
    long = {item.path for item in items if item.get_closest_marker("e2e")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """Leave what the test files import out of garbage collection, which is as slow as there are objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_session_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable the session. Depends on monkeypatch, so that this happens before the environment is restored."""
    yield
    runtime = sys.modules.get("jetrl_patch.session")
    if runtime is not None and runtime.is_active():
        runtime.disable()
