"""The trainer's step and the engine's trials on a double of an H100, in exact FP8: no CPU tensor, wrong dtype or host wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import forks

HERE = Path(__file__).resolve().parent
pytest.importorskip("triton")
#: what every step launches, whatever computes its products and its attention
COMMON = {"rms_norm_kernel", "rms_norm_backward_kernel", "weight_kernel", "rows_kernel"}


def run(script: str, library: Path, *words: str) -> str:
    """The last line that a script of this folder prints."""
    imports = ("tests.cuda_double.loaded", *forks.LIBRARIES)
    environ = {"TRITON_INTERPRET": "0", "CUDA_DOUBLE": str(library)}
    done = forks.run(HERE / f"{script}.py", str(library), *words, imports=imports, environ=environ)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("family", "backend", "attention", "kernels"),
    [
        ("qwen3", "deep_gemm", "flash3", {"DeepGEMM", "FlashAttention-3", "rotary_pair_kernel"}),
        ("qwen3", "cublaslt", "triton", {"cuBLASLt", "attention_kernel"}),
        ("qwen3_moe", "deep_gemm", "flash3", {"DeepGEMM", "FlashAttention-3", "route_kernel", "grouped_kernel"}),
        ("deepseek_v3", "deep_gemm", "triton", {"DeepGEMM", "latent_kernel", "route_kernel", "grouped_kernel"}),
        ("deepseek_v3", "triton", "triton", {"cuBLASLt", "fprop_kernel", "latent_kernel", "grouped_kernel"}),
        ("qwen3_next", "deep_gemm", "flash3", {"DeepGEMM", "FlashAttention-3", "conv_kernel"}),
    ],
)
def test_two_steps(library: Path, family: str, backend: str, attention: str, kernels: set[str]):
    launched = json.loads(run("trainer_step", library, family, backend, attention))
    assert launched.keys() >= COMMON | kernels, sorted(launched)
