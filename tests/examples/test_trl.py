"""The demo in TRL: a real run of two small steps, followed to its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.common.recipe import TASKS, Arm
from examples.common.show import run_all
from examples.common.tail import Follower
from examples.trl.recipe import Recipe, step_of
from tests.ray.cluster import free_port
from tests.trl import LIMIT, TRL, needs_trl


def test_the_follower_leaves_out_the_summary_of_a_run(tmp_path: Path) -> None:
    lines = [{"step": 0, "eval_reward": 0.25}, {"step": 1, "reward": 0.5}, {"step": 1, "train_runtime": 3.0}]
    follower = Follower(tmp_path / "log", step_of)
    assert follower.new() == []
    (tmp_path / "log").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2')
    assert follower.new() == [(0, {"eval_reward": 0.25, "eval_words_pass1": 0.25}), (1, {"reward": 0.5})]
    assert follower.last == 1


@needs_trl
@pytest.mark.e2e
@pytest.mark.timeout(LIMIT)
def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TRL))
    monkeypatch.setenv("MASTER_PORT", str(free_port()))  # as in tests.trl
    recipe = Recipe.of(TASKS["words"], steps=2, prompts=4, samples=4, held_out=8)
    assert run_all(recipe, [Arm(precision="fp8-unified")], tmp_path, "title", "subtitle") == 0
    said = capsys.readouterr().out
    assert "every token equal: yes, all " in said and said.count("held-out accuracy") == 2  # before and after
    assert (tmp_path / "report.html").exists()
