"""verl's configuration for Megatron, checked and completed."""

from __future__ import annotations

import copy
import os

import pytest
import yaml
from omegaconf import OmegaConf

import jetrl_patch
from jetrl_patch.adapters.verl import megatron, patches, settings
from jetrl_patch.adapters.verl.adapter import ADAPTER
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, ModelError, VersionError
from jetrl_patch.registry import Journal
from tests.models import config_of
from tests.verl.composed import composer

M = "actor_rollout_ref.actor.megatron"
LAYERS = f"{M}.override_transformer_config"
ROLLOUTS = (Config(precision="fp8-rollout"), Config(precision="int8-rollout"))
LINEAR = Config(align="linear", backend="te")
FP32 = LINEAR.replace(scale_format="fp32")


@pytest.fixture
def installed(monkeypatch):
    """Fake the installed packages."""

    def say(te="2.20.2", megatron_there=True, core="0.16.1"):
        monkeypatch.setattr(megatron, "installed_version", {"transformer_engine": te, "megatron-core": core}.get)
        monkeypatch.setattr(megatron, "is_installed", lambda name: megatron_there)

    say()
    return say


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    config_of("qwen3", head_dim=128).save_pretrained(path)
    own = [
        "model_engine=megatron", "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1", f"actor_rollout_ref.model.path={path}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    ]  # fmt: skip
    with composer(own) as make:
        yield make


@pytest.fixture(scope="module")
def plain(composed):
    return composed()


@pytest.mark.parametrize("config", [LINEAR, FP32, Config(precision="bf16"), *ROLLOUTS])
def test_verls_own_megatron_defaults_are_accepted(composed, installed, config):
    settings.check(composed(), config)


def test_the_configuration_is_completed_for_actor_and_reference(composed):
    verl_config = composed()
    changes = settings.complete(verl_config, LINEAR)
    for role in ("actor", "ref"):
        layers = verl_config.actor_rollout_ref[role].megatron.override_transformer_config
        assert layers.fp8 == "e4m3" and layers.fp8_recipe == "blockwise" and layers.attention_backend == "flash"
        assert "fp8_param" not in layers
    assert sum("override_transformer_config" in change for change in changes) == 2  # the reference's are the actor's
    assert not [change for change in settings.complete(verl_config, LINEAR) if "override" in change]


def test_a_reference_with_settings_of_its_own_is_completed_too(composed):
    verl_config = composed("actor_rollout_ref.ref.megatron.override_transformer_config={recompute_granularity:null}")
    settings.complete(verl_config, LINEAR)
    assert verl_config.actor_rollout_ref.ref.megatron.override_transformer_config.fp8_recipe == "blockwise"


def test_what_was_completed_reaches_verls_dataclass_and_is_accepted(composed, installed):
    from verl.utils.config import omega_conf_to_dataclass

    verl_config = composed()
    settings.complete(verl_config, LINEAR)
    settings.check(verl_config, LINEAR)
    for role in ("actor", "ref"):
        engine = omega_conf_to_dataclass(verl_config.actor_rollout_ref[role].megatron)
        assert engine.override_transformer_config["fp8_recipe"] == "blockwise"


@pytest.mark.parametrize("config", [Config(precision="bf16"), Config(precision="fp8-unified", align="linear"), *ROLLOUTS])
def test_nothing_of_it_is_written_where_megatron_does_not_train_in_fp8(composed, config):
    verl_config = composed("model_engine=dp") if config.fp8_train else composed()
    settings.complete(verl_config, config)
    assert "fp8" not in (OmegaConf.select(verl_config, LAYERS) or {})


NEEDS = "required precision='fp8-unified' and align='exact', whose layers are the plugin's, or align='linear' with backend='te'.*"
SET = (
    r"\. Set JETRL_PRECISION=fp8-unified JETRL_ALIGN=exact, or JETRL_PRECISION=fp8-unified JETRL_ALIGN=linear JETRL_BACKEND=te, "
    r"or strategy=fsdp2\.$"
)
EXACT = Config()


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (Config(backend="te"), f"align='exact', backend='te' with verl setting .*actor.strategy=megatron: {NEEDS}{SET}"),
        (Config(precision="fp8-rollout", exclude=("o_proj",)), "exclude=.*required the default"),
        (Config(align="linear"), f"backend='auto' with .*: {NEEDS}, found .*, backend='auto'{SET}"),
        (LINEAR.replace(exclude=("o_proj",)), "exclude=.*required the default .Megatron merges layers"),
        (LINEAR.replace(on_cut="bf16"), "on_cut='bf16'.*required the default .Megatron merges layers"),
        (LINEAR.replace(sync="delta"), "sync='delta'.*required sync='full' .untested with TransformerEngine"),
        (EXACT.replace(exclude=("o_proj",)), "exclude=.*required the default"),
        (EXACT.replace(guard_sqnr=20.0), "guard_sqnr=20.0.*required the default"),
        (EXACT.replace(monitor_action="stop"), "monitor_action='stop'.*required the default"),
        (EXACT.replace(scale_format="nvfp4"), "scale_format='nvfp4'.*required scales of 128x128 blocks"),
    ],
)
def test_modes_that_megatron_cannot_keep(composed, installed, config, match):
    with pytest.raises(ConfigError, match=match):
        settings.check(composed(), config)


