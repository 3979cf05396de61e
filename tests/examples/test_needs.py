"""``make`` with a device: one line for what is missing, before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from examples.common import needs

ROOT = Path(__file__).resolve().parents[2]


def make(*words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of an outer make
    environ["PATH"] = os.pathsep.join(filter(None, (path, os.environ["PATH"])))
    return subprocess.run(["make", *words], capture_output=True, text=True, cwd=ROOT, env=environ)


def test_each_goal_gets_only_what_it_was_given() -> None:
    def last(*words: str) -> str:
        return make("-n", *words).stdout.splitlines()[-1]

    assert last("official", "SCRIPTS=a b").endswith("-m scripts.official a b  ")
    assert last("official", "SCRIPTS=a", "RUN=1").endswith('-m scripts.official a --run "" ')
    assert last("official", "SCRIPTS=a", "RUN=ppo").endswith("-m scripts.official a --run ppo ")
    assert last("demo").endswith("-m examples.trl.demo --device cpu ")
    assert last("demo-verl").endswith("-m examples.verl.demo --model words --device cpu ")
    environ = f"PYTHONPATH={ROOT / '.venv' / 'reasoning-gym'} "
    for goal, module in (("demo-verl", "verl.demo"), ("demo-openrlhf", "openrlhf.demo")):
        line = last(goal, "MODEL=smollm2")
        assert environ in line and f"-m examples.{module} --model smollm2" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("demo", "MODEL=gpt2"), "MODEL=gpt2: required words or smollm2. Write make demo-verl MODEL=smollm2 for a "
         "pretrained model"),
        (("demo-verl", "MODEL=smollm2", "DEVICE=cuda"), "MODEL=smollm2: required make demo-verl or make demo-openrlhf, "
         "on a CPU; "),
        (("compare", "MODEL=smollm2"), "found DEVICE=cpu, make compare"),
    ],
)
def test_a_model_that_the_demos_do_not_train(words: tuple[str, ...], says: str) -> None:
    done = make("-n", *words)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == "" and says in line


def test_a_model_in_the_environment_is_not_the_demos(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts of ``examples/*/h100`` take theirs from there."""
    monkeypatch.setenv("MODEL", "/path/to/Qwen3-8B-Base")
    assert "--model words" in make("-n", "demo-verl").stdout


@pytest.mark.parametrize("goal", ["demo", "compare", "bench"])
def test_a_device_that_does_not_exist(goal: str) -> None:
    done = make(goal, "DEVICE=gpu")
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert f"DEVICE=gpu: required cpu or cuda. Write make {goal} DEVICE=cuda for a GPU" in line


def test_an_environment_without_anything(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    done = make("demo", "DEVICE=cuda", path=str(tmp_path / "bin"))
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    first, *rest = done.stderr.splitlines()
    assert first.startswith("DEVICE=cuda: required a GPU and torch, rich, jetrl_patch, vllm, trl in ")
    assert "found no torch, no rich, no vllm, no trl, no jetrl_patch. Activate such an environment" in first
    assert len(rest) == 1 and rest[0].startswith("make: ***")


def test_a_machine_without_a_gpu_and_a_broken_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert needs.missing(["rich"]) == f"torch {torch.__version__}, which sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert needs.missing(["rich"]) == "" and needs.main(["rich"]) == 0
    real = needs.importlib.util.find_spec
    monkeypatch.setattr(needs.importlib.util, "find_spec", lambda name: None if name == "verl" else real(name))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert needs.missing(["verl", "rich"]) == "no verl"
    monkeypatch.setattr(needs.importlib.util, "find_spec", lambda name: object())
    assert needs.missing(["rich"]).startswith("a torch that cannot be imported (ModuleNotFoundError")
