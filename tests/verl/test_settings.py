"""verl's own configuration: each contradicting setting is refused before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from jetrl_patch.adapters.verl import launch, settings
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, ModelError
from jetrl_patch.patching.guards import file_of
from tests.models import config_of

R, M, A = "actor_rollout_ref.rollout", "actor_rollout_ref.model", "actor_rollout_ref.actor"
C = "algorithm.rollout_correction"
EXACT = Config(precision="fp8-unified")
LINEAR = Config(precision="fp8-unified", align="linear")
ROLLOUT = Config(precision="fp8-rollout")
BF16 = Config(precision="bf16")
FP16 = Config(precision="fp16")


@pytest.mark.parametrize("config", [EXACT, LINEAR, ROLLOUT, BF16])
def test_verls_own_defaults_are_accepted(base, config):
    settings.check(base(), config)


CONFLICTS = [
    (f"{R}.quantization=fp8", "rollout.quantization", ROLLOUT),
    (f"{R}.quantization=fp8", "rollout.quantization", FP16),
    (f"+{R}.engine_kwargs.vllm.quantization=fp8", "engine_kwargs.vllm.quantization", ROLLOUT),
    ("actor_rollout_ref.model.use_liger=True", "model.use_liger", EXACT),
]


@pytest.mark.parametrize(("override", "path", "config"), CONFLICTS)
def test_another_owner_of_the_same_thing_is_a_conflict(base, override, path, config):
    verl_config = base(override)
    before = OmegaConf.to_container(verl_config)
    with pytest.raises(ConflictError, match=rf"{path}.* required .*found .*\. [A-Z]"):
        settings.check(verl_config, config)
    assert OmegaConf.to_container(verl_config) == before


def test_measuring_leaves_verls_own_quantization_alone(base):
    """The stock FP8 rollout is a baseline: precision="bf16" measures it."""
    for path in (f"{R}.quantization", f"{R}.engine_kwargs.vllm.quantization"):
        verl_config = base(f"++{path}=fp8")
        settings.check(verl_config, BF16)
        assert not any("quantization" in change for change in settings.complete(verl_config, BF16))
        assert OmegaConf.select(verl_config, path) == "fp8"


@pytest.mark.parametrize(
    ("config", "kind", "more"),
    [
        (EXACT, "parquet", []), (EXACT, "parquet", ["actor_rollout_ref.model.use_fused_kernels=True"]),
        (ROLLOUT, "jsonl", []), (BF16, "parquet", []),
    ],
)  # fmt: skip
def test_rows_that_ask_for_greedy_decoding(base, tmp_path, config, kind, more):
    """Their log-probs are those at temperature 1, which exact samples bring to the trainer."""
    import pandas

    frame = pandas.DataFrame({"prompt": ["a", "b"], "__do_sample__": [True, False]})
    path, plain = tmp_path / f"data.{kind}", tmp_path / f"plain.{kind}"
    for data, place in ((frame, path), (frame[["prompt"]], plain)):
        data.to_parquet(place) if kind == "parquet" else data.to_json(place, orient="records", lines=True)
    verl_config = base(f"data.train_files=[{plain},{path}]", f"{R}.temperature=0.7", *more)
    if config is BF16 or (config is EXACT and not more):
        settings.check(verl_config, config)
        return
    with pytest.raises(ConfigError, match=r"data\.train_files: required no column __do_sample__ .*found one in"):
        settings.check(verl_config, config)
    for files, temperature in ((path, 1.0), (plain, 0.7), ("nowhere.parquet", 0.7)):
        verl_config.data.train_files, verl_config.actor_rollout_ref.rollout.temperature = str(files), temperature
        settings.check(verl_config, config)


REFUSED = [
    (f"{R}.name=sglang", "rollout.name", BF16),
    (f"{R}.tensor_model_parallel_size=4 {R}.expert_parallel_size=2", "expert_parallel_size", ROLLOUT),
    (f"{R}.dtype=float16", "rollout.dtype", ROLLOUT),
    ("reward.reward_model.enable=True reward.reward_model.rollout.dtype=half", "reward_model.rollout.dtype", ROLLOUT),
    ("distillation.enabled=True distillation.teacher_models.teacher_model.inference.dtype=float16", "inference.dtype", ROLLOUT),
    (f"{R}.data_parallel_size=2", "data_parallel_size", EXACT),
    (f"+{R}.repetition_penalty=1.1", "repetition_penalty", EXACT),
    (f"+{R}.min_tokens=1", "min_tokens", EXACT),
    (f"{R}.temperature=0", "temperature", BF16),
    (f"{R}.temperature=0.009", "temperature", BF16),
    (f"{R}.logprobs_mode=raw_logprobs", "logprobs_mode", BF16),
    ("algorithm.adv_estimator=remax", "adv_estimator", BF16),
]


@pytest.mark.parametrize(("override", "path", "config"), REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(base, override, path, config):
    with pytest.raises(ConfigError, match=rf"{path}.* required .*found .*\. [A-Z]"):
        settings.check(base(*override.split()), config)


@pytest.mark.parametrize("config", [EXACT, LINEAR, ROLLOUT])
@pytest.mark.parametrize(
    "override",
    [f"{R}.layered_summon=True", "reward.reward_model.enable=True", "distillation.enabled=True", f"{M}.use_fused_kernels=True",
     "actor_rollout_ref.actor.use_prefix_grouper=True", "algorithm.adv_estimator=remax trainer.use_v1=False"],
)
def test_what_stands_beside_is_accepted(base, override, config):
    settings.check(base(*override.split()), config)


WRONG = [
    (f"{R}.temperature=hot", r"rollout\.temperature.*: required at least 0\.01, .*, found 'hot'\. Set it to 1\.0\."),
    (f"{R}.temperature='0,7'", "found '0,7'"),
    (f"{R}.temperature=nan", "found nan"),
    (f"{R}.tensor_model_parallel_size=auto", r"tensor_model_parallel_size: required a whole number, found 'auto'\. Write a"),
    (f"{R}.data_parallel_size=auto", "data_parallel_size: required a whole number, found 'auto'"),
    (f"{M}.lora_rank=auto", "lora_rank: required a whole number, found 'auto'"),
    (f"{A}.fsdp_config.ulysses_sequence_parallel_size=auto", "ulysses_sequence_parallel_size: required a whole number"),
    ("trainer.nnodes=TO_BE_FILLED", r"trainer\.nnodes: required a whole number, found 'TO_BE_FILLED'"),
    (f"+{R}.engine_kwargs.vllm.tensor_parallel_size=auto", "tensor_parallel_size .*required the framework's own"),
    (f"{C}.rollout_is=token {C}.rollout_is_threshold=two", r"required thresholds above 0, found rollout_is_threshold='two', "),
    (f"{C}.rollout_rs=seq_mean_k1 {C}.rollout_rs_threshold=0", "required thresholds above 0, .*rollout_rs_threshold=0"),
    ("trainer.resume_mode=enable", "resume_mode: required auto or disable or resume_path, found 'enable'"),
    ("trainer.resume_mode=resume_path", r"resume_from_path: required a folder that ends in global_step_N, found None\. Give"),
    ("trainer.resume_mode=resume_path trainer.resume_from_path=runs/global_step_2/", "found 'runs/global_step_2/'"),
]


@pytest.mark.parametrize("config", [EXACT, BF16], ids=["exact", "bf16"])
@pytest.mark.parametrize(("overrides", "says"), WRONG)
def test_a_value_of_a_wrong_type_is_one_error_and_ends_no_list(base, overrides, says, config):
    """The doctor reads the same settings for the GPUs and the memory of a run."""
    verl_config = base(*overrides.split(), f"{R}.name=sglang")
    messages = [str(problem) for problem in settings.problems(verl_config, config)]
    found = [message for message in messages if re.search(says, message)]
    assert len(found) == ("engine_kwargs" not in overrides or config is EXACT) and len(messages) == len(found) + 1, messages
    launch.needs(verl_config)
    launch.storage(verl_config, config)


def test_a_teacher_keeps_its_dtype_when_the_rollout_becomes_fp16(base):
    verl_config = base("distillation.enabled=True")
    settings.prepare(verl_config, FP16)
    settings.prepare(verl_config, FP16)  # the trainer loop repeats it
    assert verl_config.actor_rollout_ref.rollout.dtype == "float16"
    assert verl_config.distillation.teacher_models.teacher_model.inference.dtype == "bfloat16"


def test_what_only_exact_mode_cannot_keep_is_free_in_the_others(base):
    for override, _, config in REFUSED + CONFLICTS:
        if config is EXACT:
            settings.check(base(override), LINEAR)
            settings.check(base(override), BF16)


def test_what_only_exact_mode_refuses_names_the_other_alignment(base):
    with pytest.raises(ConfigError, match=r"found 1\.1\. Set it to 1\.0, or use align='linear'\.$"):
        settings.check(base(f"+{R}.repetition_penalty=1.1"), EXACT)
    with pytest.raises(ConfigError, match=r"found 'float32'\. Set it to bfloat16\.$"):
        settings.check(base(f"{R}.dtype=float32"), EXACT)


def test_experts_may_be_split_over_the_ranks_of_an_engine(base, tmp_path):
    config_of("qwen3_moe", moe_intermediate_size=256).save_pretrained(tmp_path)
    model, tp, ep = f"{M}.path={tmp_path}", f"{R}.tensor_model_parallel_size", f"{R}.expert_parallel_size"
    for config in (EXACT, LINEAR, ROLLOUT):
        for sizes in ((f"{tp}=2",), (f"{tp}=2", f"{ep}=2")):
            settings.check(base(model, "trainer.device=cpu", *sizes), config)
    with pytest.raises(ModelError, match=r"3 expert parallel ranks divide, found 8 experts"):
        settings.check(base(model, "trainer.device=cpu", f"{tp}=3", f"{ep}=3"), LINEAR)


#: sizes with which four ranks cut no block of the attention
FOR_FOUR_RANKS = {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128}


def test_experts_that_tensor_parallelism_would_cut_stay_whole(base, tmp_path):
    """As in verl's run_qwen3_30b_a3b_fsdp.sh: experts of width 768 on 4 ranks."""
    config_of("qwen3_moe", moe_intermediate_size=768, **FOR_FOUR_RANKS).save_pretrained(tmp_path)
    model, tp, ep = f"{M}.path={tmp_path}", f"{R}.tensor_model_parallel_size", f"{R}.expert_parallel_size"
    why = "tensor parallel size 4 would cut a block of the experts, so each rank holds whole ones"
    chosen = [f"{ep}=4, which was 1: {why}"]
    for config in (EXACT, LINEAR, ROLLOUT):
        verl_config = base(model, f"{tp}=4")
        settings.check(verl_config, config)
        assert [change for change in settings.complete(verl_config, config) if "expert" in change] == chosen
        assert verl_config.actor_rollout_ref.rollout.expert_parallel_size == 4
        settings.check(verl_config, config)  # the trainer loop repeats it
        assert not any("expert" in change for change in settings.complete(verl_config, config))
    for sizes in ((f"{tp}=2",), (f"{tp}=2", f"{ep}=2"), (f"{tp}=4", f"{ep}=4")):  # whole blocks, or the user's own choice
        verl_config = base(model, *sizes)
        settings.check(verl_config, LINEAR)
        assert not any("expert" in change for change in settings.complete(verl_config, LINEAR))
    with pytest.raises(ConfigError, match=r"expert_parallel_size.* found 2\. Set it to one of the two"):
        settings.check(base(model, f"{tp}=4", f"{ep}=2"), LINEAR)
    measured = base(model, f"{tp}=4")
    settings.complete(measured, BF16)
    assert measured.actor_rollout_ref.rollout.expert_parallel_size == 1