@pytest.mark.parametrize(
    ("settings_given", "align", "backend"),
    [
        ({}, None, "auto"),
        ({"align": "linear"}, "linear", "te"),
        ({"align": "linear", "backend": "torch"}, "linear", "torch"),  # what the user set stays, and is refused
        ({"backend": "te"}, "linear", "te"),
        ({"align": "exact", "backend": "te"}, "exact", "te"),
        ({"precision": "bf16"}, None, "auto"),
    ],
)
def test_megatron_decides_what_the_user_left_open(composed, settings_given, align, backend):
    found = settings.chosen(composed(), Config(**settings_given))
    assert (found.align, found.backend) == (align, backend)
    assert settings.chosen(composed("model_engine=dp"), Config(**settings_given)) == Config(**settings_given)


def test_the_driver_restarts_with_megatrons_settings_and_says_so(composed, installed, caplog):
    jetrl_patch.enable(precision="fp8-unified", backend="te")
    verl_config = composed("actor_rollout_ref.model.use_remove_padding=false")
    with caplog.at_level("WARNING"):  # vLLM's server, once imported, sets the root logger's level to ERROR
        settings.settled(lambda config: None)(verl_config)
    config = jetrl_patch.status().config
    assert (config.align, config.backend, os.environ["JETRL_ALIGN"]) == ("linear", "te", "linear")
    assert caplog.text.count("align='linear', because verl's settings need it") == 1
    assert verl_config.actor_rollout_ref.model.use_remove_padding is True


def test_exact_mode_needs_no_transformer_engine(composed, installed):
    installed(te=None)
    verl_config = composed("actor_rollout_ref.model.use_remove_padding=false")
    settings.prepare(verl_config, EXACT)
    assert verl_config.actor_rollout_ref.model.use_remove_padding is True
    assert "fp8" not in OmegaConf.select(verl_config, LAYERS)


