"""``jetrl doctor``: it finds these problems and changes nothing; its table."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jetrl_patch import session as runtime
from jetrl_patch.cli.main import app
from jetrl_patch.patching import guards, patch
from tests.doctor.asked import doctor, named, verl

R = "actor_rollout_ref.rollout"


def test_this_machine_passes_and_nothing_is_changed() -> None:
    environ, loaded, finders = dict(os.environ), set(sys.modules), list(sys.meta_path)
    found = doctor(status=0)
    assert found["verdict"] == "a run would start"
    assert not runtime.is_active()
    assert dict(os.environ) == environ and sys.meta_path == finders
    assert not {"vllm", "verl", "openrlhf"} & {name.split(".")[0] for name in set(sys.modules) - loaded}
    targets = {patch["target"] for patch in found["patches"]}
    assert "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._build_module" in targets
    assert "vllm.v1.worker.gpu_worker.Worker.load_model" in targets
    assert named(found, "GEMM backend")["finding"] == "native"
    assert {patch["state"] for patch in found["patches"]} == {"waiting"}


def test_a_backend_that_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    from jetrl_patch.native import build

    monkeypatch.setattr(build, "available", lambda: (False, "no C compiler"))
    found = doctor(status=0)
    assert named(found, "compiler")["state"] == named(found, "GEMM backend")["state"] == "warning"
    assert named(doctor("--set", "backend=native", status=1), "GEMM backend")["finding"].endswith("no C compiler")


def test_a_target_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    real = guards.module_exists
    monkeypatch.setattr(patch, "module_exists", lambda name: name != "verl.utils.tracking" and real(name))
    check = named(doctor(status=1), "patches")
    assert check["state"] == "problem" and "verl.utils.tracking.Tracking.log is missing" in check["finding"]


@pytest.mark.parametrize(
    "words", [("--precision", "fp9"), ("--precision=bf16", "--align=exact"), ("--set", "nothing=1"), ("--set", "align")]
)
def test_options_that_are_wrong(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["doctor", *words])
    assert result.exit_code != 0
    assert result.exception is not None or "problem" in result.output


def test_the_table_says_what_to_do(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["doctor", *verl(model, f"{R}.quantization=fp8", "+jetrl=unified")])  # without --
    assert result.exit_code == 1
    assert "→ Set it to null" in result.output
    assert result.output.strip().splitlines()[-1] == "a run would NOT start: 1 problem"


def states(output: str) -> list[str]:
    """The column of states, in the order of the table."""
    return [found[1] for found in re.finditer(r"^ \S.*? +(problem|unknown|warning|change|ok|skipped) ", output, re.M)]


def test_the_table_shows_problems_first_and_what_is_right_last(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    wrong = ["trainer.n_gpus_per_node=3", f"{R}.quantization=fp8", "data.val_files=somebody/data"]
    words = ["python3.99", *verl(model, *wrong)[1:]]
    output = CliRunner().invoke(app, ["doctor", "--", *words]).output
    order = ["problem", "unknown", "warning", "change", "ok", "skipped"]
    ranks = [order.index(state) for state in states(output)]
    assert ranks == sorted(ranks) and {"problem", "unknown", "ok", "skipped"} <= set(states(output))
    assert "change" not in states(output)  # nothing enables the plugin
    assert len(ranks) == len(doctor("--", *words)["checks"])


def test_the_table_says_what_a_run_would_change(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    command = ["jetrl", "verl", "--fp8-unified", "--set", "decode_graphs=false", *verl(model)[3:]]
    output = CliRunner().invoke(app, ["doctor", "--", *command]).output
    found = states(output)
    assert found[:2] == ["change", "change"] and "change" not in found[2:]
    targets = [patch["target"] for patch in doctor("--", *command)["patches"]]
    number = sum(target.split(".")[0].split(":")[0] == "verl" for target in targets)
    assert f"verl: {number} patches (bug fixes: " in output and "vllm: " in output
    lines = output[: output.index("python  ")]
    assert "enforce_eager=True" in lines
    assert "openrlhf: " not in lines and "deepspeed" not in lines  # a run of verl never imports them
    alone = CliRunner().invoke(app, ["doctor"]).output
    assert "openrlhf: " in alone and "deepspeed" in alone
