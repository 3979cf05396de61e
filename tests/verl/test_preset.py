"""Settings in verl's own configuration: hydra finds the presets, and verl's main is patched before Ray starts."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from jetrl_patch import session as runtime
from jetrl_patch.adapters.verl import preset, settings, yaml_settings
from jetrl_patch.config import Config, environment
from jetrl_patch.errors import ConfigError, ConflictError, NotPatchedError
from tests.models import config_of

R = "actor_rollout_ref.rollout"
UNIFIED = Config(precision="fp8-unified", align="exact")


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    config_of("qwen3").save_pretrained(path)
    return [
        f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=1", f"actor_rollout_ref.model.path={path}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", f"{R}.log_prob_micro_batch_size_per_gpu=1",
        "trainer.n_gpus_per_node=1", "algorithm.adv_estimator=grpo", f"{R}.calculate_log_probs=False",
    ]  # fmt: skip


def composed(*extra: str) -> Any:
    preset.store()
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*extra])


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("unified", Config()),
        ("exact", Config(align="exact")),
        ("linear", Config(align="linear")),
        ("fp8_rollout", Config(precision="fp8-rollout")),
        ("int8_rollout", Config(precision="int8-rollout")),
        ("fp16", Config(precision="fp16")),
        ("bf16", Config(precision="bf16")),
    ],
)
def test_each_preset_is_one_mode(name: str, config: Config) -> None:
    assert preset.config_of(composed(f"+jetrl={name}")) == config


def test_every_preset_is_tested_and_offers_every_field() -> None:
    assert set(preset.PRESETS) == {"unified", "exact", "linear", "fp8_rollout", "int8_rollout", "fp16", "bf16"}
    for name in preset.PRESETS:
        assert set(composed(f"+jetrl={name}").jetrl) == {field.name for field in dataclasses.fields(Config)}


def test_fields_stand_on_top_of_a_preset_and_without_one() -> None:
    verl_config = composed("+jetrl=unified", "jetrl.align=linear", "jetrl.exclude=[o_proj,layers.0]")
    assert preset.config_of(verl_config) == Config(align="linear", exclude=("o_proj", "layers.0"))
    assert preset.config_of(composed("+jetrl.precision=bf16")) == Config(precision="bf16")
    assert preset.config_of(composed()) is None
    with pytest.raises(ConfigCompositionException):
        composed("+jetrl=unified", "jetrl.precison=bf16")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+jetrl.precision=fp9", "unknown precision 'fp9'"),
        ("+jetrl.precison=bf16", "unknown setting precison"),
        ("+jetrl.exclude=o_proj", "must be a list of patterns"),
        ("+jetrl=[unified]", "jetrl/unified"),
        ("+jetrl.precision=bf16,+jetrl.align=exact", "contradicts"),
    ],
)
def test_nonsense_in_the_section_is_refused(override: str, message: str) -> None:
    if override == "+jetrl=[unified]":
        verl_config = OmegaConf.create({"jetrl": ["unified"]})
        message = "required a mapping of settings"
    else:
        verl_config = composed(*override.split(","))
    with pytest.raises(ConfigError, match=message):
        preset.config_of(verl_config)


def test_the_environment_fills_in_and_may_not_contradict(monkeypatch: pytest.MonkeyPatch) -> None:
    verl_config = composed("+jetrl=linear")
    monkeypatch.setenv("JETRL_PLATFORM", "cpu")
    assert preset.config_of(verl_config) == Config(align="linear", platform="cpu")
    monkeypatch.setenv("JETRL_ALIGN", "exact")
    with pytest.raises(ConflictError, match=r"jetrl\.align .*required 'linear', found JETRL_ALIGN='exact'"):
        preset.config_of(verl_config)
    monkeypatch.delenv("JETRL_ALIGN")
    monkeypatch.setenv("JETRL_ENABLED", "0")
    with pytest.raises(ConflictError, match="JETRL_ENABLED=0: required no jetrl section"):
        preset.config_of(verl_config)


def test_a_section_that_contradicts_the_running_process() -> None:
    verl_config = composed("+jetrl=linear")
    found = yaml_settings.disagreement(verl_config, UNIFIED)
    assert isinstance(found, ConflictError)
    assert "required align='linear', found align='exact'" in str(found)
    assert yaml_settings.disagreement(verl_config, Config(align="linear", backend="torch")) is None
    assert yaml_settings.disagreement(composed("+jetrl=unified"), UNIFIED) is None
    assert yaml_settings.disagreement(composed(), UNIFIED) is None
    with pytest.raises(ConflictError, match="jetrl in verl's configuration"):
        settings.check(verl_config, UNIFIED)


def settings_in_environment() -> dict[str, str]:
    return dict(os.environ.items() - environment.without_settings().items())


@pytest.fixture
def main(monkeypatch, tmp_path, overrides):
    """Run verl's own ``main`` up to the call that would start Ray; return configuration, session and JETRL_* variables there."""
    module = importlib.import_module("verl.trainer.main_ppo")
    seen: list[Any] = []

    def run_ppo(config: Any, task_runner_class: Any) -> None:
        session = runtime.active_config() if runtime.is_active() else None
        seen.append((config, session, settings_in_environment()))

    monkeypatch.setattr(module, "run_ppo", run_ppo)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    quiet = [f"hydra.run.dir={tmp_path}", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]

    def run(*extra: str) -> Any:
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["main_ppo", *overrides, *quiet, *extra])
        module.main()
        return seen.pop()

    return run


def test_verls_main_is_patched_before_ray_starts(main) -> None:
    config, session, environ = main("+jetrl=unified")
    assert session == UNIFIED
    assert environ["JETRL_ENABLED"] == "1" and environ["JETRL_PRECISION"] == "fp8-unified"
    assert config.actor_rollout_ref.rollout.calculate_log_probs is True  # checked and completed
    runtime.disable()
    assert not settings_in_environment()
    config, session, environ = main()
    assert session is None and not environ
    assert config.actor_rollout_ref.rollout.calculate_log_probs is False


def test_the_file_of_the_documentation_works(main, tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "mine.yaml").write_text(block)
    _, session, environ = main(f"--config-path={tmp_path}", "--config-name=mine")
    assert session == Config(align="linear", exclude=("layers.0", "down_proj"))
    assert environ["JETRL_EXCLUDE"] == "layers.0,down_proj"


def test_verls_main_refuses_what_contradicts(main) -> None:
    with pytest.raises(ConflictError, match=r"rollout\.quantization"):
        main("+jetrl=unified", f"{R}.quantization=fp8")
    with pytest.raises(ConflictError, match="required align='linear', found align='exact'"):
        main("+jetrl=linear")  # the session of the first call is still active


def test_a_trainer_loop_does_not_go_on_unpatched() -> None:
    calls: list[Any] = []
    init = preset._trainer_init(lambda self, config: calls.append(config))
    with pytest.raises(NotPatchedError, match="this process is not patched"):
        init(None, composed("+jetrl=unified"))
    assert not calls
    init(None, composed())
    assert len(calls) == 1
