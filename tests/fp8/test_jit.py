"""DeepGEMM's compiler is checked when the backend is chosen, not at the first product."""

from __future__ import annotations

import json
import os
import re
import types
from pathlib import Path

import pytest
import torch

from jetrl_patch import backends
from jetrl_patch.backends import capability, choose_backend
from jetrl_patch.errors import ConfigError
from jetrl_patch.native import machine as jit

FACTS = json.loads((Path(__file__).parents[1] / "anchors" / "deep_gemm.json").read_text())
VARIABLES = ("CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN", "DG_JIT_USE_NVRTC", "DG_JIT_NVCC_COMPILER", "DG_JIT_CACHE_DIR")


def program(path: Path, said: str = "", code: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{said}'\nexit {code}\n")
    path.chmod(0o755)
    return path


def nvcc(folder: Path, version: str = "12.9") -> Path:
    return program(folder / "bin" / "nvcc", f"Cuda compilation tools, release {version}, V{version}.86")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder with a toolkit, gcc on PATH, and nothing else."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    program(tmp_path / "path" / "gcc")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(jit, "TOOLKIT", str(tmp_path / "none"))
    jit._version.cache_clear()
    nvcc(tmp_path / "cuda")
    return tmp_path


def test_newer_versions_ask_for_more(machine, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(machine / "cuda"))
    nvcc(machine / "cuda", "12.8")
    assert jit.check_nvcc("2.6.1") == (True, "nvcc 12.8")
    for version in ("2.8.0", None):
        assert "need nvcc 12.9 or newer" in jit.check_nvcc(version)[1]
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")  # no longer read
    assert not jit.check_nvcc("2.8.0")[0]
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("DG_JIT_USE_NVRTC")
    assert jit.check_nvcc("2.6.1") == (
        False, "its compiled kernels need a folder, and neither DG_JIT_CACHE_DIR nor HOME is set",
    )  # fmt: skip
    monkeypatch.setenv("DG_JIT_CACHE_DIR", f"{machine}/one:{machine}/two")
    assert jit.check_nvcc("2.6.1")[0]


def test_the_version_is_read_without_an_import(tmp_path, monkeypatch):
    file = tmp_path / "__init__.py"
    spec = types.SimpleNamespace(origin=str(file))
    monkeypatch.setattr(capability.importlib.util, "find_spec", lambda name: spec if name == "deep_gemm" else None)
    for text, version in (("raise ValueError\n__version__ = '2.8.0'\n", "2.8.0"), ("no version = '1'\n", None)):
        file.write_text(text)
        assert capability.deep_gemm_version() == version
    spec.origin = None
    assert capability.deep_gemm_version() is None


def test_where_the_toolkit_is_looked_for(machine, monkeypatch):
    assert jit.check_nvcc("2.5.0") == (
        False, f"its kernels are compiled, and there is no CUDA toolkit: no CUDA_HOME, no nvcc on PATH, no {machine}/none",
    )  # fmt: skip
    monkeypatch.setattr(jit, "TOOLKIT", str(machine / "cuda"))
    assert jit.cuda_home() == machine / "cuda" and jit.check_nvcc("2.5.0") == (True, "nvcc 12.9")
    nvcc(machine / "onpath")
    monkeypatch.setenv("PATH", f"{machine}/onpath/bin:{machine}/path")
    assert jit.cuda_home() == machine / "onpath"
    monkeypatch.setenv("CUDA_PATH", "/second")
    assert jit.cuda_home() == Path("/second")
    monkeypatch.setenv("CUDA_HOME", "/first")
    assert jit.cuda_home() == Path("/first")


def test_what_is_asked_of_the_compiler(machine, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(machine / "cuda"))
    assert jit.check_nvcc("2.5.0") == (True, "nvcc 12.9")
    for setting, value, found in (
        ("DG_JIT_NVCC_COMPILER", nvcc(machine / "old", "12.2"), "need nvcc 12.3 or newer, and .*old/bin/nvcc is 12.2"),
        ("DG_JIT_NVCC_COMPILER", program(machine / "bad", "release 13.0", 1), "bad cannot be run"),
        ("DG_JIT_NVCC_COMPILER", machine / "nowhere", "nowhere cannot be run; install the CUDA toolkit"),
        ("CUDA_HOME", machine, "bin/nvcc cannot be run"),
        ("NVCC_CCBIN", "g++-99", r"nvcc needs a C\+\+ compiler, and g\+\+-99 is not on PATH"),
        ("DG_JIT_USE_NVRTC", "1", "needs the headers of CUDA in .*cuda/include"),
        ("DG_JIT_CACHE_DIR", machine / "path" / "gcc" / "cache", "which cannot be written; set DG_JIT_CACHE_DIR"),
    ):
        with monkeypatch.context() as here:
            here.setenv(setting, str(value))
            ok, reason = jit.check_nvcc("2.5.0")
            assert not ok and re.search(found, reason), reason
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", str(nvcc(machine / "new", "13.0")))
    assert jit.check_nvcc("2.5.0") == (True, "nvcc 13.0")
    (machine / "cuda" / "include").mkdir()
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    assert jit.check_nvcc("2.5.0")[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_that_cannot_be_written(machine, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(machine / "cuda"))
    (machine / "closed").mkdir(0o500)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(machine / "closed" / "cache"))
    assert not jit.check_nvcc("2.5.0")[0]


def only(monkeypatch, *names):
    """Only these modules are installed."""
    monkeypatch.setattr(capability, "_missing", lambda name: None if name in names else f"{name} {capability.ABSENT}")


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper GPU with DeepGEMM and triton installed; importing DeepGEMM is recorded."""
    imported = []

    def load(name):
        if name != "deep_gemm":
            return importlib_import(name)
        imported.append(name)
        return types.SimpleNamespace(fp8_gemm_nt=lambda *a: None)

    importlib_import = capability.importlib.import_module
    monkeypatch.setattr(capability, "check_hopper", lambda *sm: (True, "a GPU"))
    only(monkeypatch, "deep_gemm", "triton")
    monkeypatch.setattr(capability.importlib, "import_module", load)
    monkeypatch.setattr(capability, "deep_gemm_version", lambda: "2.8.0")
    backends._say_next.cache_clear()
    return imported


def test_without_nvcc_auto_takes_the_next_and_says_so(hopper, machine, caplog):
    assert choose_backend("auto", "cuda") == choose_backend("auto", "cuda") == "triton" and not hopper
    (record,) = caplog.records
    assert "deep_gemm is not used (its kernels are compiled, and there is no CUDA toolkit" in record.getMessage()
    assert record.getMessage().endswith("triton serves")
    with pytest.raises(ConfigError, match="'deep_gemm': required a backend that runs on this device, found its kernels are"):
        choose_backend("deep_gemm", "cuda")


def test_with_nvcc_it_serves(hopper, machine, monkeypatch, caplog):
    monkeypatch.setenv("CUDA_HOME", str(machine / "cuda"))
    assert choose_backend("auto", "cuda") == "deep_gemm" and hopper and not caplog.records
    assert capability.check_deep_gemm() == (True, "deep_gemm, nvcc 12.9")


def test_an_installation_without_it_is_no_warning(monkeypatch, caplog):
    monkeypatch.setattr(capability, "check_hopper", lambda *sm: (True, "a GPU"))
    only(monkeypatch, "triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backends._say_next.cache_clear()
    assert choose_backend("auto", "cuda") == "triton" and not caplog.records


@pytest.mark.parametrize("error", [OSError("libcudart.so.12: no such file"), RuntimeError(), ModuleNotFoundError(name="numpy")])
def test_a_broken_library_leaves_it_to_the_next_with_the_reason(error, monkeypatch, caplog):
    """To look for what vLLM ships imports vLLM, whose CUDA libraries may not load."""

    def find_spec(name):
        if name.startswith("vllm."):
            raise error
        return None if name == "deep_gemm" else types.SimpleNamespace(origin=None)

    monkeypatch.setattr(capability, "check_hopper", lambda *sm: (True, "a GPU"))
    monkeypatch.setattr(capability.importlib.util, "find_spec", find_spec)
    backends._say_next.cache_clear()
    assert choose_backend("auto", "cuda") == "triton"
    (record,) = caplog.records
    reason = f"vllm.third_party.deep_gemm cannot be imported ({type(error).__name__}: {error})"
    assert record.levelname == "WARNING" and reason in record.getMessage()
    with pytest.raises(ConfigError) as refused:
        choose_backend("deep_gemm", "cuda")
    assert reason in str(refused.value)


@pytest.mark.parametrize("revision", FACTS["sources"])
def test_the_rules_are_those_of_the_sources(revision):
    facts = FACTS["sources"][revision]
    assert tuple(facts["nvcc"]) == oldest(facts["version"])
    assert facts["CUDA"] == ["CUDA_HOME", "CUDA_PATH", jit.TOOLKIT]
    assert set(facts["variables"]) == {name for name in VARIABLES if name.startswith("DG_JIT")}


@pytest.mark.parametrize("wheel", FACTS["wheels"])
def test_the_rules_are_those_of_vllm_s_wheels(wheel):
    facts = FACTS["wheels"][wheel]
    assert tuple(facts["nvcc"]) == oldest(facts["version"]) and facts["NVRTC"] == (oldest(facts["version"]) < (12, 9))
    assert facts["exports"] and facts["CUDA"] and facts["variables"] == ["JIT_CACHE_DIR", "JIT_NVCC_COMPILER"]
    assert facts["c and FP32"] == {"1d1d": True, "1d2d": False} and facts["tiles below wgmma"] == {"1d1d": False, "1d2d": True}


def oldest(version):
    return next(nvcc for since, nvcc in jit.NVCC if tuple(map(int, version.split("."))) >= since)
