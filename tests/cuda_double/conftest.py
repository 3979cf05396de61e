"""The CUDA device of these tests, compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cuda_double.compiled import compile_device


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled ``device.cpp``."""
    if torch.version.cuda is not None:
        pytest.skip("the double stands for the CUDA libraries of a torch that has none")
    built = compile_device(tmp_path_factory.mktemp("device"))
    if built is None:
        pytest.skip("no C++ compiler: neither CXX, c++, g++ nor clang++")
    return built
