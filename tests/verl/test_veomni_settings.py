"""verl's configuration for its VeOmni engine: what is accepted, and what is refused before anything starts."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from jetrl_patch.adapters.verl import launch, patches, settings, ulysses, veomni
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, ModelError, VersionError
from tests.models import config_of
from tests.vision_models import config_of as vision_model_config

A, REF, M, R = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "model", "rollout"))
LINEAR = Config(precision="fp8-unified", align="linear").resolved()
ROLLOUT = Config(precision="fp8-rollout").resolved()


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Fake the installed package."""

    def say(version="0.1.12"):
        monkeypatch.setattr(veomni, "installed_version", lambda name: version)

    say()
    return say


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    config_of("qwen3").save_pretrained(path)
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        plain = compose(
            "ppo_trainer",
            [
                "model_engine=veomni", f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=1", f"{M}.path={path}",
                f"{M}.use_remove_padding=True", f"{A}.ppo_micro_batch_size_per_gpu=1",
            ],
        )  # fmt: skip
    return lambda *extra: OmegaConf.merge(plain, OmegaConf.from_dotlist(list(extra)))


#: as verl's own scripts have them
OFFICIAL = (
    (f"{M}.use_fused_kernels=True", f"{A}.veomni.param_offload=True", f"{A}.veomni.optimizer_offload=True"),
    (
        f"{A}.veomni.enable_full_shard=True", f"{A}.veomni.fsdp_size=16", f"{A}.veomni.ulysses_parallel_size=1",
        f"{A}.veomni.attn_implementation=veomni_flash_attention_2_with_sp", f"{A}.veomni.moe_implementation=fused",
        f"{A}.use_kl_loss=True", f"{REF}.strategy=veomni", f"{REF}.veomni.param_offload=False",
    ),
)  # fmt: skip


@pytest.mark.parametrize("config", [LINEAR, ROLLOUT, Config(precision="bf16").resolved()])
@pytest.mark.parametrize("extra", [(), *OFFICIAL])
def test_verls_own_settings_are_accepted(composed, config, extra):
    settings.check(composed(*extra), config)


REFUSED = [
    (f"{A}.veomni.expert_parallel_size=2", "actor.veomni.expert_parallel_size", ConfigError),
    (f"{REF}.veomni.expert_parallel_size=2", "ref.veomni.expert_parallel_size", ConfigError),
    (f"{A}.veomni.attn_implementation=native-sparse", "attn_implementation", ConfigError),
    (f"{A}.veomni.qat_implementation=fp8_blockwise", "qat_implementation", ConflictError),
    (f"{A}.veomni.router_replay.mode=R3", "router_replay.mode", ConfigError),
    (f"{A}.veomni.init_device=cuda", "init_device", ConfigError),
    (f"{A}.veomni.mixed_precision=False", "mixed_precision", ConfigError),
    (f"{A}.veomni.enable_fsdp_offload=True", "enable_fsdp_offload", ConfigError),
    (f"{A}.veomni.enable_async_activation_offload=True", "enable_async_activation_offload", ConfigError),
    (f"{A}.veomni.enable_reentrant=True", "enable_reentrant", ConfigError),
    (f"{A}.veomni.force_use_huggingface=True", "force_use_huggingface", ConfigError),
    (f"{A}.veomni.basic_modules=[Qwen3MLP]", "basic_modules", ConfigError),
    (f"{M}.use_remove_padding=False", "use_remove_padding", ConfigError),
    (f"{M}.lora_rank=8", "lora_rank", ConfigError),
    (f"{M}.lora_adapter_path=own", "lora_adapter_path", ConfigError),
    (f"{R}.checkpoint_engine.backend=nccl", "checkpoint_engine.backend", ConfigError),
    (f"{R}.enable_rollout_routing_replay=True", "enable_rollout_routing_replay", ConfigError),
    ("trainer.n_gpus_per_node=1", "strategy=veomni: required two ranks", ConfigError),
    (f"{A}.veomni.ulysses_parallel_size=3", "veomni.ulysses_parallel_size=3: required a divisor", ConfigError),
    (f"{A}.veomni.ulysses_parallel_size=8", "ulysses_parallel_size=8: required a divisor of the query heads", ModelError),
    (f"{REF}.strategy=fsdp2", "required one engine for actor and reference", ConfigError),
]


@pytest.mark.parametrize(("override", "words", "error"), REFUSED)
def test_each_is_refused_by_name(composed, override, words, error):
    with pytest.raises(error, match=rf"{words}.* found .*\. [A-Z]"):
        settings.check(composed(override), ROLLOUT)


def test_attention_without_the_exchange_does_not_share_sequences(composed):
    shared = (f"{A}.veomni.ulysses_parallel_size=2", f"{A}.veomni.attn_implementation=sdpa")
    with pytest.raises(ConfigError, match="sdpa"):
        settings.check(composed(*shared), LINEAR)
    settings.check(composed(shared[0]), LINEAR)
    assert ulysses.sizes(lambda path: OmegaConf.select(composed(shared[0]), path)) == {2: f"{A}.veomni.ulysses_parallel_size"}


MODES = [
    (Config(precision="fp8-unified"), "align='exact'.*JETRL_ALIGN=linear"),
    (Config(precision="int8-rollout"), "precision='int8-rollout'"),
    (LINEAR.replace(sync="delta"), "sync='delta'"),
    (LINEAR.replace(invariant_scale=1.5), "invariant_scale=1.5"),
    (LINEAR.replace(guard_sqnr=20.0), "guard_sqnr"),
    (LINEAR.replace(fp8_all_gather=True), "fp8_all_gather"),
    (ROLLOUT.replace(measure_routes=True), "measure_routes"),
    (Config(precision="fp16"), "precision='fp16'.*required fsdp or fsdp2"),
]


@pytest.mark.parametrize(("config", "words"), MODES)
def test_settings_of_the_plugin_that_nothing_has_tried_are_refused(composed, config, words):
    with pytest.raises(ConfigError, match=words):
        settings.check(composed(), config.resolved())


@pytest.mark.parametrize("version", [None, "0.1.11", "0.2.0"])
def test_veomni_is_there_in_a_version_that_has_run(composed, installed, version):
    installed(version)
    with pytest.raises(VersionError, match=rf"required veomni.*found {version or 'none'}"):
        settings.check(composed(), LINEAR)


def test_other_families_are_refused_with_the_reason():
    texts = (config_of(name) for name in ("qwen3", "qwen3_moe"))
    for config in (*texts, vision_model_config("qwen3_vl"), vision_model_config("qwen3_vl_moe")):
        veomni.check_model(config)
    with pytest.raises(ModelError, match=r"required Qwen2/2.5, Qwen3, .* found model_type='mistral' \(its VeOmni layers"):
        veomni.check_model(config_of("mistral"))
    with pytest.raises(ModelError, match="found model_type='qwen3_vl_text'"):  # alone, of a covered family
        veomni.check_model(vision_model_config("qwen3_vl").text_config)


def test_patches_are_there_where_veomni_is(monkeypatch):
    for there in (True, False):
        monkeypatch.setattr(patches, "is_installed", lambda name: there and name == "veomni")  # noqa: B023
        found = {patch.target for patch in patches.patches(LINEAR)}
        assert {patch.target for patch in patches.VEOMNI} <= found if there else not any("veomni" in name for name in found)


def test_the_doctor_asks_for_flash_attention_where_veomni_uses_it(composed):
    name = f"{A}.veomni.attn_implementation"
    assert launch.needs_flash_attn(composed()) == f"{name}=flash_attention_2"
    assert launch.needs_flash_attn(composed(f"{name}=sdpa")) == ""
