"""The OpenRLHF demo: its command line, its reading of the log, its reward."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from examples.common.recipe import Arm
from examples.common.tail import Follower
from examples.openrlhf.recipe import Recipe, switches
from jetrl_patch.cli.report.sources import openrlhf_step
from jetrl_patch.config.environment import without_settings

LINE = "(PPOTrainer pid=1) INFO 11-20 21:36:31 ppo_trainer.py:551] ✨ Global step 2: {'kl': 0.01, 'jetrl/k1_kl': -1e-05,"
LINE += " 'jetrl/bit_equal_fraction': 1.0, 'jetrl/tokens': 128, 'rollout/reward_mean': nan}\n"
EVALUATION = "INFO ✨ Evaluation completed in 0:00:03, global_step 2, eval_metrics: {'eval_words_pass1': 0.5}\n"


def test_the_follower_reads_steps_and_evaluations(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = Follower(log, openrlhf_step)
    assert follower.new() == []
    log.write_text("noise\n" + LINE + LINE[:90])
    ((step, found),) = follower.new()
    assert (step, found["kl"], found["jetrl/k1_kl"], found["jetrl/tokens"]) == (2, 0.01, -1e-05, 128.0)
    assert found["rollout/reward_mean"] != found["rollout/reward_mean"]
    with log.open("a") as file:
        file.write(LINE[90:] + EVALUATION)
    assert [(step, "eval_words_pass1" in found) for step, found in follower.new()] == [(2, False), (2, True)]
    assert follower.last == 2


@pytest.mark.parametrize(
    ("arm", "ours"),
    [
        (Arm(precision="bf16"), ["--precision", "bf16"]),
        (Arm(precision="fp8-unified"), ["--fp8-unified"]),
        (Arm(precision="fp8-unified", align="linear"), ["--fp8-unified", "--align", "linear"]),
    ],
)
def test_a_run_is_the_users_command_with_jetrl_run_before_it(tmp_path: Path, arm: Arm, ours: list[str]) -> None:
    launch = Recipe(steps=3).launch(arm, tmp_path, tmp_path / "t", tmp_path / "log")
    assert switches(arm) == ours
    assert launch.command[1:4] == ["-m", "jetrl_patch", "run"]
    assert launch.command[4 : 6 + len(ours)] == [*ours, "-m", "openrlhf.cli.train_ppo_ray"]
    assert launch.env == without_settings(launch.env)
    rows = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    assert len(rows) > 6000 and set(rows[0]) == {"input", "label", "datasource"}


def test_the_reward() -> None:
    reward = runpy.run_path("examples/words/reward.py")["reward_func"]
    prompt = "<|im_start|>user\nwhat is ten plus ten?<|im_end|>\n<|im_start|>assistant\n"
    for answer, score in (("it is 20<|im_end|>", 1.0), ("it is 20", 1.0), ("it is 2<|im_end|>", 0.0), ("", 0.0)):
        assert reward([prompt + answer], [prompt], ["20"])["rewards"] == score
