"""What ``jetrl doctor`` says a launch validates and writes, and when it warns of a full disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetrl_patch import registry
from jetrl_patch.cli.doctor import memory
from jetrl_patch.cli.doctor.saves import check_saves
from jetrl_patch.config import Config
from jetrl_patch.trainer.rules import Check
from tests.models import build, config_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config_of("qwen3").save_pretrained(path)
    return path


def judged(framework: str, arguments: list[str], config: Config) -> tuple[Check, Check]:
    launches, config = registry.launches(framework), config.resolved()
    settings = launches.read(arguments)
    storage = launches.storage(settings, config)
    count = memory.count(launches.model_path(settings)[0], storage, config)
    validation, writes = check_saves(launches.saves(settings), storage, count, config)
    return validation, writes


def verl(model: Path, *extra: str) -> list[str]:
    return [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=vllm", *extra]


def openrlhf(model: Path, *extra: str) -> list[str]:
    needed = ("--data.prompt_dataset", "x", "--reward.remote_url", "http://reward", "--vllm.num_engines", "1")
    return ["--actor.model_name_or_path", str(model), *needed, *extra]


BYTES = sum(parameter.numel() for parameter in build("qwen3").parameters()) / 2**20


@pytest.mark.parametrize(
    ("settings", "config", "each"),
    [
        ((), Config(), 4 + 8),
        ((), Config(precision="bf16", optimizer_states="8bit"), 4 + 2.03),
        (("actor_rollout_ref.actor.checkpoint.save_contents=[hf_model,extra]",), Config(), 4),
        (("actor_rollout_ref.actor.checkpoint.save_contents=[model]",), Config(), 4),
    ],
)
def test_verl_writes_masters_and_moments_every_few_steps(
    model: Path, tmp_path: Path, settings: tuple[str, ...], config: Config, each: float
) -> None:
    folder = tmp_path / "not yet" / "here"
    where = (f"trainer.default_local_dir='{folder}'", "trainer.save_freq=20", "trainer.max_actor_ckpt_to_keep=2")
    _, writes = judged("verl", verl(model, *where, *settings), config)
    when = "every 20 steps and after the last one (trainer.save_freq), the last 2 kept"
    assert writes.state == "ok" and "are free here" in writes.finding
    assert writes.finding.startswith(f"a checkpoint of {each * BYTES:.1f} MiB {when}, in {folder}")


def test_verl_validates_first_and_writes_nothing_by_default(model: Path) -> None:
    validation, writes = judged("verl", verl(model), Config())
    assert validation.finding == "before training (trainer.val_before_train)" and writes.finding == "no checkpoint"
    validation, _ = judged("verl", verl(model, "trainer.test_freq=5"), Config())
    assert validation.finding.endswith(" and every 5 steps and after the last one (trainer.test_freq)")
    validation, _ = judged("verl", verl(model, "trainer.val_before_train=False"), Config())
    assert validation.finding == "none"


def test_openrlhf_writes_the_model_at_the_end(model: Path, tmp_path: Path) -> None:
    validation, writes = judged("openrlhf", openrlhf(model, "--ckpt.output_dir", str(tmp_path)), Config())
    assert validation.finding == "none" and writes.finding.startswith(f"the model, {2 * BYTES:.1f} MiB, at the end in {tmp_path}")
    more = ("--ckpt.save_steps", "10", "--ckpt.path", str(tmp_path), "--eval.dataset", "y", "--eval.steps", "5")
    validation, writes = judged("openrlhf", openrlhf(model, *more), Config())
    assert validation.finding == "every 5 steps (--eval.steps)"
    words = f"a checkpoint of {(2 + 4 + 8) * BYTES:.1f} MiB every 10 steps (--ckpt.save_steps), the last 3 kept, in {tmp_path};"
    assert writes.finding.startswith(words)


def test_a_disk_without_room_is_a_warning(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2e6))
    arguments = verl(model, f"trainer.default_local_dir='{tmp_path}'", "trainer.save_freq=1")
    _, writes = judged("verl", arguments, Config())
    assert writes.state == "warning" and writes.finding.endswith("; the disk has 1.9 MiB left here")
    _, writes = judged("verl", verl(model, "trainer.default_local_dir=hdfs://elsewhere", "trainer.save_freq=1"), Config())
    assert writes.state == "ok" and "free here" not in writes.finding


def test_a_size_that_is_not_known(tmp_path: Path) -> None:
    _, writes = judged("verl", verl(tmp_path, "trainer.save_freq=1"), Config())
    assert "a checkpoint of unknown size every 1 steps" in writes.finding
