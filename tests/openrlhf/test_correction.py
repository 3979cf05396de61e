"""Corrections in OpenRLHF: the flags set and refused, its loss with the plugin's weights, and real runs."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf import correction, metrics, settings, state
from jetrl_patch.config import Config
from jetrl_patch.config.corrections import KINDS, interval
from jetrl_patch.errors import ConfigError
from jetrl_patch.measure.corrections import acr_loss, correct, ppo_loss, ratio
from jetrl_patch.measure.mismatch import applied
from tests.correction.batches import batches
from tests.openrlhf.run_openrlhf import Run, make_task

KINDS_ON = [kind for kind in KINDS if kind != "none"]
OURS = ["seq-tis", "seq-mis", "geo-mis"]
DEFAULT = {"level": "off", "mode": "mask", "gating": "ratio", "threshold": [0.5, 5.0]}


def arguments(loss: str = "ppo", **flags: Any) -> SimpleNamespace:
    advantage = SimpleNamespace(**{f"is_correction_{name}": value for name, value in {**DEFAULT, **flags}.items()})
    return SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage), actor=SimpleNamespace(policy_loss_type=loss),
        vllm=SimpleNamespace(enforce_eager=True), train=SimpleNamespace(async_enable=False),
    )  # fmt: skip


def flags(args: SimpleNamespace) -> list[Any]:
    return [getattr(args.algo.advantage, f"is_correction_{name}") for name in DEFAULT]


# what is set


@pytest.mark.parametrize(
    ("kind", "bounds", "expected"),
    [
        ("tis", None, ["token", "clip", "ratio", [0.0, 2.0]]),
        ("mis", 4.0, ["token", "mask", "ratio", [0.0, 4.0]]),
        ("icepop", None, ["token", "mask", "ratio", [0.5, 5.0]]),
        ("seq-tis", None, list(DEFAULT.values())),
        ("geo-mis", None, list(DEFAULT.values())),
    ],
)
def test_openrlhfs_flags_are_set_where_it_has_the_formula(kind, bounds, expected) -> None:
    config, args = Config(correction=kind, correction_bounds=bounds), arguments()
    changes = settings.complete(args, config)
    assert flags(args) == expected and bool(changes) == (kind not in OURS)
    assert not list(correction.problems(args, config))  # a second check accepts it
    kept = correction.in_use(args.algo.advantage, config)
    assert kept == (kind, interval(kind, config.correction_bounds))


def test_acr_leaves_openrlhfs_flags_off() -> None:
    args = arguments()
    assert settings.complete(args, Config(correction="tis", acr=True)) == [] and flags(args) == list(DEFAULT.values())


@pytest.mark.parametrize(
    ("config", "args", "says"),
    [
        (
            Config(correction="tis"), arguments(level="token"),
            "required correction='tis', bounds (0.0, 2.0), found --algo.advantage.is_correction_level='token', "
            "--algo.advantage.is_correction_mode='mask'",
        ),
        (Config(correction="seq-tis"), arguments(level="token"), "correction='seq-tis'"),
        (Config(correction="tis", acr=True), arguments(level="token", mode="clip", threshold=[0.0, 2.0]), "acr=True"),
        (Config(correction="tis"), arguments(loss="gspo"), "other losses apply no weights), found 'gspo'"),
        (Config(), arguments(level="token", threshold=[0.2, 0.9]), "threshold: required bounds around 1, the ratio"),
        (Config(), arguments(level="seq", threshold=[1.5, 2.0]), "required bounds around 1"),
    ],
)  # fmt: skip
def test_what_contradicts_is_one_error_that_names_both(config, args, says) -> None:
    problem = list(correction.problems(args, config))
    assert [type(one) for one in problem] == [ConfigError] and says in str(problem[0])


@pytest.mark.parametrize("args", [arguments(level="token", mode="clip", threshold=[0.0, 2.0]), arguments()])
def test_what_says_the_same_is_kept(args) -> None:
    assert not list(correction.problems(args, Config(correction="tis")))


def test_without_a_correction_gspo_and_openrlhfs_own_stay() -> None:
    for args in (arguments(loss="gspo"), arguments(level="seq")):
        assert not list(correction.problems(args, Config())) and settings.complete(args, Config()) == []


@pytest.mark.parametrize(
    ("args", "used"),
    [
        (arguments(), ("none", (0.0, math.inf))),
        (arguments(level="token", mode="clip", threshold=[2.0]), ("tis", (0.0, 2.0))),
        (arguments(level="token", mode="clip", threshold=[0.5, 2.0]), None),
        (arguments(level="token"), ("icepop", (0.5, 5.0))),
        (arguments(level="token", threshold=[2.0]), ("mis", (0.0, 2.0))),
        (arguments(level="token", gating="tv", threshold=[0.0, 0.1]), None),
        (arguments(level="seq"), None),
    ],
)
def test_what_the_user_has_set_is_recognized(args, used) -> None:
    assert correction.in_use(args.algo.advantage, Config()) == used


def test_the_loss_is_touched_only_where_it_must_be() -> None:
    session.enable(Config(precision="bf16", correction="tis"))  # before the import: it provides a stand-in for flash_attn
    from openrlhf.models.loss import PolicyLoss

    before = PolicyLoss.__dict__["forward"]
    session.disable()
    assert PolicyLoss.__dict__["forward"] is before
    session.enable(Config(precision="bf16", correction="tis", acr=True))
    assert PolicyLoss.__dict__["forward"] is not before
    session.disable()
    assert PolicyLoss.__dict__["forward"] is before


# the loss


def batch_of(log_ratio: torch.Tensor, seed: int) -> tuple[torch.Tensor, ...]:
    """Return log-probs of the policy (a leaf), of π_old and of the rollout, and advantages."""
    random = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(log_ratio.shape, generator=random)
    log_prob = (old + 0.4 * torch.randn(log_ratio.shape, generator=random)).requires_grad_()
    return log_prob, old, old - log_ratio, torch.randn(log_ratio.shape, generator=random)


def policy_loss(config: Config, dual_clip: float | None = None, token_level: bool = True) -> Any:
    """Build OpenRLHF's loss as a run of this configuration does, in a patched process."""
    from openrlhf.models.loss import PolicyLoss

    own = {f"is_correction_{name}": value for name, value in DEFAULT.items()}
    return PolicyLoss(0.2, 0.28, dual_clip, token_level, **{**own, **correction.wanted(config)})


