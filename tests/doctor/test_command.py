"""Parsing launch commands as users write them."""

from __future__ import annotations

import pytest

from jetrl_patch.cli.doctor.launch import recognise
from jetrl_patch.errors import ConfigError

VERL, OPENRLHF = "verl.trainer.main_ppo", "openrlhf.cli.train_ppo_ray"


@pytest.mark.parametrize(
    ("command", "framework", "target", "arguments"),
    [
        (f"python -m {VERL} a=b +c=d", "verl", VERL, ["a=b", "+c=d"]),
        (f"/usr/bin/python3 -u -m {VERL}", "verl", VERL, []),
        ("python verl/trainer/main_ppo.py a=b", "verl", VERL, ["a=b"]),
        (
            f"torchrun --nproc_per_node 2 -m {OPENRLHF} --ds.zero_stage 3",
            "openrlhf",
            OPENRLHF,
            ["--ds.zero_stage", "3"],
        ),
        (f"ray job submit --address http://x -- python3 -m {OPENRLHF} -m", "openrlhf", OPENRLHF, ["-m"]),
        ("jetrl verl a=b", "verl", VERL, ["a=b"]),
        ("bin/jetrl openrlhf --ds.zero_stage 3", "openrlhf", OPENRLHF, ["--ds.zero_stage", "3"]),
        (f"jetrl run -m {VERL} a=b", "verl", VERL, ["a=b"]),
        (f"python -m jetrl_patch run -m {VERL} a=b", "verl", VERL, ["a=b"]),
        ("python train.py verl", None, "train.py", ["verl"]),
        ("python -m verl.experimental.other a=b", "verl", "verl.experimental.other", ["a=b"]),
        ("python verl.py", None, "verl.py", []),
        ("jetrl doctor", None, "jetrl doctor", []),
        ("make train", None, "make train", []),
    ],
)
def test_what_runs(command: str, framework: str | None, target: str, arguments: list[str]) -> None:
    for words in (command.split(), [command]):
        started = recognise(words)
        assert (started.framework, started.target, started.arguments) == (framework, target, arguments)
        assert started.by_us == ("jetrl" in command and framework is not None)


def test_what_it_asks_of_us() -> None:
    started = recognise(
        ["jetrl", "run", "--fp8-unified", "--align", "linear", "--set", "exclude=a,b", "-m", VERL, "x=1"]
    )
    assert started.overrides == {"precision": "fp8-unified", "align": "linear", "exclude": ("a", "b")}
    assert started.arguments == ["x=1"]
    assert recognise(["jetrl", "openrlhf", "--a", "b", "--fp8-unified"]).overrides == {"precision": "fp8-unified"}
    started = recognise(["env", "JETRL_PRECISION=bf16", "A=1=2", "python", "-m", VERL, "B=3"])
    assert started.environ == {"JETRL_PRECISION": "bf16", "A": "1=2"}
    with pytest.raises(ConfigError, match="unknown precision"):
        recognise(["jetrl", "verl", "--precision", "fp9"])
