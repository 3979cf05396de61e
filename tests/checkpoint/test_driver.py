"""The driver and the doctor find a checkpoint with other settings before a worker loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jetrl_patch import registry
from jetrl_patch.config import Config
from jetrl_patch.trainer import record
from tests.doctor.judged import judge
from tests.models import config_of

LINEAR, BF16 = Config(align="linear"), Config(precision="bf16")
R, M = "actor_rollout_ref.rollout", "actor_rollout_ref.model"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    config_of("qwen3").save_pretrained(tmp_path / "model")
    return tmp_path


def verl(place: Path, *extra: str) -> list[str]:
    return [f"{M}.path={place}/model", f"{R}.name=vllm", f"trainer.default_local_dir={place}/saved", *extra]


def openrlhf(place: Path, *extra: str) -> list[str]:
    return [
        "--actor.model_name_or_path", f"{place}/model", "--vllm.num_engines", "1", "--reward.remote_url", "reward.py",
        "--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "4",
        "--ckpt.path", f"{place}/saved", "--ckpt.load_enable", *extra,
    ]  # fmt: skip


def save(place: Path, framework: str, config: Config | None) -> Path:
    """The folders and the trackers that the frameworks write, with or without a record."""
    actor = {"verl": "global_step_20/actor", "openrlhf": "_actor/global_step20"}[framework]
    tracker = {"verl": "latest_checkpointed_iteration.txt", "openrlhf": "_actor/latest"}[framework]
    folder = place / "saved" / actor
    folder.mkdir(parents=True)
    (place / "saved" / tracker).write_text({"verl": "20", "openrlhf": "global_step20\n"}[framework])
    if config is not None:
        record.write(folder, config)
    return folder


def found(framework: str, arguments: list[str], config: Config) -> list[str]:
    launches = registry.launches(framework)
    return [str(problem) for problem in launches.problems(launches.read(arguments), config)]


COMMANDS: dict[str, Any] = {"verl": (verl, "trainer.default_local_dir"), "openrlhf": (openrlhf, "--ckpt.path")}


@pytest.mark.parametrize("framework", COMMANDS)
def test_another_precision_is_one_error_in_the_driver(framework: str, place: Path) -> None:
    command, setting = COMMANDS[framework]
    folder = save(place, framework, BF16)
    (problem,) = found(framework, command(place), LINEAR)
    assert problem.startswith(f"resuming {folder}: required precision='fp8-unified', found precision='bf16'. Use")
    assert problem.endswith(
        f"Use the checkpoint's settings, start anew with another {setting}, or set resume_any=True if the change is intended."
    )
    assert problem[:40] in str(judge(framework, command(place), LINEAR, here=False))
    assert found(framework, command(place), LINEAR.replace(resume_any=True)) == found(framework, command(place), BF16) == []


@pytest.mark.parametrize("framework", COMMANDS)
def test_a_checkpoint_without_a_record_counts_as_bf16(framework: str, place: Path) -> None:
    command, _ = COMMANDS[framework]
    save(place, framework, None)
    (problem,) = found(framework, command(place), LINEAR)
    assert "(no jetrl.json: saved without jetrl_patch)" in problem
    assert found(framework, command(place), BF16) == []


@pytest.mark.parametrize("framework", COMMANDS)
def test_other_optimizer_states_are_named_with_the_other_folder(framework: str, place: Path) -> None:
    command, setting = COMMANDS[framework]
    save(place, framework, LINEAR.replace(optimizer_states="8bit"))
    (problem,) = found(framework, command(place), LINEAR)
    assert f"Set optimizer_states='8bit', start anew with another {setting}, or load the checkpoint without" in problem


@pytest.mark.parametrize("framework", COMMANDS)
def test_a_run_that_resumes_nothing_has_nothing_to_compare(framework: str, place: Path) -> None:
    command, _ = COMMANDS[framework]
    assert found(framework, command(place), LINEAR) == []
    save(place, framework, BF16)
    plain = verl(place, "trainer.resume_mode=disable") if framework == "verl" else openrlhf(place)
    assert found(framework, [word for word in plain if word != "--ckpt.load_enable"], LINEAR) == []


@pytest.mark.parametrize("framework", COMMANDS)
def test_the_doctor_names_the_folder_that_a_run_resumes_from(framework: str, place: Path) -> None:
    command, _ = COMMANDS[framework]

    def checks(arguments: list[str]) -> list[tuple[str, str]]:
        return [(found.state, found.finding) for found in judge(framework, arguments, LINEAR) if found.name == "checkpoint"]

    assert checks(command(place)) == []
    folder = save(place, framework, LINEAR)
    step = folder.parent if framework == "verl" else folder
    assert checks(command(place)) == [("ok", f"the run resumes from {step}")]


def test_the_doctor_does_not_see_the_folder_that_verl_is_told_to_resume_from(place: Path) -> None:
    gone = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={place}/global_step_7"]
    (found,) = [check for check in judge("verl", verl(place, *gone), LINEAR) if check.name == "checkpoint"]
    assert found.state == "unknown" and f"resumes from {place}/global_step_7, and there is no such folder" in found.finding


def test_what_verl_resumes_from(place: Path) -> None:
    save(place, "verl", BF16)
    older = place / "elsewhere" / "global_step_5"
    record.write(older / "actor", LINEAR)
    path = [f"trainer.resume_from_path={older}", "trainer.resume_mode=resume_path"]
    assert found("verl", verl(place, *path), LINEAR) == []
    assert found("verl", verl(place, *path), BF16)[0].startswith(f"resuming {older}/actor")
    (place / "saved" / "latest_checkpointed_iteration.txt").write_text("cut sh")  # verl's own error
    assert found("verl", verl(place), LINEAR) == []


def test_states_that_verl_does_not_load_may_be_of_another_kind(place: Path) -> None:
    save(place, "verl", LINEAR.replace(optimizer_states="8bit"))
    without = "actor_rollout_ref.actor.checkpoint.load_contents=[model,extra]"
    assert found("verl", verl(place, without), LINEAR) == []


def test_megatrons_checkpoints_are_compared(place: Path) -> None:
    save(place, "verl", None)
    problems = found("verl", verl(place, "model_engine=megatron"), LINEAR.replace(backend="te"))
    assert [problem for problem in problems if problem.startswith("resuming")]
