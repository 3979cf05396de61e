"""``old_log_probs`` and verl's settings: settings that need the pass are refused, or enable it in ``auto``."""

from __future__ import annotations

import pytest

from jetrl_patch.adapters.verl import rollout, settings
from jetrl_patch.adapters.verl.yaml_settings import selector
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError
from tests.verl.audited import RECOMPUTE, STOP
from tests.verl.composed import composer


@pytest.fixture(scope="module")
def base():
    with composer(["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]) as make:
        yield make


REFUSED = [
    ("actor_rollout_ref.actor.calculate_sum_pi_squared=True", "calculate_sum_pi_squared"),
    ("++actor_rollout_ref.actor.fsdp_config.router_replay.mode=R2", "router_replay.mode"),
    ("distillation.enabled=True", "distillation.enabled"),
    ("actor_rollout_ref.rollout.checkpoint_engine.backend=nccl", "checkpoint_engine.backend"),
    ("trainer.v1.trainer_mode=colocate_async", "trainer_mode"),
    ("++actor_rollout_ref.actor.strategy=veomni", "actor.strategy"),
]


@pytest.mark.parametrize(("override", "path"), REFUSED)
def test_options_of_verl_that_need_the_pass_are_refused(base, override, path):
    select = selector(base(override))
    found = list(rollout.old_log_prob_problems(select, STOP))
    assert len(found) == 1 and isinstance(found[0], ConfigError)
    text = str(found[0])
    assert path in text and "with old_log_probs='rollout': required" in text and "or use old_log_probs='recompute'." in text
    assert not list(rollout.old_log_prob_problems(select, RECOMPUTE))
    assert any(str(problem) == text for problem in settings.problems(base(override), STOP))


@pytest.mark.parametrize(("override", "path"), REFUSED)
def test_the_pass_stays_where_options_of_verl_need_it_and_nobody_asked(base, override, path):
    asked = Config()
    found = settings.chosen(base(override), asked)
    assert asked.skips_old_pass and not found.skips_old_pass
    assert not any("old_log_probs" in str(problem) for problem in settings.problems(base(override), found.resolved()))
    assert settings.chosen(base(override), STOP).old_log_probs == "rollout" or path == "actor.strategy"
    (problem,) = rollout.old_log_prob_problems(selector(base(override)), asked.resolved())  # a driver that settled nothing
    assert isinstance(problem, ConfigError) and "with old_log_probs='rollout'" in str(problem)


def test_the_pass_is_left_out_by_default_in_exact_mode_alone(base):
    assert settings.chosen(base(), Config()) == Config() and Config().skips_old_pass
    assert not Config(align="linear").skips_old_pass and not Config(precision="bf16").skips_old_pass
    assert not list(rollout.old_log_prob_problems(selector(base()), Config().resolved()))


def test_verls_defaults_are_accepted(base):
    assert not list(rollout.old_log_prob_problems(selector(base()), STOP))