OF_EXACT = [
    (f"{M}.use_distributed_optimizer=false", "the distributed optimizer, whose buffers"),
    (f"{M}.use_dist_checkpointing=true", "a Hugging Face checkpoint to start from"),
    (f"{M}.use_megatron_fsdp=true", "Megatron's own tensor and pipeline parallelism"),
    ("distillation.enabled=true", "exact mode's own head"),
    (f"+{M}.override_mcore_model_config.moe=1", "the model in config.json"),
    (f"+{LAYERS}.perform_initialization=false", "keys that exact mode knows to change no bit, found perform_initialization="),
    (f"+{LAYERS}.moe_aux_loss_coeff=-0.01", "keys that exact mode knows to change no bit, found moe_aux_loss_coeff=-0.01"),
    (f"+{LAYERS}.moe_router_load_balancing_type=sinkhorn", "change no bit, found moe_router_load_balancing_type='sinkhorn'"),
    (
        f"+{LAYERS}.moe_z_loss_coeff=much +actor_rollout_ref.ref.megatron.override_transformer_config.moe_z_loss_coeff=0",
        "keys that exact mode knows to change no bit, found moe_z_loss_coeff='much'",
    ),
    (f"+{LAYERS}.invented_tomorrow=1", "keys that exact mode knows to change no bit, found invented_tomorrow="),
    (f"+{LAYERS}.fp8=e4m3", "keys that exact mode knows to change no bit, found fp8='e4m3'"),
    (f"+{M}.override_ddp_config.overlap_param_gather=true", "exact mode knows to change no bit, found overlap_param_gather="),
    (f"{M}.tensor_model_parallel_size=2", "a divisor of .*rollout.tensor_model_parallel_size=1, whose sums.*found 2"),
    (f"{M}.expert_tensor_parallel_size=2", "whole experts on each rank"),
    ("+async_training.staleness_threshold=1", "verl.trainer.main_ppo"),
    ("actor_rollout_ref.model.lora.rank=8", "lora.rank"),
]


def test_key_heads_are_counted_before_anything_starts(composed, installed):
    with pytest.raises(ModelError, match="2 key heads over 4 ranks"):
        settings.check(composed(f"{M}.context_parallel_size=4"), EXACT)
    settings.check(composed(f"{M}.context_parallel_size=2"), EXACT)


@pytest.mark.parametrize(("override", "match"), OF_EXACT)
def test_what_exact_mode_refuses(plain, installed, override, match):
    verl_config = copy.deepcopy(plain)
    for path, _, value in (part.lstrip("+").partition("=") for part in override.split()):
        OmegaConf.update(verl_config, path, yaml.safe_load(value), force_add=True)
    with pytest.raises((ConfigError, ConflictError), match=rf"{match}.*[.] [A-Z]"):
        settings.check(verl_config, EXACT)


def test_recomputation_and_stages_are_harmless(composed, installed):
    given = [f"{LAYERS}.recompute_granularity=full", f"{LAYERS}.recompute_method=uniform", f"{LAYERS}.recompute_num_layers=1"]
    given += [f"+{LAYERS}.num_layers_in_first_pipeline_stage=1", f"{M}.pipeline_model_parallel_size=2", f"{M}.param_offload=true"]
    given += [f"+{M}.override_ddp_config.grad_reduce_in_fp32=true", f"{M}.vanilla_mbridge=true"]
    given += [f"+{LAYERS}.moe_grouped_gemm=true", f"+{LAYERS}.moe_aux_loss_coeff=0.01", f"+{LAYERS}.moe_router_dtype=fp32"]
    given += [f"+{LAYERS}.moe_router_load_balancing_type=aux_loss", f"+{LAYERS}.moe_z_loss_coeff=0.001"]
    given += ["actor_rollout_ref.model.use_fused_kernels=true"]
    settings.check(composed(*given), EXACT)


