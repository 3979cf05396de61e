"""Tests that need a GPU: ``pytest tests/gpu`` on a Hopper machine, with CUDA builds of torch and triton.

A file that says ``INTERPRETED = True`` also runs in Triton's interpreter on a CPU, with small sizes, so that its lines are known
to run before a GPU is there (``tests/kernels/test_gpu_files.py``).
"""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The current CUDA device; without one the test is skipped, or interpreted on the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if getattr(request.module, "INTERPRETED", False) and os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    pytest.skip(f"torch {torch.__version__} sees no CUDA device")
