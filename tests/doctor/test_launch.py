"""``jetrl doctor`` about a command: whether the run would start, and what it would change."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jetrl_patch.config import Config
from jetrl_patch.trainer import record
from tests.doctor.asked import doctor, named, openrlhf, verl
from tests.openrlhf.run_openrlhf import arguments as openrlhf_arguments
from tests.openrlhf.run_openrlhf import make_task as openrlhf_task
from tests.verl.run_verl import command as verl_command
from tests.verl.run_verl import make_task as verl_task

R = "actor_rollout_ref.rollout"


def test_a_verl_run_that_would_start(model: Path) -> None:
    found = doctor("--", "JETRL_PRECISION=fp8-unified", "JETRL_DECODE_GRAPHS=0", *verl(model), status=0)
    assert named(found, "command")["finding"] == "verl.trainer.main_ppo, 7 arguments read"
    assert named(found, "switched on")["state"] == named(found, "verl settings")["state"] == "ok"
    assert f"{R}.enforce_eager=True, which was False" in named(found, "verl changes")["finding"]
    assert named(found, "model")["finding"] == str(model)


def test_the_runs_of_the_end_to_end_tests_would_start(tmp_path: Path) -> None:
    """These commands do start: see ``tests/verl/test_e2e.py`` and its OpenRLHF counterpart."""
    (ours, theirs) = (tmp_path / "verl", tmp_path / "openrlhf")
    ours.mkdir()
    theirs.mkdir()
    doctor("--", "JETRL_PRECISION=fp8-unified", *verl_command(verl_task(ours), "/tmp/jr"), status=0)
    doctor("--", "jetrl", "openrlhf", "--fp8-unified", *openrlhf_arguments(openrlhf_task(theirs)), status=0)


def test_a_preset_of_verl_is_read(model: Path) -> None:
    found = doctor("--", *verl(model, "+jetrl=linear", "jetrl.exclude=[o_proj]"), status=0)
    assert found["config"]["align"] == "linear" and found["config"]["exclude"] == ["o_proj"]
    assert named(found, "switched on")["state"] == "ok"
    found = doctor("--", "jetrl", "verl", "--fp8-unified", *verl(model, "+jetrl=linear")[3:], status=1)
    assert "required align='linear', found align='exact'" in named(found, "verl setting")["finding"]
    found = doctor("--", *verl(model, "+jetrl.precision=fp9"), status=1)
    assert "unknown precision 'fp9'" in named(found, "settings")["finding"]


def test_a_command_that_nothing_switches_on(model: Path) -> None:
    found = doctor("--", *verl(model), status=1)
    check = named(found, "switched on")
    assert (check["state"], check["finding"]) == ("problem", "nothing enables jetrl_patch: nothing would be patched")
    assert found["verdict"] == "nothing would be patched: the command would run without jetrl_patch"
    found = doctor("--", *verl(model, f"{R}.temperature=0"), status=1)
    assert found["verdict"] == "a run would NOT start: 2 problems"
    command = ["JETRL_PRECISION=bf16", sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *openrlhf(model)[3:]]
    assert "in every process that imports torch" in named(doctor("--", *command, status=0), "switched on")["finding"]
    found = doctor("--", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", *command, status=1)
    assert "keeps torch from loading it" in named(found, "switched on")["finding"]


def test_what_the_launcher_would_refuse(model: Path) -> None:
    command = ["jetrl", "verl", "--align", "linear", *verl(model)[3:]]
    assert "without a precision" in named(doctor("--", *command, status=1), "switched on")["finding"]
    doctor("--", "JETRL_PRECISION=fp8-unified", *command, status=0)
    command = ["JETRL_ENABLED=0", "jetrl", "verl", "--fp8-unified", *verl(model)[3:]]
    assert "JETRL_ENABLED=0" in named(doctor("--", *command, status=1), "switched on")["finding"]
    (check,) = doctor("--", "jetrl", "run", "--bad", status=1)["checks"]
    assert check["name"] == "command" and "found --bad" in check["finding"]


def test_verl_quantizes_twice(model: Path) -> None:
    found = doctor("--", *verl(model, f"{R}.quantization=fp8", "+jetrl=unified"), status=1)
    check = named(found, "verl setting")
    assert f"{R}.quantization" in check["finding"] and "found 'fp8'" in check["finding"]
    assert check["to_do"] == "Set it to null"


def test_verl_with_a_split_that_cuts_a_block_and_another_problem(model: Path) -> None:
    found = doctor("--", *verl(model, "+jetrl=unified", f"{R}.tensor_model_parallel_size=4", f"+{R}.min_tokens=2"), status=1)
    problems = [check["finding"] for check in found["checks"] if check["state"] == "problem"]
    assert len(problems) == 2 and found["verdict"] == "a run would NOT start: 2 problems"
    assert f"{R}.min_tokens" in problems[0]
    assert "tensor parallel size 4 cuts a block of 128" in problems[1] and "o_proj" in problems[1]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("nothing.there=3", "Could not override 'nothing.there'"),
        ("a b", "Hydra cannot compose"),
        ("+jetrl=other", "jetrl/other"),
        ("--config-name=gone", "gone"),
    ],
)
def test_a_verl_configuration_that_does_not_compose(model: Path, argument: str, message: str) -> None:
    check = named(doctor("--", *verl(model, argument), status=1), "command")
    assert check["state"] == "problem" and message in check["finding"] and "\n" not in check["finding"]


def test_a_configuration_folder_of_the_users_own(tmp_path: Path, model: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [pkg://verl.trainer.config]}\n"
        "defaults: [ppo_trainer, jetrl: unified, _self_]\n"
        f"jetrl: {{align: linear}}\n{R.split('.')[0]}: {{rollout: {{name: vllm}}, model: {{path: {model}}}}}\n"
    )
    # in a separate process: hydra imports verl for this, without plugins
    command = [sys.executable, "-m", "jetrl_patch", "doctor", "--json", "--", "python", "-m", "verl.trainer.main_ppo"]
    command += [f"--config-path={tmp_path}", "--config-name=mine"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 1, done.stdout + done.stderr  # verl's defaults: 8 GPUs, data in the home folder
    assert json.loads(done.stdout)["config"]["align"] == "linear"


def test_an_openrlhf_run_that_would_start(model: Path) -> None:
    found = doctor("--", "JETRL_DECODE_GRAPHS=0", *openrlhf(model), status=0)
    assert named(found, "switched on")["state"] == named(found, "openrlhf settings")["state"] == "ok"
    assert "enforce_eager" in named(found, "openrlhf changes")["finding"]


def test_openrlhf_with_a_split_that_cuts_a_block(model: Path) -> None:
    found = doctor("--", *openrlhf(model, "--vllm.tensor_parallel_size", "4"), status=1)
    assert "tensor parallel size 4 cuts a block of 128" in named(found, "openrlhf setting")["finding"]
    doctor("--", *openrlhf(model, "--vllm.tensor_parallel_size", "2"), status=0)
    left = doctor("--set", "on_cut=bf16", "--", *openrlhf(model, "--vllm.tensor_parallel_size", "4"), status=0)
    assert "cuts a block of 128 in 3 layers (o_proj;" in named(left, "openrlhf changes")["finding"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ds.zero_stag", "3", "--vllm.nothing", "1"], "unrecognized arguments"),
        (["--ds.zero_stage", "three"], "invalid int value: 'three'"),
        (["--rollout.n_samples_per_prompt", "1"], "group_norm requires n_samples_per_prompt > 1"),
        (["--help"], "Remove --help"),
    ],
)
def test_openrlhf_refuses_its_own_arguments(model: Path, arguments: list[str], message: str) -> None:
    check = named(doctor("--", *openrlhf(model, *arguments), status=1), "command")
    assert check["state"] == "problem" and message in check["finding"] + check["to_do"]


@pytest.mark.parametrize("estimator", ["gae", "group_norm"])
@pytest.mark.parametrize("start", [["jetrl", "openrlhf", "--fp8-unified"], ["python", "-m", "openrlhf.cli.train_ppo_ray"]])
def test_openrlhf_without_a_reward_is_one_message(model: Path, start: list[str], estimator: str) -> None:
    words = openrlhf(model)[3:]
    at = words.index("--reward.remote_url")
    command = [*start, *words[:at], *words[at + 2 :], "--algo.advantage.estimator", estimator]
    check = named(doctor("--", *command, status=1), "command")
    assert "required a reward" in check["finding"] and check["to_do"].startswith("Add --reward.remote_url FILE.py")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--rollout.micro_batch_size", "0"], "end in ZeroDivisionError"),
        (["--ds.ring_attn_size", "0"], "end in ZeroDivisionError"),
    ],
)
def test_a_traceback_of_openrlhfs_own_checks_is_one_message(model: Path, extra: list[str], says: str) -> None:
    check = named(doctor("--", *openrlhf(model, *extra), status=1), "command")
    assert says in check["finding"] and re.search(r"Look at line \d+ of .*train_ppo_ray\.py", check["to_do"])


def test_other_commands_cannot_be_judged() -> None:
    assert named(doctor("--", sys.executable, "train.py", status=2), "command")["state"] == "unknown"
    found = named(doctor("--", sys.executable, "-m", "verl.model_merger", status=2), "command")
    assert found["state"] == "unknown" and "only the arguments of verl.trainer.main_ppo" in found["finding"]


@pytest.mark.parametrize(
    ("program", "instead"),
    [
        ("verl.trainer.main_generation_server", "verl.trainer.main_ppo"),
        ("verl.trainer.sft_trainer", "verl.trainer.main_ppo"),
        ("openrlhf.cli.train_sft", "openrlhf.cli.train_ppo_ray"),
    ],
)
def test_a_program_that_is_not_supported_is_a_problem(program: str, instead: str) -> None:
    check = named(doctor("--", "python", "-m", program, status=1), "command")
    assert check["state"] == "problem" and program in check["finding"] and f"required {instead}" in check["finding"]


@pytest.mark.parametrize("command", [verl, openrlhf])
def test_a_mixture_of_experts_would_not_start(command: Any, tmp_path: Path) -> None:
    from tests.trainer.test_structure import experts

    experts().save_pretrained(tmp_path)
    for option in (("--align", "linear"), ("--precision", "fp8-rollout")):
        found = doctor(*option, "--", *command(tmp_path), status=1)
        assert any("num_experts=4" in check["finding"] for check in found["checks"] if check["state"] == "problem")


def test_a_checkpoint_of_another_precision_is_a_problem_of_the_command(tmp_path: Path, model: Path) -> None:
    actor = tmp_path / "global_step_20" / "actor"
    actor.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    record.write(actor, Config(precision="bf16"))
    command = ["jetrl", "verl", "--fp8-unified", *verl(model, f"trainer.default_local_dir={tmp_path}")[3:]]
    check = named(doctor("--", *command, status=1), "verl setting")
    assert f"resuming {actor}" in check["finding"] and "found precision='bf16'" in check["finding"]
    assert "another trainer.default_local_dir" in check["to_do"]
