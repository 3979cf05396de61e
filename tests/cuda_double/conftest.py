"""The compiled double of a device."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).resolve().parent


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