def test_experts_that_the_ranks_do_not_divide_are_refused(base, tmp_path):
    config_of("qwen3_moe", moe_intermediate_size=256, num_experts=6, **FOR_FOUR_RANKS).save_pretrained(tmp_path)
    verl_config = base(f"{M}.path={tmp_path}", f"{R}.tensor_model_parallel_size=4")
    with pytest.raises(ModelError, match=r"4 tensor parallel ranks holds whole blocks of 128, found 256\. Use expert"):
        settings.check(verl_config, LINEAR)
    assert not any("expert" in change for change in settings.complete(verl_config, LINEAR))


def test_experts_are_accepted_on_both_devices(base, tmp_path):
    config_of("qwen3_moe").save_pretrained(tmp_path)
    model = f"actor_rollout_ref.model.path={tmp_path}"
    for device in ("cpu", "cuda"):
        settings.check(base(model, f"trainer.device={device}"), EXACT)



def test_a_family_outside_the_list(base, tmp_path):
    from transformers import GPT2Config

    GPT2Config(n_layer=2, n_embd=128, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="gpt2"):
        settings.check(base(f"actor_rollout_ref.model.path={tmp_path}"), EXACT)


def test_a_tensor_parallel_split_that_cuts_a_block(base):
    with pytest.raises(ModelError, match=r"tensor parallel size 4 cuts a block .*o_proj"):
        settings.check(base(f"{R}.tensor_model_parallel_size=4"), EXACT)
    settings.check(base(f"{R}.tensor_model_parallel_size=2"), EXACT)