CONTRADICTIONS = [
    (f"+{LAYERS}.fp8=hybrid", ConflictError, "override_transformer_config.fp8 "),
    (f"+{LAYERS}.fp8_recipe=delayed", ConflictError, "fp8_recipe"),
    (f"+{LAYERS}.fp8_recipe=tensorwise", ConflictError, "fp8_recipe"),
    (f"+{LAYERS}.fp8_recipe=mxfp8", ConflictError, "fp8_recipe"),
    ("+actor_rollout_ref.actor.optim.override_optimizer_config.fp8_recipe=delayed", ConflictError, "override_optimizer"),
    (f"+{LAYERS}.fp8_param=true", ConfigError, "fp8_param .*required BF16 parameters .*never reloads them"),
    (f"+{M}.override_ddp_config.fp8_param_gather=true", ConfigError, "fp8_param_gather"),
    (f"+{LAYERS}.first_last_layers_bf16=true", ConfigError, "first_last_layers_bf16"),
    (f"+{LAYERS}.transformer_impl=local", ConfigError, "transformer_impl"),
    (f"+{LAYERS}.fp8_dot_product_attention=true", ConfigError, "fp8_dot_product_attention"),
    (f"+{LAYERS}.fp8_multi_head_attention=true", ConfigError, "fp8_multi_head_attention"),
    (f"+{LAYERS}.fp4=e2m1", ConflictError, "fp4"),
    (f"{M}.dtype=float16", ConfigError, "megatron.dtype"),
    (f"{M}.expert_model_parallel_size=2", ConfigError, "expert_model_parallel_size"),
    (f"{M}.expert_tensor_parallel_size=2", ConfigError, "expert_tensor_parallel_size"),
    (f"{M}.use_mbridge=false", ConfigError, "use_mbridge"),
    (f"{M}.vanilla_mbridge=true", ConfigError, "vanilla_mbridge"),
    (f"{M}.dynamic_context_parallel=true", ConfigError, "dynamic_context_parallel"),
    (f"{M}.qat.enable=true actor_rollout_ref.rollout.qat=null", ConflictError, "megatron.qat.enable"),
    ("actor_rollout_ref.model.mtp.enable=true actor_rollout_ref.rollout.mtp=null", ConfigError, "model.mtp.enable"),
    ("actor_rollout_ref.model.lora.rank=8", ConflictError, "lora.rank"),
    ("actor_rollout_ref.rollout.checkpoint_engine.backend=nccl", ConfigError, "checkpoint_engine.backend"),
    ("actor_rollout_ref.ref.strategy=fsdp2", ConfigError, "one engine for actor and reference"),
]


@pytest.mark.parametrize(("override", "kind", "match"), CONTRADICTIONS)
def test_a_contradiction_is_one_error_that_names_it(plain, installed, override, kind, match):
    verl_config = copy.deepcopy(plain)
    for path, _, value in (part.lstrip("+").partition("=") for part in override.split()):
        OmegaConf.update(verl_config, path, yaml.safe_load(value), force_add=True)
    with pytest.raises(kind, match=rf"{match}.*found .*[.] [A-Z]"):
        settings.check(verl_config, LINEAR)


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ({"te": None}, "found no transformer_engine."),
        ({"te": "2.2.0"}, "found transformer_engine 2.2.0."),
        ({"megatron_there": False}, "found no megatron.core, no megatron.bridge."),
    ],
)
def test_what_is_not_installed(composed, installed, there, found):
    installed(**there)
    with pytest.raises(VersionError, match=f"required .*transformer_engine>=2.3, {found}"):
        settings.check(composed(), LINEAR)
    settings.check(composed(), Config(precision="bf16"))


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ({"core": "0.15.3"}, "found megatron-core 0.15.3."),
        ({"core": "0.19.0"}, "found megatron-core 0.19.0."),
        ({"megatron_there": False}, "found no megatron.core, no megatron.bridge."),
    ],
)
def test_what_exact_mode_does_not_find(composed, installed, there, found):
    installed(te=None, **there)
    with pytest.raises(VersionError, match=f"required megatron-core>=0.16,<0.19 and megatron-bridge, {found}"):
        settings.check(composed(), EXACT)


def test_this_very_environment_has_none_of_it(composed):
    """With the real guards, the driver stops before Ray starts."""
    pytest.importorskip("verl")
    if megatron.is_installed("megatron.core"):
        pytest.skip("Megatron is installed here")
    with pytest.raises(VersionError, match=r"no megatron\.core"):
        settings.prepare(composed(), LINEAR)