def configured(kind: str) -> Config:
    return Config(precision="bf16", correction="tis" if kind == "acr" else kind, acr=kind == "acr")  # type: ignore[arg-type]


def is_on_an_end(log_ratio: torch.Tensor, mask: torch.Tensor, config: Config) -> bool:
    """Whether a ratio is so close to a bound that rounding decides the side."""
    log = log_ratio.double()
    rows = (log * mask).sum(-1, keepdim=True)
    logs = torch.cat([log, rows, rows / mask.sum(-1, keepdim=True).clamp(min=1)], 1)
    ends = [end for end in interval(config.correction, config.correction_bounds) if end]
    return any(bool(((logs - math.log(end)).abs() < 1e-5).any()) for end in ends)


@pytest.mark.parametrize("kind", [*KINDS_ON, "acr"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_the_loss_is_the_formula_and_so_is_its_gradient(kind, dual_clip) -> None:
    config = configured(kind)
    session.enable(config)
    loss_of = policy_loss(config, dual_clip)

    @given(
        batch=batches(), seed=st.integers(0, 99), sizes=st.sampled_from([{}, {"batch_num_tokens": 17.0, "dp_size": 2}])
    )
    def check(batch, seed, sizes) -> None:
        log_ratio, mask = batch
        assume(bool(mask.any()) and not is_on_an_end(log_ratio, mask, config))
        log_prob, old, rollout, advantages = batch_of(log_ratio, seed)
        loss = loss_of(log_prob, old, advantages, mask, rollout_log_probs=rollout, **sizes)
        loss[0].backward()
        again = log_prob.detach().clone().requires_grad_()
        if kind == "acr":
            rho = ratio(old - rollout, mask)
            per_token, _ = acr_loss(again, old, advantages, rho, 2.0, 0.2, 0.28, dual_clip)
        else:
            per_token, _ = ppo_loss(again, old, advantages, 0.2, 0.28, dual_clip)
            per_token = per_token * correct(kind, old - rollout, mask).weights
        expected = (per_token * mask).sum() / sizes.get("batch_num_tokens", mask.sum()) * sizes.get("dp_size", 1)
        expected.backward()
        torch.testing.assert_close(loss[0], expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(log_prob.grad, again.grad, rtol=1e-4, atol=1e-6)
        assert loss[4] is not None and math.isfinite(loss[3])

    check()


@pytest.mark.parametrize("kind", [*KINDS_ON, "acr"])
@pytest.mark.parametrize("token_level", [True, False])
def test_where_both_sides_agree_the_loss_is_openrlhfs_own(kind, token_level) -> None:
    config = configured(kind)
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1]])
    log_prob, old, rollout, advantages = batch_of(torch.zeros(3, 4), 5)
    session.enable(config)
    found = policy_loss(config, 3.0, token_level)(log_prob, old, advantages, mask, rollout_log_probs=rollout)
    session.disable()
    from openrlhf.models.loss import PolicyLoss

    expected = PolicyLoss(0.2, 0.28, 3.0, token_level)(log_prob, old, advantages, mask, rollout)
    for ours, theirs in zip(found[:3], expected[:3]):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert found[3] == 0.0 and found[4] == 0.0


def test_the_share_that_openrlhf_logs_is_of_tokens() -> None:
    config = Config(precision="bf16", correction="seq-mis", correction_bounds=1.5)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    log_prob, old, rollout, advantages = batch_of(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]), 1)
    session.enable(config)
    found = policy_loss(config)(log_prob, old, advantages, mask, rollout_log_probs=rollout)
    assert found[4].item() == 0.75 and found[3].item() == pytest.approx(-0.25)


