"""Tests that need a GPU: ``pytest tests/gpu`` on a Hopper machine, with CUDA builds of torch and triton."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def device() -> torch.device:
    """The current CUDA device; without one, every test here is skipped."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())
