"""OpenRLHF's arguments: the refusals, the completions, and the mark that every actor compares."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf import settings
from jetrl_patch.adapters.openrlhf.patches import PATCHES
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, ModelError, NotPatchedError
from tests.models import save
from tests.patches import applied

EXACT = Config(precision="fp8-unified")
LINEAR = Config(precision="fp8-unified", align="linear")
BF16 = Config(precision="bf16")


def arguments(**changes: Any) -> SimpleNamespace:
    """OpenRLHF's nested namespace with the defaults that matter, changed by dotted names (``__`` for a dot)."""
    flat = {
        "vllm.num_engines": 1, "vllm.tensor_parallel_size": 1, "vllm.enforce_eager": False, "vllm.enable_sleep": False,
        "ds.load_in_4bit": False, "ds.lora.rank": 0, "ds.tensor_parallel_size": 1, "ds.param_dtype": "bf16",
        "ds.deepcompile": False, "ds.ring_attn_size": 1, "ds.use_liger_kernel": False, "ds.zero_stage": 2,
        "data.max_images_per_prompt": 0, "rollout.top_p": 1.0, "rollout.temperature": 1.0,
        "actor.model_name_or_path": "some/remote-model", "train.async_enable": False, "reward.remote_url": ["reward.py"],
        "algo.advantage.is_correction_level": "off",
    }  # fmt: skip
    flat |= {name.replace("__", "."): value for name, value in changes.items()}
    root = SimpleNamespace()
    for path, value in flat.items():
        *parts, name = path.split(".")
        node = root
        for part in parts:
            if not hasattr(node, part):
                setattr(node, part, SimpleNamespace())
            node = getattr(node, part)
        setattr(node, name, value)
    return root


def test_defaults_pass_in_every_mode():
    for config in (EXACT, LINEAR, BF16, Config(precision="fp8-rollout")):
        args = arguments()
        before = copy.deepcopy(args)
        settings.check(args, config)
        assert args == before


@pytest.mark.parametrize(
    ("changes", "config", "error", "says"),
    [
        ({"vllm__num_engines": 0}, BF16, ConfigError, "--vllm.num_engines"),
        ({"vllm__num_engines": None}, BF16, ConfigError, "--vllm.num_engines"),
        ({"ds__load_in_4bit": True}, LINEAR, ConflictError, "--ds.load_in_4bit"),
        ({"ds__lora__rank": 8}, BF16, ConflictError, "--ds.lora.rank .*own sync sends adapters under names that vLLM does not"),
        ({"ds__lora__rank": 8}, Config(precision="fp16"), ConflictError, "--ds.lora.rank"),
        ({"ds__lora__rank": 8, "ds__lora__dropout": 0.1}, LINEAR, ConfigError, "--ds.lora.dropout .*required 0 .*found 0.1"),
        ({"ds__lora__rank": 8, "train__enable_ema": True}, EXACT, ConfigError, "--train.enable_ema .*no average"),
        ({"ds__lora__rank": 8}, EXACT.replace(invariant_scale=4.0), ConfigError, "invariant_scale with OpenRLHF's --ds.lora"),
        ({"ds__tensor_parallel_size": 2}, LINEAR, ConfigError, "--ds.tensor_parallel_size"),
        ({"ds__param_dtype": "fp16"}, LINEAR, ConfigError, "--ds.param_dtype"),
        ({"ds__deepcompile": True}, LINEAR, ConfigError, "--ds.deepcompile"),
        ({"ds__ring_attn_size": 2}, EXACT, ConfigError, "--ds.ring_attn_size"),
        ({"ds__use_liger_kernel": True}, EXACT, ConflictError, "--ds.use_liger_kernel"),
        (
            {"train__full_determinism_enable": True}, EXACT.replace(backend="cublaslt"), ConfigError,
            "--train.full_determinism_enable .*the rollout's cuBLAS workspace",
        ),
        (
            {"rollout__top_p": 0.9, "algo__advantage__is_correction_level": "token"}, LINEAR, ConfigError,
            "--rollout.top_p .*required a rollout that draws by the temperature alone.*--algo.advantage.is_correction_level",
        ),
        ({"rollout__temperature": 0.0}, BF16, ConfigError, "--rollout.temperature"),
        ({"rollout__temperature": 0.009}, BF16, ConfigError, "--rollout.temperature .*required at least 0.01.*found 0.009"),
        ({"rollout__temperature": 2.1}, BF16, ConfigError, "--rollout.temperature .*required at most 2.0.*found 2.1"),
    ],
)
def test_what_cannot_stand_beside_ours_is_refused_by_name(changes, config, error, says):
    with pytest.raises(error, match=says):
        settings.check(arguments(**changes), config)


