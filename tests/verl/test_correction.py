"""Corrections in verl: what is set, what is refused, that verl's own weights are those of the formulas, and real runs."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from jetrl_patch import runtime
from jetrl_patch.adapters.verl import correction, correction_acr, correction_bypass, metrics, settings, state
from jetrl_patch.config import Config
from jetrl_patch.correction.kinds import KINDS, interval
from jetrl_patch.correction.weights import correct
from jetrl_patch.errors import ConfigError
from tests.correction.batches import batches
from tests.verl.run_verl import A, Run, make_task

KINDS_ON = [kind for kind in KINDS if kind != "none"]
C = "algorithm.rollout_correction"
LOSS = f"{A}.policy_loss.loss_mode"

#: verl holds log-ratios within ±20
TOKENS = st.floats(-20, 20, width=32) | st.floats(-0.5, 0.5, width=32) | st.sampled_from([0.0, 0.0, 0.693, -0.7])


@pytest.fixture(scope="module")
def composed() -> Any:
    """verl's whole default configuration."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", ["algorithm.adv_estimator=grpo"])


def configured(composed: Any, config: Config, *overrides: str) -> Any:
    found = OmegaConf.merge(composed, OmegaConf.from_dotlist(list(overrides)))
    for problem in correction.problems(found, config):
        raise problem
    for path, value in correction.wanted(found, config).items():
        OmegaConf.update(found, path, value, force_add=True)
    return found


def section(found: Any) -> dict[str, Any]:
    return OmegaConf.to_container(found.algorithm.rollout_correction)  # type: ignore[return-value]


# what is set


@pytest.mark.parametrize(
    ("kind", "bounds", "level", "threshold", "reject"),
    [
        ("tis", None, "token", 2.0, None),
        ("tis", 8.0, "token", 8.0, None),
        ("seq-tis", None, "sequence", 3.0, None),
        ("mis", None, "token", "1e-09_2.0", None),
        ("mis", (0.25, 4.0), "token", "0.25_4.0", None),
        ("seq-mis", None, "sequence", "1e-09_3.0", None),
        ("icepop", None, "token", "0.5_5.0", None),
        ("geo-mis", (0.5, 4.0), None, 2.0, "0.25_2.0"),
    ],
)
def test_verls_own_correction_is_set(composed, kind, bounds, level, threshold, reject) -> None:
    config = Config(correction=kind, correction_bounds=bounds)
    found = configured(composed, config)
    here = section(found)
    assert (here["rollout_is"], here["rollout_is_threshold"]) == (level, threshold)
    assert (here["rollout_rs"], here["rollout_rs_threshold"]) == ("seq_mean_k1" if reject else None, reject)
    assert found.actor_rollout_ref.actor.policy_loss.loss_mode == "vanilla"
    assert not list(correction.problems(found, config))  # where the trainer loop looks again
    kept, ends = correction.in_use(here)
    assert (kept, ends) == (
        kind if bounds != (0.25, 4.0) else "icepop",
        pytest.approx(interval(kind, config.correction_bounds)),
    )


def test_nothing_is_set_without_a_correction(composed) -> None:
    assert correction.wanted(composed, Config()) == {}
    assert correction.in_use(section(composed)) == ("none", (0.0, math.inf))


def test_acr_sets_verls_loss_and_leaves_its_weights(composed) -> None:
    found = configured(composed, Config(correction="tis", acr=True))
    assert found.actor_rollout_ref.actor.policy_loss.loss_mode == correction.ACR_LOSS
    assert section(found)["rollout_is_threshold"] == 2.0