def test_a_split_layer_may_be_left_out_on_both_sides(base):
    settings.check(base(f"{R}.tensor_model_parallel_size=4"), Config(exclude=("o_proj",)))
    left = base(f"{R}.tensor_model_parallel_size=4")
    settings.check(left, Config(on_cut="bf16"))
    said = [change for change in settings.complete(left, Config(on_cut="bf16")) if "on_cut" in change]
    assert len(said) == 1 and "3 layers (o_proj; model.layers.0.self_attn.o_proj to model.layers.2" in said[0]
    whole = base(f"{R}.tensor_model_parallel_size=2")
    assert not any("on_cut" in change for change in settings.complete(whole, Config(on_cut="bf16")))


def test_completes_what_the_user_need_not_know(base):
    verl_config = base(f"{R}.calculate_log_probs=False", f"{R}.enforce_eager=False")
    settings.complete(verl_config, EXACT)
    rollout = verl_config.actor_rollout_ref.rollout
    assert rollout.calculate_log_probs is True and rollout.enforce_eager is False  # the engine captures, if it can
    for eager in (Config(decode_graphs=False), Config(guard_sqnr=20.0), Config(align="linear", guard_sqnr=20.0)):
        verl_config = base(f"{R}.enforce_eager=False")
        settings.complete(verl_config, eager)
        assert verl_config.actor_rollout_ref.rollout.enforce_eager is True
    verl_config = base(f"{R}.enforce_eager=True")
    settings.complete(verl_config, EXACT)
    assert verl_config.actor_rollout_ref.rollout.enforce_eager is True  # the user's own setting
    settings.complete(verl_config, Config(decode_graphs=True))
    assert verl_config.actor_rollout_ref.rollout.enforce_eager is False
    bf16 = base(f"{R}.calculate_log_probs=False", f"{R}.enforce_eager=False")
    settings.complete(bf16, BF16)
    assert bf16.actor_rollout_ref.rollout.calculate_log_probs is True
    assert bf16.actor_rollout_ref.rollout.enforce_eager is False


def test_the_mark_survives_verls_dataclasses(base):
    from verl.utils.config import omega_conf_to_dataclass

    verl_config = base()
    settings.mark(verl_config, EXACT)
    rollout = omega_conf_to_dataclass(verl_config.actor_rollout_ref.rollout)
    assert rollout.custom[settings.MARK] == EXACT.to_env()


def test_no_engine_of_verl_shares_prefixes():
    """``use_prefix_grouper`` decides which rank gets a sample. A verl whose engines read it needs a rule again."""
    workers = Path(str(file_of("verl", "workers")))
    readers = {str(p.relative_to(workers)) for p in workers.rglob("*.py") if "use_prefix_grouper" in p.read_text()}
    assert readers == {"config/actor.py"}
