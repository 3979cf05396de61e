"""Corrections in real verl runs: the identity if both sides agree, and verl's correction if they do not."""

from __future__ import annotations

import math
import re

import pytest

from jetrl_patch.config.corrections import KINDS
from tests.verl.run_verl import A, Run, assert_identity, make_task

KINDS_ON = [kind for kind in KINDS if kind != "none"]
C = "algorithm.rollout_correction"

TIMEOUT = 900
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT + 100)]
#: what a run's line says: ours, verl's own of its correction, and whether the step was sound
_FIGURES = re.compile(r"((?:jetrl|rollout_corr|actor)/\w+):([^ ]+)")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """No tokens beyond the tokenizer, so that outside exact mode the whole mismatch is the model's."""
    return make_task(tmp_path_factory.mktemp("correction"), fill=True)


def steps_of(task, *extra: str, v1: bool = False, **environ: str) -> list[dict[str, float]]:
    run = Run(task, f"trainer.use_v1={v1}", *extra, environ={"CUDA_VISIBLE_DEVICES": "", **environ})
    assert run.wait(TIMEOUT) == 0, run.failure
    lines = [line for line in run.text.splitlines() if "step:" in line and "training/global_step" in line]
    steps = [{k: float(re.sub(r"^np\.\w+\((.*)\)$", r"\1", v)) for k, v in _FIGURES.findall(line)} for line in lines]
    assert len(steps) == 2, run.failure
    for step in steps:
        assert step["jetrl/tokens"] >= 16 and math.isfinite(step["actor/grad_norm"]), step
    return steps


def assert_mean_is_verls(step: dict[str, float]) -> None:
    assert step["rollout_corr/rollout_is_mean"] == pytest.approx(step["jetrl/correction_weight_mean"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS_ON)
def test_where_both_sides_agree_every_correction_is_the_identity(task, kind) -> None:
    for step in steps_of(task, JETRL_PRECISION="fp8-unified", JETRL_CORRECTION=kind):
        assert_identity(step)
        assert step["actor/grad_norm"] > 0
        if kind == "geo-mis":
            assert step["rollout_corr/rollout_rs_masked_fraction"] == 0.0
        else:
            assert step["rollout_corr/rollout_is_min"] == step["rollout_corr/rollout_is_max"] == 1.0


@pytest.mark.slow
def test_acr_where_both_sides_agree(task) -> None:
    for step in steps_of(task, JETRL_PRECISION="fp8-unified", JETRL_CORRECTION="tis", JETRL_ACR="1"):
        assert_identity(step)
        assert step["rollout_corr/rollout_is_min"] == step["rollout_corr/rollout_is_max"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bounds"),
    [
        ("tis", "1.001"), ("seq-tis", "1.001"), ("mis", "1.001"), ("seq-mis", "1.001"), ("icepop", "0.98,1.01"),
        ("geo-mis", "0.9995,1.0005"),
    ],
)  # fmt: skip
def test_where_they_do_not_agree_verl_applies_what_we_log(task, kind, bounds) -> None:
    for step in steps_of(task, JETRL_PRECISION="fp8-rollout", JETRL_CORRECTION=kind, JETRL_CORRECTION_BOUNDS=bounds):
        high = float(bounds.rpartition(",")[2])
        assert 0.0 < step["jetrl/clipped_fraction"] < 1.0 or kind == "geo-mis"
        if kind == "geo-mis":
            assert step["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(step["jetrl/masked_fraction"])
            continue
        assert step["jetrl/correction_weight_max"] <= high * (1 + 1e-6)
        assert_mean_is_verls(step)
        dropped = step["jetrl/clipped_fraction"] if kind in ("mis", "seq-mis", "icepop") else 0.0
        assert step["jetrl/masked_fraction"] == dropped
        assert (step["jetrl/correction_weight_min"] == 0.0) == (dropped > 0)


@pytest.mark.slow
@pytest.mark.parametrize("v1", [False, True])
def test_acr_with_a_mismatch(task, v1) -> None:
    environ = {"JETRL_PRECISION": "fp8-rollout", "JETRL_CORRECTION": "tis", "JETRL_CORRECTION_BOUNDS": "1.001"}
    for step in steps_of(task, v1=v1, JETRL_ACR="1", **environ):
        assert 0.0 < step["jetrl/clipped_fraction"] < 1.0 and step["actor/grad_norm"] > 0
        assert_mean_is_verls(step)


@pytest.mark.slow
@pytest.mark.parametrize("v1", [False, True])
def test_policy_gradients_in_bypass_mode(task, v1) -> None:
    """PG-Seq-TIS with two mini-batches per step: equality is measured over the first, scored with the weights that sampled."""
    extra = [f"{C}.bypass_mode=true", f"{C}.loss_type=reinforce", f"{A}.ppo_mini_batch_size=2"]
    for step in steps_of(task, *extra, v1=v1, JETRL_PRECISION="fp8-unified", JETRL_CORRECTION="seq-tis"):
        assert_identity(step)
        assert "rollout_corr/rollout_is_mean" in step  # present only if the bypass loss ran


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "seq-mis"])
def test_gspo_and_ppo_clip_in_bypass_mode(task, kind) -> None:
    extra = (
        [f"{A}.policy_loss.loss_mode=gspo", f"{A}.loss_agg_mode=seq-mean-token-mean"]
        if kind != "none"
        else [f"{C}.bypass_mode=true"]
    )
    for step in steps_of(task, *extra, JETRL_PRECISION="fp8-unified", JETRL_CORRECTION=kind):
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["actor/grad_norm"] > 0