def test_bypass_mode_reaches_the_workers(composed) -> None:
    """verl sets loss and settings on the trainer loop, after the workers have copied theirs (V0), or never (V1)."""
    from verl.utils.config import omega_conf_to_dataclass

    config = Config(correction="seq-mis")
    found = configured(composed, config, f"{C}.bypass_mode=true", f"{C}.loss_type=reinforce")
    OmegaConf.update(found, f"{A}.ppo_micro_batch_size_per_gpu", 1)
    actor = omega_conf_to_dataclass(found.actor_rollout_ref.actor)
    assert actor.policy_loss.loss_mode == "bypass_mode"
    there = actor.policy_loss.get("rollout_correction")
    assert there.get("loss_type") == "reinforce" and there.get("rollout_is_threshold") == "1e-09_3.0"
    assert correction.in_use(there) == ("seq-mis", (0.0, 3.0))
    assert not list(correction.problems(found, config))


@pytest.mark.parametrize(
    ("config", "overrides", "says"),
    [
        (
            Config(correction="tis"), [f"{C}.rollout_is=sequence"],
            "beside jetrl_patch's correction: asked for correction='tis', but found rollout_is='sequence'",
        ),
        (Config(correction="tis", correction_bounds=4.0), [f"{C}.rollout_is=token"], "rollout_is_threshold=2.0"),
        (Config(correction="icepop"), [f"{C}.rollout_rs=token_k1", f"{C}.rollout_rs_threshold=0.5_2"], "rollout_rs="),
        (Config(correction="tis"), [f"{C}.rollout_is_batch_normalize=true"], "batch_normalize"),
        (Config(correction="tis"), [f"{LOSS}=geo_mean"], "asked for a loss that applies weights, but found 'geo_mean'"),
        (Config(correction="tis", acr=True), [f"{LOSS}=gspo"], "'vanilla', which ACR stands in for, but found 'gspo'"),
        (Config(correction="tis", acr=True), ["algorithm.adv_estimator=optimal_token_baseline"], "truncated weights"),
        (Config(correction="tis"), [f"{C}.bypass_mode=true"], "asked for loss_type=reinforce"),
        (Config(), [f"{C}.bypass_mode=true", f"{LOSS}=gspo"], "losses of its own, but found 'gspo'"),
    ],
)  # fmt: skip
def test_what_contradicts_is_one_error_that_names_both(composed, config, overrides, says) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(composed, config, *overrides)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{C}.rollout_is=token"],
        [f"{LOSS}=gspo"],
        [f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=2"],
    ],
)
def test_what_says_the_same_is_kept(composed, overrides) -> None:
    assert section(configured(composed, Config(correction="tis"), *overrides))["rollout_is"] == "token"


def test_the_settings_go_through_verls_own_check(composed) -> None:
    changes = settings.complete(found := OmegaConf.merge(composed), Config(correction="seq-tis", precision="bf16"))
    assert f"{C}.rollout_is='sequence', which was None" in changes
    assert section(found)["rollout_is_threshold"] == 3.0


@pytest.mark.parametrize(
    ("there", "used"),
    [
        (None, ("none", (0.0, math.inf))),
        ({"rollout_is": "token", "rollout_is_threshold": "4.0"}, ("tis", (0.0, 4.0))),
        ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2.0}, ("geo-mis", (0.5, 2.0))),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": 2.0}, None),
        ({"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}, None),
        ({"rollout_is": "token", "rollout_is_batch_normalize": True}, None),
        ({"rollout_is": "turn"}, None),
    ],
)
def test_what_the_user_has_set_is_recognized(there, used) -> None:
    assert correction.in_use(there) == used


# verl's weights


def wanted(kind: str, bounds: Any = None) -> dict[str, Any]:
    """``rollout_correction`` as we set it, by verl's names."""
    found = correction.wanted(OmegaConf.create({}), Config(correction=kind, correction_bounds=bounds))  # type: ignore[arg-type]
    return {path.rpartition(".")[2]: value for path, value in found.items()}


