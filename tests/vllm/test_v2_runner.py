"""vLLM's V2 model runner: engines in Triton's interpreter, and what is refused or runs eagerly on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode

from jetrl_patch import Config
from jetrl_patch.adapters.vllm import engine, graphs
from jetrl_patch.errors import ConflictError, ModelError

from .. import vision_models
from ..models import config_of

ROOT = Path(__file__).resolve().parents[2]


def arguments(eager: bool = False, mode: CUDAGraphMode | None = None) -> Any:
    compilation = SimpleNamespace(cudagraph_mode=mode)
    return SimpleNamespace(enforce_eager=eager, compilation_config=compilation, speculative_config=None)


@pytest.mark.parametrize("chosen", [None, "0", "1"])
def test_only_graphs_of_v1_are_asked_for(chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if chosen is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", chosen)
    said: list[str] = []
    monkeypatch.setattr(graphs.logger, "warning", lambda words, *values: said.append(words % values))
    args = arguments()
    assert graphs.asks_for_graphs(args, Config()) is (chosen != "1")
    assert args.enforce_eager is (chosen == "1") and len(said) == args.enforce_eager
    if chosen == "1":
        assert "without CUDA graphs" in said[0] and "found VLLM_USE_V2_MODEL_RUNNER=1. Unset it" in said[0]
        with pytest.raises(ConflictError, match="required the V1 model runner"):
            graphs.asks_for_graphs(arguments(), Config(decode_graphs=True))
    for other in (arguments(eager=True), arguments(mode=CUDAGraphMode.NONE)):
        assert not graphs.asks_for_graphs(other, Config()) and len(said) == args.enforce_eager


def test_no_graphs_of_steps_with_drafts_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    args = arguments()
    args.speculative_config = {"method": "ngram"}
    assert not graphs.asks_for_graphs(args, Config()) and args.enforce_eager
    with pytest.raises(ConflictError, match="required steps of one token per request"):
        graphs.asks_for_graphs(args, Config(decode_graphs=True))


def test_what_has_not_been_proven_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("device_problems", "sequence_parallel"):
        monkeypatch.setattr(engine, name, lambda *_: [])
    model = SimpleNamespace(head_dtype=torch.bfloat16, using_transformers_backend=lambda: False)

    def check(v2: bool, mode: CUDAGraphMode = CUDAGraphMode.NONE, watermark: Any = None, **parallel: bool) -> None:
        settings: Any = SimpleNamespace(
            model_config=model,
            use_v2_model_runner=v2,
            compilation_config=SimpleNamespace(cudagraph_mode=mode),
            parallel_config=SimpleNamespace(**parallel),
            watermark_config=watermark,
            speculative_config=None,
        )
        engine._check_exact(settings, config_of("qwen3"), Config())

    check(v2=False, mode=CUDAGraphMode.FULL_DECODE_ONLY)
    check(v2=True, enable_batch_sharded_sampling=False)
    with pytest.raises(ModelError, match="CUDA graphs of the V2 model runner"):
        check(v2=True, mode=CUDAGraphMode.FULL_DECODE_ONLY)
    with pytest.raises(ModelError, match="enable_batch_sharded_sampling, watermark_config: "):
        check(v2=True, watermark=object(), enable_batch_sharded_sampling=True)


@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(which: str) -> None:
    environ = {**os.environ, **vision_models.environ(), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, "tests/vllm/interpreted_v2.py"]
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-8000:] + run.stderr[-2000:]
