"""The builder of the CPU environment: the sources of torch, and what a rerun keeps."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[1] / "scripts" / "environment.py"
PINS = {"build.txt": "setuptools==1\n", "cpu.txt": "# all\na==1\ntorch==2.13.0\nb==1\n", "docs.txt": "-c cpu.txt\na\nd==1 # d\n"}

Answer = Callable[[Sequence[str]], bool]


class Machine:
    """Records the commands instead of running them; ``answer`` says which of them succeed."""

    def __init__(self, module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module, self.folder = module, folder
        self.answer: Answer = lambda words: True
        self.said: list[list[str]] = []
        monkeypatch.setattr(module.subprocess, "run", self.run)
        monkeypatch.setattr(module.sys, "platform", "linux")
        monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
        monkeypatch.delenv("TORCH_INDEX", raising=False)
        for name, text in PINS.items():
            (folder / name).write_text(text)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        words = list(command[1:])
        self.said.append(words)
        if words[:2] == ["-m", "venv"]:
            (self.folder / "venv").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0 if self.answer(words) else 1)

    def build(self) -> None:
        first, *others = (self.folder / name for name in PINS)
        self.module.build(self.folder / "venv", first, others)

    def installs(self, text: str) -> list[list[str]]:
        """The calls of ``pip install`` with a word that contains the text."""
        return [words for words in self.said if "install" in words and any(text in word for word in words)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    spec = importlib.util.spec_from_file_location("environment", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Machine(module, tmp_path, monkeypatch)


def no_torch(words: Sequence[str]) -> bool:
    return "show" not in words


def test_pips_own_sources_come_first(machine: Machine) -> None:
    machine.answer = no_torch
    machine.build()
    (torch,) = machine.installs("torch")
    assert torch[-1] == "torch==2.13.0+cpu" and "--no-deps" in torch and "--index-url" not in torch
    assert machine.installs("a==1")[0][-3:] == ["a==1", "b==1", "d==1"]  # a name that another file pins is there once
    assert "--no-build-isolation" in machine.installs("a==1")[0]
    # packages that are built come after the tools, and before torch, whose build tools they would use
    order = [machine.said.index(words) for words in (machine.installs("setuptools==1")[0], machine.installs("a==1")[0], torch)]
    assert order == sorted(order)


def test_then_pytorchs_index_with_a_short_time_out(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.answer = lambda words: no_torch(words) and (not words[-1].endswith("+cpu") or "--index-url" in words)
    machine.build()
    _, torch = machine.installs("torch==")
    assert torch[torch.index("--index-url") + 1] == machine.module.TORCH_INDEX
    assert torch[torch.index("--timeout") + 1] == "10" and torch[torch.index("--retries") + 1] == "0"
    monkeypatch.setenv("TORCH_INDEX", "https://mirror.invalid/cpu")
    machine.said.clear()
    machine.build()
    assert "https://mirror.invalid/cpu" in machine.installs("torch==")[1]


def test_then_the_default_index_with_the_libraries_that_its_build_needs(machine: Machine) -> None:
    machine.answer = lambda words: no_torch(words) and not words[-1].endswith("+cpu")
    machine.build()
    torch = machine.installs("torch==")[-1]
    assert torch[-1] == "torch==2.13.0" and "--no-deps" not in torch and "--index-url" not in torch
    assert [words[-1] for words in machine.said[-2:]] == ["import torch", "d==1"]  # the pinned versions again
    machine.answer = lambda words: no_torch(words) and "torch==2.13.0" not in words[-1]
    with pytest.raises(machine.module.Stop, match=r"no source has torch==2\.13\.0; point pip at one"):
        machine.build()


def test_a_rerun_keeps_what_is_installed(machine: Machine) -> None:
    machine.answer = lambda words: no_torch(words) and "b==1" not in words
    with pytest.raises(machine.module.Stop, match="run make again"):
        machine.build()
    machine.said.clear()
    machine.answer = lambda words: True  # torch is there now
    machine.build()
    assert not [words for words in machine.said if "venv" in words]
    assert not machine.installs("torch")
    assert machine.installs("b==1")
    assert not (machine.folder / "venv" / machine.module.UNFINISHED).exists()


def test_other_pins_or_a_finished_environment_begin_anew(machine: Machine) -> None:
    machine.answer = lambda words: no_torch(words) and "b==1" not in words
    with pytest.raises(machine.module.Stop):
        machine.build()
    (machine.folder / "cpu.txt").write_text(PINS["cpu.txt"] + "e==1\n")
    machine.answer = no_torch
    for _ in range(2):
        machine.said.clear()
        machine.build()
        assert [words for words in machine.said if words[:3] == ["-m", "venv", "--clear"]]


def test_a_large_list_is_installed_in_pieces(machine: Machine) -> None:
    machine.answer = no_torch
    (machine.folder / "docs.txt").write_text("".join(f"p{n}==1\n" for n in range(100)))
    machine.build()
    assert [sum("==" in word for word in words) for words in machine.installs("==")] == [1, 40, 40, 22, 1]


def test_another_platform_is_refused_before_anything_is_made(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    with pytest.raises(machine.module.Stop, match=r"required Linux on x86-64, found .* on arm64"):
        machine.build()
    assert not machine.said
