"""The stability example: its losses, its verdict, and a real run of two steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from examples.stability import compare, sanity
from examples.stability.arms import Arm, Setting
from examples.stability.loop import TRAINERS_ACCURACY, States
from examples.stability.objective import CLIP, Batch, loss, prepare
from examples.stability.picture import draw, smoothed
from examples.stability.sweep import ROOT, Job, is_whole, sweep
from jetrl_patch.cli.report import Run


def random_batch(arm: Arm, rows: int = 8, tokens: int = 11) -> tuple[Batch, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=g)
    mask = torch.arange(tokens) < lengths[:, None]
    old = -torch.rand(rows, tokens, generator=g) * mask
    rollout = (old + 0.5 * torch.randn(rows, tokens, generator=g)) * mask
    new = (old + 0.3 * torch.randn(rows, tokens, generator=g)) * mask
    rewards = torch.randint(0, 2, (rows,), generator=g).float()
    return prepare(arm, old, rollout, mask, rewards, group=4), new


def token_by_token(arm: Arm, batch: Batch, new: torch.Tensor) -> float:
    total = 0.0
    for b in range(new.shape[0]):
        for t in range(new.shape[1]):
            if not batch.mask[b, t]:
                continue
            rho = float((batch.old[b, t] - batch.rollout[b, t]).double().exp())
            weight = {"none": 1.0, "tis": min(rho, 2.0), "mis": rho if rho <= 2.0 else 0.0}[arm.correction]
            ratio = float((new[b, t] - batch.old[b, t]).double().exp())
            a = float(batch.advantages[b, 0])
            clipped = min(max(ratio, 1 - CLIP[0]), 1 + CLIP[1])
            total -= weight * min(ratio * a, clipped * a)
    return total / float(batch.mask.sum())


@pytest.mark.parametrize("correction", ["none", "tis", "mis"])
def test_the_loss_is_the_formula_and_does_not_depend_on_micro_batches(correction: str) -> None:
    arm = Arm(precision="fp8-rollout", correction=correction)
    batch, new = random_batch(arm)
    whole, clipped = loss(arm, batch, new, slice(0, 8))
    assert float(whole) == pytest.approx(token_by_token(arm, batch, new), rel=1e-5)
    parts = [loss(arm, batch, new[rows], rows) for rows in (slice(0, 3), slice(3, 8))]
    assert float(sum(part for part, _ in parts)) == pytest.approx(float(whole), rel=1e-5)
    assert float(sum(share for _, share in parts)) == pytest.approx(float(clipped), rel=1e-5) and 0 < float(clipped) < 1


def test_groups_without_a_difference_teach_nothing() -> None:
    arm = Arm(precision="bf16")
    mask = torch.ones(4, 3, dtype=torch.bool)
    batch = prepare(arm, torch.zeros(4, 3), torch.zeros(4, 3), mask, torch.ones(4), group=4)
    assert float(loss(arm, batch, torch.zeros(4, 3), slice(0, 4))[0]) == 0.0


def test_a_mini_batch_is_a_batch_of_its_own() -> None:
    arm = Arm(precision="bf16", correction="tis")
    batch, new = random_batch(arm)
    part = batch.part(slice(4, 8))
    assert torch.equal(part.advantages, batch.advantages[4:]) and part.mask.shape == (4, 11)
    assert float(loss(arm, part, new[4:], slice(0, 4))[0]) == pytest.approx(token_by_token(arm, part, new[4:]), rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"task": "chess"}, "task: required one of words, smollm2, found 'chess'"),
        ({"old": "none"}, "old: required one of trainer, rollout"),
        ({"steps": 0}, "steps: required more than 0, found 0"),
        ({"temperature": 0.0}, "temperature: required more than 0"),
        ({"group": 1}, "group: required 2 answers or more"),
        ({"prompts": 8, "updates": 3}, "updates: required a divisor of the 8 questions of a step, found 3"),
    ],
)
def test_a_setting_without_sense_is_one_error(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setting(**wrong)


def test_a_setting_says_what_it_changes() -> None:
    setting = Setting(learning_rate=1e-5, task="smollm2", response_tokens=32, pool=Path("p.json"))
    assert setting.changed() == {"learning_rate": 1e-5, "task": "smollm2", "response_tokens": 32, "pool": "p.json"}
    assert Setting().arguments() == ["--learning-rate", "0.0002"]
    assert setting.arguments()[-4:] == ["--response-tokens", "32", "--pool", "p.json"]


def test_arms_say_who_quantizes() -> None:
    assert Arm(precision="int3-rollout").bits == 3 and Arm(precision="int3-rollout").config.precision == "bf16"
    assert (
        Arm(precision="int8-rollout").bits is None and Arm(precision="int8-rollout").config.precision == "int8-rollout"
    )
    assert Arm(precision="fp8-unified").config.exact
    assert Arm(precision="int3-rollout", correction="tis").name == "int3-rollout+tis"
    linear = Arm(precision="fp8-unified", align="linear")
    assert (linear.slug, linear.config.exact) == ("fp8-unified-linear", False)
    small_cache = Arm(precision="fp8-unified", kv_cache="fp8")
    assert (small_cache.slug, small_cache.config.kv_cache) == ("fp8-unified-kv-fp8", "fp8")
    assert small_cache.arguments()[-2:] == ["--kv_cache", "fp8"]


def made_up(accuracy: dict[int, float], reward: float, steps: int = 100) -> Run:
    data: dict[int, dict[str, object]] = {
        step: {"critic/score/mean": reward, "jetrl/logp_abs_diff_mean": 0.0, "jetrl/bit_equal_fraction": 1.0}
        for step in range(steps)
    }
    for step, value in accuracy.items():
        data.setdefault(step, {})["val-core/words/acc/mean@1"] = value
    return Run("bf16", "none", 0, data)


def test_an_arm_is_judged_by_its_last_steps() -> None:
    found = compare.judged(made_up({0: 0.3, 20: 0.99, 60: 0.5, 100: 0.7}, reward=0.4))
    assert (found["best"], found["last"], found["worst"]) == (0.99, pytest.approx(0.6), 0.5)
    assert found["reward"] == pytest.approx(0.4) and found["mismatch"] == 0.0


def test_the_picture_and_both_tables_are_drawn(tmp_path: Path) -> None:
    runs = {
        Job(arm=Arm(precision="bf16"), seed=seed, setting=Setting(steps=100)): made_up({0: 0.3, 100: 0.9}, reward)
        for seed, reward in ((0, 0.96), (1, 0.94))
    }
    assert draw(runs, tmp_path / "p.png").stat().st_size > 10_000
    assert compare.table(runs, "t").row_count == 1
    assert sanity.table(runs, "t").row_count == len(sanity.ALGORITHMS)
    assert sanity.peak(next(iter(runs.values()))) == pytest.approx(0.96)


def test_algorithms_are_one_run_when_all_but_the_clock_is_equal() -> None:
    def runs(**changed: float) -> dict[Job, Run]:
        found = {}
        for number, name in enumerate(sanity.ONE_POLICY):
            correction, objective = sanity.ALGORITHMS[name]
            arm = Arm(precision="fp8-unified", correction=correction, objective=objective)
            run = made_up({}, reward=0.5, steps=2)
            run.steps[1]["timing_s/step"] = float(number)
            run.steps[1].update(changed if name == "PPO-Seq-MIS" else {})
            found[Job(arm=arm, seed=0, setting=Setting(steps=2))] = run
        return found

    assert sanity.one_run(runs(), "fp8-unified") == [True]
    assert sanity.one_run(runs(**{"actor/grad_norm": 1.0}), "fp8-unified") == [False]
    assert sanity.one_run(runs(), "bf16") == []


def test_a_run_that_came_to_its_end_is_kept_and_no_other(tmp_path: Path) -> None:
    job = Job(arm=Arm(precision="bf16"), seed=0, setting=Setting(steps=2, learning_rate=1e-3))
    path = tmp_path / f"{job.slug}.jsonl"
    data = {"setting": job.setting.changed(), "data": {"critic/score/mean": 0.5}}
    lines = [json.dumps({"step": step, **data}) for step in range(3)]
    console = Console(quiet=True)
    path.write_text("\n".join(lines))
    assert list(sweep([job], tmp_path, console, resume=True)) == [job]
    for other, text in ((job, lines[:2]), (replace(job, setting=Setting(steps=2)), lines)):
        path.write_text("\n".join(text))
        assert not is_whole(other, tmp_path)


def test_smoothing_takes_means_of_ten() -> None:
    assert smoothed({step: float(step) for step in range(20)}) == {9: 4.5, 19: 14.5}


def test_a_run_goes_on_before_its_last_saved_trainer_and_only_its_own(tmp_path: Path) -> None:
    states = States(tmp_path / "temperature-1.5-bf16-seed0.jsonl")
    states.out.write_text("".join(json.dumps({"seed": 0, "step": step}) + "\n" for step in range(5)))
    assert states.lines({"seed": 0}) == []
    for step in (2, 4):
        states.path(step).touch()
    assert [json.loads(line)["step"] for line in states.lines({"seed": 0})] == [0, 1, 2, 3]
    assert states.lines({"seed": 1}) == []
    states.remove(but=2)
    assert len(states.lines({"seed": 0})) == 2
    states.remove()
    assert states.steps() == [] and states.out.exists()


def start(job: Job, out: Path, resume: bool = False) -> list[dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("JETRL_")}
    env |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *job.command(out, resume)[1:]]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.e2e
@pytest.mark.parametrize("precision", ["fp8-unified", pytest.param("int3-rollout", marks=pytest.mark.slow)])
def test_a_real_run(precision: str, tmp_path: Path) -> None:
    job = Job(arm=Arm(precision=precision, correction="tis"), seed=1, setting=Setting(steps=2, prompts=8, updates=2))
    lines = start(job, tmp_path / "run.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert 0.1 < lines[0]["data"]["val-core/words/acc/mean@1"] < 0.6
    equal = [line["data"]["jetrl/bit_equal_fraction"] for line in lines[:2]]
    mean = [line["data"]["jetrl/logp_abs_diff_mean"] for line in lines[:2]]
    if precision == "fp8-unified":
        assert equal == [1.0, 1.0] and mean == [0.0, 0.0]
    else:
        assert all(value < 1.0 for value in equal) and all(value > 0.01 for value in mean)
        # rounding to a few bits changes the accuracy even before the first step
        assert lines[0]["data"][TRAINERS_ACCURACY] != lines[0]["data"]["val-core/words/acc/mean@1"]


@pytest.mark.e2e
def test_a_stopped_run_goes_on_to_the_same_end(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    setting = Setting(steps=3, prompts=4, updates=2, temperature=1.2, held_out=32, validate_every=3)
    job = Job(arm=Arm(precision="fp8-unified"), seed=0, setting=setting)
    undisturbed = start(job, out, resume=True)
    assert States(out).steps() == [2]
    kept = out.read_text().splitlines(keepends=True)[:3]
    out.write_text("".join(kept)[:-20])  # stopped while it wrote step 2
    resumed = start(job, out, resume=True)
    assert [line["step"] for line in resumed] == [0, 1, 2, 3]
    for before, after in zip(undisturbed, resumed, strict=True):
        without_times = [{k: v for k, v in line["data"].items() if "timing" not in k} for line in (before, after)]
        assert without_times[0] == without_times[1]