@pytest.mark.parametrize(
    "changes", [{"ds__deepcompile": True}, {"ds__load_in_4bit": True}, {"rollout__top_p": 0.9}, {"ds__ring_attn_size": 2}]
)
def test_bf16_measures_and_refuses_nothing_of_the_kind(changes):
    settings.check(arguments(**changes), BF16)


def test_exact_refusals_are_not_those_of_linear():
    settings.check(arguments(rollout__top_p=0.9, ds__ring_attn_size=2), LINEAR)


@pytest.mark.parametrize("config", [EXACT, LINEAR, Config(precision="fp8-rollout"), Config(precision="int8-rollout")])
def test_adapters_are_accepted_with_a_dense_text_model_and_a_quantized_rollout(config, tmp_path):
    path = save(tmp_path / "model", "qwen3", steps=0)
    settings.check(arguments(ds__lora__rank=8, actor__model_name_or_path=path), config)
    path = save(tmp_path / "mixture", "qwen3_moe", steps=0)
    if config.fp8_rollout:
        settings.check(arguments(actor__model_name_or_path=path), config)
        with pytest.raises(ModelError, match=r"LoRA in OpenRLHF .*required a dense text model .*found model_type='qwen3_moe'"):
            settings.check(arguments(ds__lora__rank=8, actor__model_name_or_path=path), config)


@pytest.mark.parametrize("config", [EXACT, BF16])
def test_an_engine_on_a_cpu_cannot_sleep(config):
    with pytest.raises(ConfigError, match=r"--vllm\.enable_sleep .*required a GPU: vLLM has no sleep mode on a CPU.* Remove"):
        settings.check(arguments(vllm__enable_sleep=True), config.replace(platform="cpu"))
    settings.check(arguments(vllm__enable_sleep=True), config.replace(platform="cuda"))


def test_deepspeed_has_no_fp8_all_gather():
    with pytest.raises(ConfigError, match=r"required FSDP2, found OpenRLHF, which trains with DeepSpeed. Set fp8_all"):
        settings.check(arguments(), Config(fp8_all_gather=True))


def test_samples_that_nothing_scores_are_refused():
    for reward in ({"reward__model_name_or_path": "some/reward-model"}, {"train__agent_func_path": "agent.py"}):
        settings.check(arguments(reward__remote_url=None, **reward), BF16)
    for config in (EXACT, LINEAR, BF16):
        with pytest.raises(ConfigError, match=r"required a reward: .*--reward\.remote_url.*found none\. Add --reward"):
            settings.check(arguments(reward__remote_url=None), config)


def test_without_a_model_nothing_starts():
    for config in (BF16, EXACT):
        with pytest.raises(ConfigError, match=r"--actor\.model_name_or_path: required a model to train, found none\. Add"):
            settings.check(arguments(actor__model_name_or_path=None), config)


def test_a_training_without_a_rollout_is_refused():
    with pytest.raises(ConfigError, match="train_ppo_ray"):
        settings.check(SimpleNamespace(ds=SimpleNamespace()), LINEAR)


