"""Corrections in verl: the settings made and refused, and verl's own weights against the formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from jetrl_patch import session
from jetrl_patch.adapters.verl import correction, settings
from jetrl_patch.config import Config
from jetrl_patch.config.corrections import KINDS, interval
from jetrl_patch.errors import ConfigError
from jetrl_patch.measure.corrections import correct
from tests.correction.batches import batches
from tests.verl.run_verl import A

KINDS_ON = [kind for kind in KINDS if kind != "none"]
C = "algorithm.rollout_correction"
LOSS = f"{A}.policy_loss.loss_mode"

#: verl holds log-ratios within ±20
TOKENS = st.floats(-20, 20, width=32) | st.floats(-0.5, 0.5, width=32) | st.sampled_from([0.0, 0.0, 0.693, -0.7])


@pytest.fixture(scope="module")
def composed() -> Any:
    """verl's complete default configuration."""
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
    assert not list(correction.problems(found, config))  # the trainer loop checks again
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
    """verl's trainer loop sets loss and settings after the workers have copied theirs (V0), or never (V1)."""
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
            "with jetrl_patch's correction: required correction='tis', found rollout_is='sequence'",
        ),
        (Config(correction="tis", correction_bounds=4.0), [f"{C}.rollout_is=token"], "rollout_is_threshold=2.0"),
        (Config(correction="icepop"), [f"{C}.rollout_rs=token_k1", f"{C}.rollout_rs_threshold=0.5_2"], "rollout_rs="),
        (Config(correction="tis"), [f"{C}.rollout_is_batch_normalize=true"], "batch_normalize"),
        (Config(correction="tis"), [f"{LOSS}=geo_mean"], "required a loss that applies weights, found 'geo_mean'"),
        (Config(correction="tis", acr=True), [f"{LOSS}=gspo"], "'vanilla', which ACR replaces, found 'gspo'"),
        (Config(correction="tis", acr=True), ["algorithm.adv_estimator=optimal_token_baseline"], "truncated weights"),
        (Config(correction="tis"), [f"{C}.bypass_mode=true"], "required loss_type=reinforce"),
        (Config(), [f"{C}.bypass_mode=true", f"{LOSS}=gspo"], "its own losses, found 'gspo'"),
        (
            Config(correction="tis", acr=True), [f"{C}.bypass_mode=true", f"{C}.loss_type=reinforce"],
            "bypass_mode with correction='tis', acr=True: required false, because ACR changes the clip of a loss that bypass "
            "mode replaces, found true",
        ),
        (
            Config(), [f"{C}.rollout_is=token", f"{C}.rollout_is_threshold='0.2_0.9'"],
            "rollout_correction (icepop): required bounds around 1, the ratio of a token on which trainer and rollout agree, "
            "found (0.2, 0.9)",
        ),
        (Config(), [f"{C}.rollout_rs=seq_mean_k1", f"{C}.rollout_rs_threshold='1.1_2'"], "required bounds around 1"),
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
    """Return the ``rollout_correction`` that the plugin sets, by verl's names."""
    found = correction.wanted(OmegaConf.create({}), Config(correction=kind, correction_bounds=bounds))  # type: ignore[arg-type]
    return {path.rpartition(".")[2]: value for path, value in found.items()}


@pytest.mark.parametrize("kind", KINDS_ON)
@given(batch=batches(TOKENS), bounds=st.none() | st.tuples(st.floats(0.01, 0.9), st.floats(1.1, 20)))
def test_verls_weights_are_those_of_the_formulas(kind, batch, bounds) -> None:
    """Within verl's clamp: it limits the log-ratio of a sequence, and of a token, to ±20."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask

    log_ratio, mask = batch
    if bounds is not None and kind not in ("geo-mis", "icepop"):
        bounds = bounds[1:]
    here, found = wanted(kind, bounds), correct(kind, log_ratio, mask, bounds)
    if not found.kept.any():
        return  # verl fails on a batch without tokens, or with all of them dropped (next test)
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
    """verl 0.9.1 divides by the sum of squares; in bypass mode a micro-batch of one dropped sequence triggers it."""
    from verl.trainer.ppo import rollout_corr_helper

    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    arguments = (torch.full((2, 3), 2.0), mask, level, "1e-09_2.0")
    with pytest.raises(ZeroDivisionError):  # if it no longer raises, remove the patch
        rollout_corr_helper.compute_rollout_correction_weights(*arguments)
    session.enable(Config(precision="bf16", correction="seq-mis", upstream_fixes=True))
    weights, found = rollout_corr_helper.compute_rollout_correction_weights(*arguments)
    assert not weights.any()
    assert found["rollout_is_mean"] == found["rollout_is_eff_sample_size"] == found["rollout_is_seq_max"] == 0.0
    assert found["rollout_is_ratio_fraction_high"] > 0
    session.disable()


@pytest.mark.parametrize("kind", [kind for kind in KINDS_ON if kind != "geo-mis"])
@pytest.mark.parametrize("bounds", [None, (1.0, 1.0)])
def test_verls_weights_are_exactly_one_where_both_sides_agree(kind, bounds) -> None:
    """Also with bounds of 1, the narrowest that are accepted."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 0]])
    here = wanted(kind, bounds if bounds is None or kind == "icepop" else bounds[1:])
    found, _ = compute_rollout_correction_weights(
        torch.zeros(3, 3), mask, here["rollout_is"], here["rollout_is_threshold"]
    )
    assert torch.equal(found, mask.float())


@pytest.mark.parametrize("kind", KINDS_ON)
def test_verl_logs_and_applies_what_we_log(kind) -> None:
    """Compare the step of verl's trainers that computes the weights with the plugin's figures of the same batch."""
    from verl.protocol import DataProto
    from verl.trainer.ppo import rollout_corr_helper

    torch.manual_seed(1)
    old, mask = -torch.rand(16, 12) * 3, torch.rand(16, 12) < 0.7
    mask[3] = False
    rollout = old + torch.randn(16, 12) * (0.003 if kind == "geo-mis" else 0.6)
    there = OmegaConf.create({**wanted(kind), "rollout_rs_threshold": wanted(kind).get("rollout_rs_threshold")})
    session.enable(Config(precision="fp8-rollout", correction=kind))
    batch = DataProto.from_dict({"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask.long()})
    found, logged = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(batch, there)
    session.disable()
    ours = correction.figures(there, old - rollout, mask).as_metrics()
    expected = correct(kind, old - rollout, mask)
    torch.testing.assert_close(found.batch["rollout_is_weights"], expected.weights, rtol=1e-5, atol=3e-9)
    assert torch.equal(found.batch["response_mask"].bool(), mask)
    if kind == "geo-mis":
        assert 0 < ours["jetrl/masked_fraction"] < 1
        assert logged["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
            ours["jetrl/masked_fraction"], rel=1e-5
        )
        return
    assert logged["rollout_corr/rollout_is_mean"] == pytest.approx(ours["jetrl/correction_weight_mean"], rel=1e-5)
    assert 0 < ours["jetrl/clipped_fraction"] < 1
    assert (ours["jetrl/masked_fraction"] > 0) == (kind not in ("tis", "seq-tis"))
    if kind in ("tis", "mis", "icepop"):
        assert logged["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(ours["jetrl/ess"], rel=1e-4)
