"""A whole engine that compiles, as on a GPU in ``align="linear"``: every FP8 operator is opaque, and graphs on disk are its own.

vLLM compiles for CPUs too. The plugin has engines on a CPU run eagerly, because its C kernels cannot be traced; here they stand
behind the operators of the GPU backends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.compilation.counter import compilation_counter

import jetrl_patch
from jetrl_patch import backends
from jetrl_patch.adapters.vllm import engine as engines
from jetrl_patch.adapters.vllm import formats
from jetrl_patch.adapters.vllm.sample import generate
from jetrl_patch.measure.parity import Job

from .test_fused import Producing

pytestmark = pytest.mark.e2e


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of compiled graphs, each named by a hash, of engines that compile."""
    monkeypatch.setitem(backends._LOADED, "native", Producing())
    monkeypatch.setattr(formats, "available", lambda name, device_type: True)
    monkeypatch.setattr(engines, "_on_cpu", lambda: False)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    return tmp_path / "torch_compile_cache" / "torch_aot_compile"


def test_a_model_is_one_graph_and_each_setting_has_its_own(
    checkpoint: Callable[..., str], engine: Callable[..., Any], graphs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM compiles the whole model or fails; that it finds a graph again needs its backend for GPUs."""
    names = []
    for scale_format in ("pow2", "fp32"):
        torch._dynamo.reset()
        jetrl_patch.enable(precision="fp8-unified", align="linear", scale_format=scale_format)
        job = Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config, batch=2, engine={"enforce_eager": False})
        with monkeypatch.context() as patch:
            patch.delenv("TORCHDYNAMO_DISABLE")  # which a CPU sets
            llm = engine(job)
        compiled = compilation_counter.num_aot_compiles
        (sample,) = generate(llm, [[5, 6, 7, 8]], 8, 0.7)
        assert torch.tensor(sample.log_probs).isfinite().all() and len(sample.response) == 8
        assert compilation_counter.num_aot_compiles == compiled > 0  # nothing is compiled while it serves
        names.append({path.name for path in graphs.iterdir()})
        llm.llm_engine.engine_core.shutdown()
        jetrl_patch.disable()
    assert len(names[0]) == 1 and len(names[1]) == 2
