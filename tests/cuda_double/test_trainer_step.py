"""The trainer's step and the engine's trials on a double of an H100, in exact FP8: no CPU tensor, wrong dtype or host wait."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).resolve().parent
pytest.importorskip("triton")
#: what every step launches, whatever computes its products and its attention
COMMON = {"rms_norm_kernel", "rms_norm_backward_kernel", "weight_kernel", "rows_kernel"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled ``device.cpp``."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler: neither CXX, c++, g++ nor clang++")
    built = tmp_path_factory.mktemp("device") / "device.so"
    folders = [f"-I{path}" for path in include_paths()]
    folders += [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    words = [compiler, "-std=c++20", "-w", "-shared", "-fPIC", *folders, str(HERE / "device.cpp"), "-ltorch_cpu", "-lc10"]
    run = subprocess.run([*words, "-o", str(built)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return built


@pytest.mark.parametrize(
    ("family", "backend", "attention", "kernels"),
    [
        ("qwen3", "deep_gemm", "flash3", {"DeepGEMM", "FlashAttention-3", "rotary_pair_kernel"}),
        ("qwen3", "triton", "triton", {"fprop_kernel", "attention_kernel"}),
        ("qwen3_moe", "deep_gemm", "flash3", {"DeepGEMM", "FlashAttention-3", "route_kernel", "grouped_kernel"}),
        ("deepseek_v3", "deep_gemm", "triton", {"DeepGEMM", "latent_kernel", "route_kernel", "grouped_kernel"}),
        ("qwen3_next", "deep_gemm", "flash3", {"DeepGEMM", "FlashAttention-3", "conv_kernel"}),
    ],
)
def test_two_steps(library: Path, family: str, backend: str, attention: str, kernels: set[str]):
    words = [sys.executable, "-m", "tests.cuda_double.trainer_step", str(library), family, backend, attention]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(words, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-6000:]
    launched = json.loads(run.stdout.splitlines()[-1])
    assert launched.keys() >= COMMON | kernels, sorted(launched)