def test_the_model_is_looked_at_before_anything_starts(composed, installed, tmp_path):
    config_of("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="head_dim=64"):
        settings.check(composed(f"actor_rollout_ref.model.path={tmp_path}"), LINEAR)
    with pytest.raises(ModelError, match="intermediate_size=512 over 8 ranks"):
        settings.check(composed(f"{M}.tensor_model_parallel_size=8"), LINEAR)
    with pytest.raises(ModelError, match="intermediate_size=512 over 8 ranks"):
        settings.check(composed("actor_rollout_ref.ref.megatron.tensor_model_parallel_size=8"), LINEAR)


@pytest.mark.parametrize("config", ROLLOUTS)
def test_beside_a_quantized_rollout_the_trainer_stays_in_bf16(composed, installed, tmp_path, config):
    """No width can cut a block of Megatron's own layers. Its experts have not run."""
    config_of("llama").save_pretrained(tmp_path / "dense")
    settings.check(composed(f"actor_rollout_ref.model.path={tmp_path / 'dense'}"), config)
    keys = [f"+{LAYERS}.fp8=e4m3", f"+{LAYERS}.fp4=e2m1", f"+{M}.override_ddp_config.fp8_param_gather=true"]
    for key in [*keys, "+actor_rollout_ref.actor.optim.override_optimizer_config.fp8_recipe=delayed"]:
        with pytest.raises(ConflictError, match=r"required BF16 in the trainer, found .* Remove it, or use precision="):
            settings.check(composed(key), config)


def test_experts_need_exact_mode(composed, installed, tmp_path):
    config_of("qwen3_moe", head_dim=128).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"a mixture of experts in Megatron: required align='exact', .* found precision="):
        settings.check(composed(f"actor_rollout_ref.model.path={tmp_path}"), ROLLOUTS[0])


def test_another_family(composed, installed, tmp_path):
    from transformers import MistralConfig

    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    MistralConfig(**sizes, architectures=["MistralForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"one of qwen2, qwen3, llama.*found model_type='mistral'"):
        settings.check(composed(f"actor_rollout_ref.model.path={tmp_path}"), LINEAR)


@pytest.mark.parametrize(("config", "value"), [(LINEAR, "0"), (FP32, "1")])
def test_the_scales_are_exported_and_taken_back(monkeypatch, config, value):
    monkeypatch.delenv(megatron.SCALES, raising=False)
    journal = Journal()
    ADAPTER.on_apply(config, journal)
    assert os.environ[megatron.SCALES] == value
    ADAPTER.check(config)  # as a child process would find it
    journal.rollback()
    assert megatron.SCALES not in os.environ


@pytest.mark.parametrize(
    "config", [Config(align="linear"), Config(precision="bf16"), Config(precision="fp8-rollout", backend="te")]
)
def test_no_scales_are_exported_where_transformer_engine_does_not_train(monkeypatch, config):
    monkeypatch.delenv(megatron.SCALES, raising=False)
    journal = Journal()
    ADAPTER.on_apply(config, journal)
    assert megatron.SCALES not in os.environ
    monkeypatch.setenv(megatron.SCALES, "1")
    megatron.check_scales(config)


def test_other_scales_in_the_environment_are_a_conflict(monkeypatch):
    monkeypatch.setenv(megatron.SCALES, "1")
    megatron.check_scales(FP32)
    with pytest.raises(ConflictError, match=rf"scale_format='pow2'.*required {megatron.SCALES}=0, found '1'"):
        megatron.check_scales(LINEAR)
    monkeypatch.setenv(megatron.SCALES, "0")
    with pytest.raises(ConflictError, match=r"scale_format='fp32'.*found '0'"):
        megatron.check_scales(FP32)


@pytest.mark.parametrize("there", [True, False])
def test_its_patches_wait_only_where_megatron_is(monkeypatch, there):
    monkeypatch.setattr(patches, "is_installed", lambda name: there)
    attributes = {patch.attr for patch in ADAPTER.patches(LINEAR)}
    wanted = {"MegatronEngine._build_megatron_module", "MegatronEngine.get_per_tensor_param"}
    assert attributes & wanted == (wanted if there else set())
    more = {patch.attr for patch in ADAPTER.patches(EXACT)} - attributes
    assert ("MegatronEngine._build_tf_config" in more) == there