def test_figures_of_a_step_whose_samples_have_several_widths() -> None:
    session.enable(Config(precision="bf16", correction="seq-tis", correction_bounds=1.1))
    torch.manual_seed(0)
    parts = [(torch.randn(2, width) / 4, torch.rand(2, width) < 0.7) for width in (3, 5)]
    experiences = [
        SimpleNamespace(
            action_log_probs=delta - 2, rollout_log_probs=torch.full_like(delta, -2.0), action_mask=mask, info={}, prompts=[],
        )
        for delta, mask in parts
    ]  # fmt: skip
    metrics.note_mismatch(experiences, arguments())
    whole = [torch.nn.functional.pad(torch.stack([d.double(), m.double()]), (0, 5 - d.shape[1])) for d, m in parts]
    delta, mask = torch.cat(whole, 1)
    expected = applied("seq-tis", delta, mask, (1.1,)).as_metrics()
    assert {name: state.DRIVER.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)


# real runs

TIMEOUT = 900


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("correction"), fill=True)


def steps_of(task, *extra: str, **environ: str) -> list[dict[str, float]]:
    run = Run(task, *extra, environ={"CUDA_VISIBLE_DEVICES": "", **environ})
    assert run.wait(TIMEOUT) == 0, run.failure
    steps = run.metrics()
    assert len(steps) == 2, run.failure
    for step in steps:
        assert step["jetrl/tokens"] >= 16 and step["actor_grad_norm"] > 0, step
    return steps


def run_test(*marks: Any):
    def mark(function):
        for one in (pytest.mark.e2e, pytest.mark.timeout(TIMEOUT + 100), *marks):
            function = one(function)
        return function

    return mark


@run_test(pytest.mark.slow)
@pytest.mark.parametrize("kind", [*KINDS_ON, "acr"])
def test_where_both_sides_agree_every_correction_is_the_identity(task, kind) -> None:
    environ = {"JETRL_CORRECTION": "tis", "JETRL_ACR": "1"} if kind == "acr" else {"JETRL_CORRECTION": kind}
    for step in steps_of(task, JETRL_PRECISION="fp8-unified", **environ):
        assert step["jetrl/bit_equal_fraction"] == step["jetrl/ess"] == 1.0
        for name in ("min", "mean", "max"):
            assert step[f"jetrl/correction_weight_{name}"] == 1.0
        assert step["jetrl/masked_fraction"] == step["jetrl/clipped_fraction"] == step["is_filter_ratio"] == 0.0
        assert step["vllm_kl"] == 0.0


@run_test(pytest.mark.slow)
@pytest.mark.parametrize(
    ("kind", "bounds"),
    [
        ("tis", "1.001"), ("seq-tis", "1.001"), ("mis", "1.001"), ("seq-mis", "1.001"), ("icepop", "0.98,1.02"),
        ("geo-mis", "0.975,1.025"), ("acr", "1.001"),
    ],
)  # fmt: skip
def test_where_they_do_not_agree_the_loss_applies_what_we_log(task, kind, bounds) -> None:
    environ = {"JETRL_CORRECTION": "tis", "JETRL_ACR": "1"} if kind == "acr" else {"JETRL_CORRECTION": kind}
    for step in steps_of(task, JETRL_PRECISION="fp8-rollout", JETRL_CORRECTION_BOUNDS=bounds, **environ):
        assert 0.0 < step["jetrl/clipped_fraction"] <= 1.0
        assert step["jetrl/correction_weight_max"] <= float(bounds.rpartition(",")[2]) * (1 + 1e-6)
        dropped = kind in ("mis", "seq-mis", "icepop", "geo-mis")
        assert step["jetrl/masked_fraction"] == (step["jetrl/clipped_fraction"] if dropped else 0.0)
        # OpenRLHF averages over micro-batches of unequal size
        assert step["is_filter_ratio"] == pytest.approx(step["jetrl/clipped_fraction"], abs=0.1)


@run_test(pytest.mark.slow)
def test_gspo(task) -> None:
    for step in steps_of(task, "--actor.policy_loss_type", "gspo", JETRL_PRECISION="fp8-unified"):
        assert step["jetrl/bit_equal_fraction"] == 1.0


@run_test(pytest.mark.slow)
def test_two_corrections_stop_the_run_before_any_actor(task) -> None:
    environ = {"JETRL_PRECISION": "fp8-unified", "JETRL_CORRECTION": "tis", "CUDA_VISIBLE_DEVICES": ""}
    run = Run(task, "--algo.advantage.is_correction_level", "seq", environ={**environ, "PATH": os.environ["PATH"]})
    assert run.wait(TIMEOUT) == 1
    assert "is_correction_level='seq'" in run.text and "PolicyModelActor" not in run.text