def test_a_local_model_is_looked_at_before_anything_starts(tmp_path):
    path = save(tmp_path / "model", "qwen3", steps=0)
    settings.check(arguments(actor__model_name_or_path=path), EXACT)
    settings.check(arguments(actor__model_name_or_path=path, vllm__tensor_parallel_size=2), EXACT)
    with pytest.raises(ModelError, match="tensor parallel size 4 cuts"):
        settings.check(arguments(actor__model_name_or_path=path, vllm__tensor_parallel_size=4), LINEAR)
    left = arguments(actor__model_name_or_path=path, vllm__tensor_parallel_size=4)
    settings.check(left, LINEAR.replace(on_cut="bf16"))
    (change,) = settings.complete(left, LINEAR.replace(on_cut="bf16"))
    assert "cuts a block of 128 in 3 layers (o_proj; model.layers.0.self_attn.o_proj to model.layers.2" in change


def test_a_folder_with_code_of_its_own_is_not_taken_for_checked(tmp_path):
    """OpenRLHF trusts remote code, so the trainer would run what the check never saw."""
    path = save(tmp_path / "model", "qwen3", steps=0)
    text = (tmp_path / "model" / "config.json").read_text()
    mine = '{"auto_map": {"AutoModelForCausalLM": "mine.Model"},'
    (tmp_path / "model" / "config.json").write_text(text.replace("{", mine, 1))
    for config in (EXACT, LINEAR):
        with pytest.raises(ModelError, match="auto_map for AutoModelForCausalLM"):
            settings.check(arguments(actor__model_name_or_path=path), config)
    settings.check(arguments(actor__model_name_or_path=path), BF16)


def test_trainings_without_a_rollout_are_refused_as_programs():
    for target in ("openrlhf.cli.train_sft", "/opt/openrlhf/cli/train_dpo.py"):
        assert "required openrlhf.cli.train_ppo_ray" in str(settings.program_problem(target))
    for target in ("openrlhf.cli.train_ppo_ray", "/opt/openrlhf/cli/train_ppo_ray.py", "openrlhf.cli.serve_rm", "train_sft.py"):
        assert settings.program_problem(target) is None


def test_completing_says_what_it_changed():
    args, eager = arguments(), Config(decode_graphs=False)
    (change,) = settings.complete(args, eager)
    assert "--vllm.enforce_eager" in change and args.vllm.enforce_eager is True
    assert settings.complete(args, eager) == settings.complete(arguments(), EXACT) == []
    assert settings.complete(arguments(), BF16) == settings.complete(arguments(), LINEAR) == []
    assert "older weights" in settings.complete(arguments(train__async_enable=True, vllm__enforce_eager=True), EXACT)[0]


def test_the_strategy_is_made_with_marked_arguments(monkeypatch):
    made = applied(settings.get_strategy, PATCHES, lambda args: args)
    args = arguments()
    assert made(args) is args and not hasattr(args, "jetrl")  # not enabled: passes through
    monkeypatch.setattr(session, "is_active", lambda: True)
    monkeypatch.setattr(session, "active_config", lambda: EXACT.resolved())
    assert made(args).jetrl == EXACT.resolved().to_env()
    settings.check_mark(args, "here")
    with pytest.raises(NotPatchedError, match="driver is not patched, but here is"):
        settings.check_mark(arguments(), "here")
    args.jetrl = BF16.to_env()
    with pytest.raises(ConflictError, match="settings of here"):
        settings.check_mark(args, "here")


def test_models_with_delta_nets_are_refused_by_name(tmp_path):
    from tests.models import config_of

    config_of("qwen3_next").save_pretrained(tmp_path)
    (problem,) = settings.problems(arguments(actor__model_name_or_path=str(tmp_path)), LINEAR)
    with pytest.raises(ModelError, match=r"with OpenRLHF .*required attention in all blocks .*found model_type='qwen3_next'"):
        raise problem


def test_models_with_latent_attention_are_refused_by_name(tmp_path):
    from tests.models import config_of

    config_of("deepseek_v3").save_pretrained(tmp_path)
    (problem,) = settings.problems(arguments(actor__model_name_or_path=str(tmp_path)), LINEAR)
    with pytest.raises(ModelError, match=r"with OpenRLHF .*attention that is not latent .*found model_type='deepseek_v3'"):
        raise problem