@pytest.mark.parametrize("kind", KINDS_ON)
@given(batch=batches(TOKENS), bounds=st.none() | st.tuples(st.floats(0.01, 0.9), st.floats(1.1, 20)))
def test_verls_weights_are_those_of_the_formulas(kind, batch, bounds) -> None:
    """Within verl's own bound: it holds the log of a sequence's ratio, and of a token's, within ±20."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask

    log_ratio, mask = batch
    if bounds is not None and kind not in ("geo-mis", "icepop"):
        bounds = bounds[1:]
    here, found = wanted(kind, bounds), correct(kind, log_ratio, mask, bounds)
    if not found.kept.any():
        return  # verl fails on a batch without a token, and where none is left (next test)
    if kind == "geo-mis":
        kept, _ = compute_rollout_rejection_mask(log_ratio, mask, here["rollout_rs"], here["rollout_rs_threshold"])
        mean = (log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        ends = [abs(mean - math.log(end)) for end in interval(kind, bounds)]
        clear = (torch.minimum(*ends) > 1e-5).unsqueeze(-1)  # verl divides by n + 1e-8
        assert torch.equal(kept.bool() & clear, found.kept & clear)
        return
    weights, _ = compute_rollout_correction_weights(log_ratio, mask, here["rollout_is"], here["rollout_is_threshold"])
    of_row = (log_ratio * mask).sum(-1, keepdim=True) if "seq" in kind else log_ratio
    clear = torch.stack([(of_row.exp() / end - 1).abs() > 1e-5 for end in interval(kind, bounds) if end]).all(0)
    # e^-20 is verl's smallest weight
    torch.testing.assert_close(weights * clear, found.weights * clear, rtol=1e-5, atol=3e-9)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_batch_of_which_nothing_is_left_is_measured(level) -> None:
    """verl 0.9.1 divides by the sum of squares; a micro-batch of one sequence is enough for that in bypass mode."""
    from verl.trainer.ppo import rollout_corr_helper

    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    arguments = (torch.full((2, 3), 2.0), mask, level, "1e-09_2.0")
    with pytest.raises(ZeroDivisionError):  # else the patch can go
        rollout_corr_helper.compute_rollout_correction_weights(*arguments)
    runtime.enable(Config(precision="bf16", correction="seq-mis"))
    weights, found = rollout_corr_helper.compute_rollout_correction_weights(*arguments)
    assert not weights.any()
    assert found["rollout_is_mean"] == found["rollout_is_eff_sample_size"] == found["rollout_is_seq_max"] == 0.0
    assert found["rollout_is_ratio_fraction_high"] > 0
    runtime.disable()


@pytest.mark.parametrize("kind", [kind for kind in KINDS_ON if kind != "geo-mis"])
def test_verls_weights_are_exactly_one_where_both_sides_agree(kind) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 0]])
    here = wanted(kind)
    found, _ = compute_rollout_correction_weights(
        torch.zeros(3, 3), mask, here["rollout_is"], here["rollout_is_threshold"]
    )
    assert torch.equal(found, mask.float())


@pytest.mark.parametrize("kind", KINDS_ON)
def test_verl_logs_and_applies_what_we_log(kind) -> None:
    """The step of verl's trainers that makes the weights, over a batch, against our figures of the same batch."""
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    torch.manual_seed(1)
    old, mask = -torch.rand(16, 12) * 3, torch.rand(16, 12) < 0.7
    mask[3] = False
    rollout = old + torch.randn(16, 12) * (0.003 if kind == "geo-mis" else 0.6)
    there = OmegaConf.create({**wanted(kind), "rollout_rs_threshold": wanted(kind).get("rollout_rs_threshold")})
    batch = DataProto.from_dict({"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask.long()})
    found, logged = compute_rollout_correction_and_add_to_batch(batch, there)
    ours = correction.figures(there, old - rollout, mask).as_metrics()
    expected = correct(kind, old - rollout, mask)
    if kind == "geo-mis":
        assert (
            torch.equal(found.batch["response_mask"].bool(), expected.kept) and "rollout_is_weights" not in found.batch
        )
        assert 0 < ours["jetrl/masked_fraction"] < 1
        assert logged["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
            ours["jetrl/masked_fraction"], rel=1e-5
        )
        return
    torch.testing.assert_close(found.batch["rollout_is_weights"], expected.weights, rtol=1e-5, atol=3e-9)
    assert torch.equal(found.batch["response_mask"].bool(), mask)
    assert logged["rollout_corr/rollout_is_mean"] == pytest.approx(ours["jetrl/correction_weight_mean"], rel=1e-5)
    assert 0 < ours["jetrl/clipped_fraction"] < 1
    assert (ours["jetrl/masked_fraction"] > 0) == (kind not in ("tis", "seq-tis"))
    if kind in ("tis", "mis", "icepop"):
        assert logged["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(ours["jetrl/ess"], rel=1e-4)


# ACR


def actor(**changes: Any) -> Any:
    values = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0, **changes}
    found = SimpleNamespace(**values, global_batch_info={"dp_size": 1}, get=lambda name, default: values[name])
    return found


def random_batch(seed: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    old = -torch.rand(6, 9) * 3
    mask = torch.rand(6, 9) < 0.7
    mask[2] = False
    return old, old + torch.randn(6, 9) * 0.4, old - torch.randn(6, 9), torch.randn(6, 9), mask


def test_acrs_loss_in_verl_is_the_formula_and_its_gradient() -> None:
    from verl.trainer.ppo.core_algos import agg_loss

    from jetrl_patch.correction.objectives import acr_loss

    old, log_prob, rollout, advantages, mask = random_batch()
    rho = (old - rollout).exp() * mask
    runtime.enable(Config(precision="bf16", correction="tis", correction_bounds=1.5, acr=True))
    ours, theirs = log_prob.clone().requires_grad_(), log_prob.clone().requires_grad_()
    found, logged = correction_acr.policy_loss(old, ours, advantages, mask, config=actor(), rollout_is_weights=rho)
    per_token, _ = acr_loss(theirs, old, advantages, rho, 1.5, 0.2, 0.28, 3.0)
    expected = agg_loss(per_token, mask, "token-mean")
    found.backward()
    expected.backward()
    assert torch.equal(found, expected) and torch.equal(ours.grad, theirs.grad)
    assert set(logged) == {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"}


def test_acr_without_a_mismatch_is_verls_own_loss_bit_for_bit() -> None:
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    old, log_prob, _, advantages, mask = random_batch(1)
    runtime.enable(Config(precision="bf16", correction="tis", acr=True))
    arguments = (old, log_prob, advantages, mask, "token-mean", actor())
    ours, logged = correction_acr.policy_loss(*arguments, mask.float())
    theirs, expected = compute_policy_loss_vanilla(*arguments, mask.float())
    assert torch.equal(ours, theirs) and logged == pytest.approx(expected)


@pytest.mark.parametrize("module", ["rollout_corr_helper", "v1.trainer_base"])
def test_acr_gets_the_plain_ratio_and_verl_logs_the_truncated_one(module) -> None:
    """By the function of each trainer: V0 looks it up where it is defined, V1 where it has imported it."""
    import importlib

    from verl.protocol import DataProto
    from verl.trainer.ppo import core_algos

    before = dict(core_algos.POLICY_LOSS_REGISTRY)
    runtime.enable(Config(precision="bf16", correction="tis", acr=True))
    assert core_algos.get_policy_loss_fn(correction.ACR_LOSS) is correction_acr.policy_loss
    trainer = importlib.import_module(f"verl.trainer.ppo.{module}")
    old, _, rollout, _, mask = random_batch(2)
    there = OmegaConf.create({"rollout_is": "token", "rollout_is_threshold": 2.0})

    def weights_and_figures() -> Any:
        batch = DataProto.from_dict({"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask.long()})
        found, logged = trainer.compute_rollout_correction_and_add_to_batch(batch, there)
        return found.batch["rollout_is_weights"], logged

    found, logged = weights_and_figures()
    torch.testing.assert_close(found, (old - rollout).exp() * mask)
    runtime.disable()
    truncated, expected = weights_and_figures()
    torch.testing.assert_close(truncated, correct("tis", old - rollout, mask, (2.0,)).weights)
    assert not torch.equal(found, truncated) and logged == expected
    assert before == core_algos.POLICY_LOSS_REGISTRY and correction.ACR_LOSS not in before


# bypass mode


def test_in_bypass_mode_the_first_mini_batch_after_a_sync_is_measured() -> None:
    from verl.trainer.ppo import core_algos

    from jetrl_patch.correction.figures import applied
    from jetrl_patch.correction.mismatch import mismatch

    runtime.enable(Config(precision="bf16"))
    there = OmegaConf.create({"rollout_is": "sequence", "rollout_is_threshold": 3.0, "loss_type": "reinforce"})
    config = actor(policy_loss={"rollout_correction": there})
    loss = core_algos.get_policy_loss_fn("bypass_mode")
    _, log_prob, rollout, advantages, mask = random_batch(3)

    def mini_batch(parts: list[slice]) -> None:
        for part in parts:
            loss(
                old_log_prob=rollout[part], log_prob=log_prob[part], advantages=advantages[part],
                response_mask=mask[part], loss_agg_mode="token-mean", config=config, rollout_is_weights=None,
            )  # fmt: skip

    train_batch = correction_bypass.train_batch(lambda self, parts: mini_batch(parts))
    assert correction_bypass.hand_over() == []
    train_batch(None, [])  # a critic's
    train_batch(None, [slice(0, 2), slice(3, 6)])
    train_batch(None, [slice(0, 6)])  # other weights by now
    rank = {correction_bypass.LOSS: correction_bypass.hand_over()}
    assert correction_bypass.hand_over() == []
    found, logged = correction_bypass.figures([rank, {correction_bypass.LOSS: []}])
    seen = torch.tensor([0, 1, 3, 4, 5])
    expected = mismatch(log_prob[seen], rollout[seen], mask[seen])
    assert found.as_metrics() == pytest.approx(expected.as_metrics(), rel=1e-9)
    weights = applied("seq-tis", (log_prob - rollout)[seen], mask[seen], (3.0,))
    assert logged == pytest.approx(weights.as_metrics(), rel=1e-9)
    assert correction_bypass.figures([{correction_bypass.LOSS: []}]) is None


def test_in_bypass_mode_v1_compares_no_tensor_with_itself() -> None:
    runtime.enable(Config(precision="bf16"))
    wrapped = metrics.v1_old_log_prob(lambda self, batch, found: "done")
    trainer = SimpleNamespace(config=OmegaConf.create({"algorithm": {"rollout_correction": {"bypass_mode": True}}}))
    assert wrapped(trainer, None, {}) == "done" and state.DRIVER.metrics == {}


# real runs

TIMEOUT = 900
#: what a run's line says: ours, verl's own of its correction, and whether the step was sound
_FIGURES = re.compile(r"((?:jetrl|rollout_corr|actor)/\w+):([^ ]+)")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Without tokens beyond the tokenizer, so that outside of exact mode the mismatch is the model's."""
    return make_task(tmp_path_factory.mktemp("correction"), fill=True)


def steps_of(task, *extra: str, v1: bool = False, **environ: str) -> list[dict[str, float]]:
    run = Run(task, f"trainer.use_v1={v1}", *extra, environ={"CUDA_VISIBLE_DEVICES": "", **environ})
    assert run.wait(TIMEOUT) == 0, run.text[-6000:]
    lines = [line for line in run.text.splitlines() if "step:" in line and "training/global_step" in line]
    steps = [{k: float(re.sub(r"^np\.\w+\((.*)\)$", r"\1", v)) for k, v in _FIGURES.findall(line)} for line in lines]
    assert len(steps) == 2, run.text[-3000:]
    for step in steps:
        assert step["jetrl/tokens"] >= 16 and math.isfinite(step["actor/grad_norm"]), step
    return steps


def assert_identity(step: dict[str, float]) -> None:
    assert step["jetrl/bit_equal_fraction"] == 1.0
    for name in ("min", "mean", "max"):
        assert step[f"jetrl/correction_weight_{name}"] == 1.0
    assert step["jetrl/masked_fraction"] == step["jetrl/clipped_fraction"] == 0.0 and step["jetrl/ess"] == 1.0


def assert_mean_is_verls(step: dict[str, float]) -> None:
    assert step["rollout_corr/rollout_is_mean"] == pytest.approx(step["jetrl/correction_weight_mean"], rel=1e-5)


e2e = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT + 100)]
pytestmark: list[Any] = []


def run_test(*marks: Any):
    def mark(function):
        for one in (*e2e, *marks):
            function = one(function)
        return function

    return mark


@run_test(pytest.mark.slow)
@pytest.mark.parametrize("kind", KINDS_ON)
def test_where_both_sides_agree_every_correction_is_the_identity(task, kind) -> None:
    for step in steps_of(task, JETRL_PRECISION="fp8-unified", JETRL_CORRECTION=kind):
        assert_identity(step)
        assert step["actor/grad_norm"] > 0
        if kind == "geo-mis":
            assert step["rollout_corr/rollout_rs_masked_fraction"] == 0.0
        else:
            assert step["rollout_corr/rollout_is_min"] == step["rollout_corr/rollout_is_max"] == 1.0


@run_test()
def test_acr_where_both_sides_agree(task) -> None:
    for step in steps_of(task, JETRL_PRECISION="fp8-unified", JETRL_CORRECTION="tis", JETRL_ACR="1"):
        assert_identity(step)
        assert step["rollout_corr/rollout_is_min"] == step["rollout_corr/rollout_is_max"] == 1.0


@run_test(pytest.mark.slow)
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


@run_test(pytest.mark.slow)
@pytest.mark.parametrize("v1", [False, True])
def test_acr_with_a_mismatch(task, v1) -> None:
    environ = {"JETRL_PRECISION": "fp8-rollout", "JETRL_CORRECTION": "tis", "JETRL_CORRECTION_BOUNDS": "1.001"}
    for step in steps_of(task, v1=v1, JETRL_ACR="1", **environ):
        assert 0.0 < step["jetrl/clipped_fraction"] < 1.0 and step["actor/grad_norm"] > 0
        assert_mean_is_verls(step)


@run_test(pytest.mark.slow)
@pytest.mark.parametrize("v1", [False, True])
def test_policy_gradients_in_bypass_mode(task, v1) -> None:
    """PG-Seq-TIS, two mini-batches a step: equality is measured over the first, whose weights are those that sampled."""
    extra = [f"{C}.bypass_mode=true", f"{C}.loss_type=reinforce", f"{A}.ppo_mini_batch_size=2"]
    for step in steps_of(task, *extra, v1=v1, JETRL_PRECISION="fp8-unified", JETRL_CORRECTION="seq-tis"):
        assert_identity(step)
        assert "rollout_corr/rollout_is_mean" in step  # else another loss than the bypass mode's has run


@run_test(pytest.mark.slow)
@pytest.mark.parametrize("kind", ["none", "seq-mis"])
def test_gspo_and_ppo_clip_in_bypass_mode(task, kind) -> None:
    extra = [f"{LOSS}=gspo", f"{A}.loss_agg_mode=seq-mean-token-mean"] if kind != "none" else [f"{C}.bypass_mode=true"]
    for step in steps_of(task, *extra, JETRL_PRECISION="fp8-unified", JETRL_CORRECTION=kind):
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["actor/grad_norm"] > 0
