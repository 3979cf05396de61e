"""Real engines in this process, one at a time, on tiny checkpoints that are made once per session."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

pytest.importorskip("vllm")

from tests import models


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """``checkpoint(variant, seed=0)``: path of a trained tiny model (``tests.models.VARIANTS``)."""
    root = tmp_path_factory.mktemp("models")

    def make(name: str, seed: int = 0) -> str:
        return models.variant(Path(root) / f"{name}-{seed}", name, seed)

    return make


@pytest.fixture
def engine() -> Iterator[Callable[..., Any]]:
    """``engine(job, max_model_len)``: a ``vllm.LLM`` in this process, shut down at the end of the test."""
    from jetrl_patch.adapters.vllm.sample import build_engine

    built: list[Any] = []
    _forget_groups()  # of an engine that another test could not build: vLLM would reuse them, without a group for experts
    gc.freeze()  # vLLM collects garbage four times a test, which would visit all that was imported

    def make(job: Any, max_model_len: int = 160) -> Any:
        llm = build_engine(job, max_model_len)
        built.append(llm)
        return llm

    yield make
    for llm in built:
        llm.llm_engine.engine_core.shutdown()
    built.clear()
    _forget_groups()


def _forget_groups() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
