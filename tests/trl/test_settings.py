"""Every setting of TRL's trainers is handled, refused or harmless; refusals by name; ``disable()`` with TRL imported."""

from __future__ import annotations

import ast
import gc
import json
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from jetrl_patch.adapters.trl import adapter, model, patches, settings, state
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError
from jetrl_patch.patching import guards
from tests.trl import LIMIT, TRL, needs_trl, run_python

pytestmark = [needs_trl, pytest.mark.timeout(2 * LIMIT)]

UNIFIED = {"precision": "fp8-unified"}
LINEAR = {**UNIFIED, "align": "linear"}
HALF = {"precision": "fp16"}
TRUNCATED = {"precision": "fp8-rollout", "correction": "tis", "acr": True}
LIMITS = {"top_p": 0.9, "top_k": 20, "min_p": 0.1}
UNCORRECTED = {"vllm_importance_sampling_correction": False}

#: why a setting needs no rule -> settings
HARMLESS = {
    "weighs a loss of the trainer's own experts": "router_aux_loss_coef",
    "the trainer leaves out what the rollout left out, or a correction is refused": "top_p top_k min_p "
    "vllm_structured_outputs_regex",
    "the adapter of vLLM has a table of its keys": "generation_kwargs",
    "read where it is needed": "vllm_mode trust_remote_code vllm_tensor_parallel_size steps_per_generation num_iterations beta "
    "vllm_importance_sampling_correction gradient_accumulation_steps resume_from_checkpoint output_dir full_determinism",
    "judged by what accelerate makes of them": "deepspeed fsdp fsdp_config parallelism_config accelerator_config bf16 fp16 "
    "torch_compile_backend torch_compile_mode",
    "the loss is a function of both log-probs": "epsilon epsilon_high delta loss_type importance_sampling_level scale_rewards "
    "reward_weights multi_objective_aggregation sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos "
    "vespo_k_neg "
    "vespo_lambda_neg top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max "
    "entropy_coef_delta "
    "entropy_target off_policy_mask_threshold use_bias_correction_kl vllm_importance_sampling_mode mask_truncated_completions "
    "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_cap label_smoothing_factor "
    "normalize_advantages reward_clip_range",
    "shapes of batches, on which no bit depends": "num_generations num_generations_eval generation_batch_size pad_to_multiple_of "
    "per_device_train_batch_size per_device_eval_batch_size auto_find_batch_size max_completion_length vllm_max_model_length "
    "vllm_gpu_memory_utilization average_tokens_across_devices",
    "read only without vLLM, or where to find a server": "ds3_gather_for_generation cache_implementation vllm_server_base_url "
    "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port use_transformers_continuous_batching use_cache "
    "transformers_continuous_batching_config use_transformers_paged",
    "read only with a setting that is refused": "liger_kernel_config ref_model_mixup_alpha ref_model_sync_steps",
    "one turn follows the other, on the same token ids": "max_tool_calling_iterations",
    "weights that a sleep drops are sent again": "vllm_enable_sleep_mode",
    "the optimizer writes weights, which the next sync sends": "learning_rate optim optim_args optim_target_modules adam_beta1 "
    "adam_beta2 adam_epsilon weight_decay max_grad_norm lr_scheduler_type lr_scheduler_kwargs warmup_ratio warmup_steps",
    "exact mode turns dropout off itself": "disable_dropout",
    "recomputation runs the same ops": "gradient_checkpointing gradient_checkpointing_kwargs",
    "which prompts": "shuffle_dataset chat_template_kwargs data_seed seed dataloader_drop_last dataloader_num_workers "
    "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor remove_unused_columns "
    "train_sampling_strategy "
    "ignore_data_skip label_names length_column_name include_for_metrics include_num_input_tokens_seen",
    "how long, and what is logged, saved and evaluated": "max_steps num_train_epochs do_train do_eval do_predict eval_steps "
    "eval_strategy eval_delay eval_on_start eval_accumulation_steps eval_do_concat_batches eval_use_gather_object "
    "batch_eval_metrics prediction_loss_only logging_dir logging_first_step logging_nan_inf_filter logging_steps "
    "logging_strategy "
    "log_level log_level_replica log_on_each_node log_completions log_multimodal num_completions_to_print log_unique_prompts "
    "log_completions_hub_repo report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id disable_tqdm "
    "save_on_each_node save_only_model save_steps save_strategy save_total_limit enable_jit_checkpoint load_best_model_at_end "
    "metric_for_best_model greater_is_better restore_callback_states_from_checkpoint push_to_hub hub_always_push hub_model_id "
    "hub_private_repo hub_revision hub_strategy hub_token skip_memory_metrics debug",
    "the process and its group": "use_cpu local_rank ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_static_graph "
    "ddp_find_unused_parameters ddp_timeout torch_empty_cache_steps tf32",
}

#: the plugin's settings, GRPOConfig's, arguments -> how the only error begins; None if there is none
CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str | None]] = [
    (UNIFIED, {}, {}, None),
    (UNIFIED, {"temperature": 0.7, "generation_kwargs": {"seed": 3, "stop": ["."]}, "top_k": -1, "min_p": 0.0}, {}, None),
    (UNIFIED, LIMITS, {}, None),
    (UNIFIED, {"vllm_structured_outputs_regex": "a+", "generation_kwargs": {"min_tokens": 2, "bad_words": ["a"]}}, {}, None),
    (UNIFIED, {"vllm_structured_outputs_regex": "a+", "vllm_mode": "server"}, {}, "ConfigError: GRPOConfig's "
     "vllm_structured_outputs_regex with precision='fp8-unified', align='exact': required vllm_mode='colocate', found "),
    *(
        (mode, {"generation_kwargs": {name: value}}, {}, f"ConfigError: GRPOConfig's generation_kwargs[{name!r}] with precision=")
        for mode in (LINEAR, {"precision": "bf16"})
        for name, value in (("min_tokens", 2), ("logit_bias", {"1": 2}), ("top_p", 0.9))
    ),
    (UNIFIED, {**LIMITS, "vllm_mode": "server"}, {},
     "ConfigError: GRPOConfig's top_p and GRPOConfig's top_k and GRPOConfig's min_p with precision='fp8-unified', "
     "align='exact': required vllm_mode='colocate', found top_p=0.9, top_k=20, min_p=0.1. Change that, draw from all "),
    (LINEAR, {**LIMITS, **UNCORRECTED, "repetition_penalty": 1.1}, {}, None),
    (LINEAR, {"repetition_penalty": 1.1}, {}, "ConfigError: GRPOConfig's repetition_penalty with precision='fp8-unified', "
     "align='linear': required a rollout that draws by the temperature alone"),
    (LINEAR, LIMITS, {"rloo": True}, None),
    *(
        (mode, {"top_p": 0.9}, {}, f"ConfigError: GRPOConfig's top_p with precision='{mode['precision']}', align='{align}': "
         "required a rollout that draws by the temperature alone, as the trainer assumes, for the ratios of "
         "vllm_importance_sampling_correction, found top_p=0.9. Draw from all tokens (top_p=1, top_k=0, min_p=0, "
         "no bans) without penalties, or turn the correction off.")
        for mode, align in ((LINEAR, "linear"), ({"precision": "bf16"}, "none"), ({"precision": "fp8-rollout"}, "none"))
    ),
    ({"precision": "bf16"}, {"use_vllm": False, "top_p": 0.9, "fp16": True}, {"peft_config": 1}, None),
    (LINEAR, {"use_liger_kernel": True, "generation_kwargs": {"logit_bias": {}}}, {}, None),
    (UNIFIED, {"model_init_kwargs": {"dtype": "bfloat16"}}, {}, None),
    *(
        (UNIFIED, {"generation_kwargs": {name: value}}, {}, f"ConfigError: GRPOConfig's generation_kwargs['{name}'] with "
         f"precision='fp8-unified', align='exact': required no such parameter (it {why}), found {value!r}. Drop it, or use ")
        for name, value, why in (
            ("logit_bias", {"1": 2}, "adds to the logits of some tokens"), ("top_p", 0.9, "has a setting of the framework's own"),
            ("a_later_one", 1, "is unknown"),
        )
    ),
    *(
        (UNIFIED, {name: value}, {}, f"{kind}: GRPOConfig's {name} with precision='fp8-unified', align='exact': required ")
        for name, value, kind in (
            ("use_vllm", False, "ConfigError"),
            ("vllm_model_impl", "auto", "ConfigError"),
            ("torch_compile", True, "ConfigError"),
            ("use_liger_kernel", True, "ConflictError"), ("cast_lm_head_to_fp32", True, "ConflictError"),
            ("neftune_noise_alpha", 5.0, "ConfigError"),
            ("sync_ref_model", True, "ConfigError"), ("repetition_penalty", 1.1, "ConfigError"),
            ("temperature", 0.001, "ConfigError"), ("model_init_kwargs", {"use_kernels": True}, "ConfigError"),
            ("model_init_kwargs", {"dtype": "float16"}, "ConfigError"), ("bf16_full_eval", True, "ConfigError"),
            ("fp16_full_eval", True, "ConfigError"),
        )
    ),
    *(
        (UNIFIED, {}, {name: 1}, f"{kind}: GRPOTrainer's {name} with precision='fp8-unified', align='exact': required ")
        for name, kind in (
            ("quantization_config", "ConflictError"), ("rollout_func", "ConfigError"),
        )
    ),
    (HALF, {}, {}, "ConfigError: GRPOConfig's fp16 with precision='fp16', align='none': required True: FP16 on both sides, by "
     "autocast over FP32 weights, found False. Set it to True."),
    (HALF, {"fp16": True, "model_init_kwargs": {"dtype": "float32"}}, {"peft_config": 1}, None),
    *(
        (HALF, {"fp16": True, name: value}, {}, f"ConfigError: GRPOConfig's {name} with precision='fp16', align='none': ")
        for name, value in (
            ("use_vllm", False), ("vllm_mode", "server"), ("model_init_kwargs", {"dtype": "bfloat16"}), ("bf16_full_eval", True),
        )
    ),
    ({"precision": "bf16"}, {"fp16": True, "model_init_kwargs": {"dtype": "bfloat16"}}, {}, None),
    (TRUNCATED, {}, {}, None),
    (TRUNCATED, {"delta": 3.0, "importance_sampling_level": "sequence"}, {},
     "ConfigError: acr=True with GRPOTrainer: required loss_type='grpo' or 'bnpo' or 'dr_grpo' or 'dapo' or 'luspo', "
     "importance_sampling_level='token' and no delta, found importance_sampling_level='sequence', delta=3.0. Change these, or "
     "drop acr."),
    (TRUNCATED, {"loss_type": "cispo"}, {}, "ConfigError: acr=True with GRPOTrainer: required loss_type='grpo' or "),
    ({"precision": "fp8-rollout", "correction": "tis"}, {}, {}, None),
    ({"precision": "fp8-rollout", "correction": "tis"}, {"vllm_importance_sampling_mode": "token_truncate"}, {}, None),
    ({"precision": "fp8-rollout", "correction": "geo-mis"}, {"vllm_importance_sampling_clip_max": 2.0}, {},
     "ConfigError: correction='geo-mis' with GRPOTrainer: required TRL's own correction at its defaults, found "
     "vllm_importance_sampling_clip_max=2.0. Drop it, or drop jetrl_patch's correction."),
    ({"precision": "fp8-rollout", "correction": "tis"}, {"vllm_importance_sampling_correction": False}, {},
     "ConfigError: correction='tis' with GRPOTrainer: required TRL's own correction at its defaults, found "
     "vllm_importance_sampling_correction=False."),
    ({"precision": "fp8-rollout", "correction": "geo-mis"}, {"loss_type": "vespo"}, {},
     "ConfigError: correction='geo-mis' with GRPOTrainer: required a loss that is multiplied by the weights, found "),
    ({"precision": "fp8-rollout"}, {"vllm_importance_sampling_clip_max": 0.5}, {},
     "ConfigError: GRPOConfig's vllm_importance_sampling_clip_min and vllm_importance_sampling_clip_max: required bounds"),
    ({"precision": "bf16"}, {"vllm_importance_sampling_clip_max": 0.5}, {}, None),
    ({**LINEAR, "invariant_scale": 1.5}, {}, {"peft_config": 1}, "ConfigError: invariant_scale with peft_config: required no "),
    (UNIFIED, {"repetition_penalty": 1.1}, {"rloo": True},
     "ConfigError: RLOOConfig's repetition_penalty with precision='fp8-unified', align='exact': "),
    ({"precision": "fp8-rollout", "correction": "tis"}, {}, {"rloo": True},
     "ConfigError: correction='tis' with RLOOTrainer: required a loss with importance weights, found none in TRL."),
    ({**UNIFIED, "sync": "delta"}, {}, {}, "ConfigError: sync with TRL: required no such setting, found 'delta'. Leave it unset"),
    ({**UNIFIED, "optimizer_states": "8bit"}, {}, {}, "ConfigError: optimizer_states with TRL: required no such setting"),
    ({**UNIFIED, "measure_routes": True}, {}, {}, "ConfigError: measure_routes with TRL: required no such setting"),
]  # fmt: skip


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``settings_script.py`` says of all cases, in one process."""
    script, cases = Path(__file__).with_name("settings_script.py"), json.dumps([case[:3] for case in CASES])
    done = run_python(tmp_path_factory.mktemp("settings"), str(script), given=cases)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_every_setting_is_handled_or_refused_or_harmless(said: dict[str, Any]) -> None:
    refused = {rule.path for rule in settings.RULES if not rule.path.startswith("trainer.")}
    harmless = [name for names in HARMLESS.values() for name in names.split()]
    assert len(harmless) == len(set(harmless)) and not refused & set(harmless)
    assert refused | set(harmless) == set(said["names"]), "look at the code that reads it, and give it a rule or a reason"


def test_each_refusal_names_the_setting_and_nothing_else_is_refused(said: dict[str, Any]) -> None:
    for (plugin, given, arguments, begins), errors in zip(CASES, said["errors"], strict=True):
        what = f"{plugin} {given} {arguments}: {errors}"
        assert len(errors) == (begins is not None), what
        assert begins is None or errors[0].startswith(begins), what


def test_the_configuration_for_eight_gpus_would_start(said: dict[str, Any]) -> None:
    """``trl grpo`` hands what its own parser leaves to accelerate."""
    assert said["recipe"] == {"unknown": ["--accelerate_config", "fsdp2"], "problems": []}


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        ({}, ["a run would start"]),
        (
            {"repetition_penalty": 1.1, "use_liger_kernel": True},
            ["problem: ConflictError: ", "problem: ConfigError: ", "2 problem(s)"],
        ),
    ],
)
def test_the_doctor_follows_a_script_to_its_trainer(tmp_path: Path, given: dict[str, Any], ends: list[str]) -> None:
    """All problems at once, before a model is loaded."""
    script = [sys.executable, str(Path(__file__).with_name("script.py")), json.dumps(UNIFIED), json.dumps(given)]
    done = run_python(tmp_path, "-m", "jetrl_patch", "doctor", "--follow", "--", *script)
    assert done.returncode == (1 if given else 0), done.stdout + done.stderr
    assert done.stdout.startswith("jetrl doctor: GRPOTrainer with precision='fp8-unified'")
    assert all(text in done.stdout for text in ends) and not (tmp_path / "log.json").exists()


def accelerator(**state: Any) -> Any:
    return SimpleNamespace(state=SimpleNamespace(**state))


def plugin(**given: Any) -> Any:
    usual = {"fsdp_version": 2, "cpu_offload": None, "ignored_modules": None, "activation_checkpointing": False}
    return SimpleNamespace(**usual | given)


@pytest.mark.parametrize(
    ("given", "adapted", "found"),
    [
        ({}, True, None),
        ({"activation_checkpointing": True}, False, None),
        ({"activation_checkpointing": True}, True, "activation_checkpointing with LoRA"),
        ({"ignored_modules": ["a"]}, False, "ignored_modules"),
        ({"fsdp_version": 1}, False, "version=1"),
        ({"cpu_offload": CPUOffloadPolicy()}, False, "cpu_offload"),
        ({"cpu_offload": OffloadPolicy()}, False, None),
    ],
)
def test_what_fsdp_may_do(given: dict[str, Any], adapted: bool, found: str | None) -> None:
    state = accelerator(mixed_precision="bf16", fsdp_plugin=plugin(**given))
    settings.check_accelerator(state, Config(precision="bf16"), adapted)
    if found is None:
        settings.check_accelerator(state, Config(**UNIFIED), adapted)
        return
    with pytest.raises(ConfigError, match=f"fsdp_config with TRL: required FSDP2 on GPUs.* found {found}\\. Change"):
        settings.check_accelerator(state, Config(**UNIFIED), adapted)


def test_fsdp2_returns_log_probs_unrounded() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
    sharded = accelerator(fsdp_plugin=SimpleNamespace(mixed_precision_policy=policy))
    model.return_log_probs_unrounded(sharded)
    assert sharded.state.fsdp_plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32, None)
    model.return_log_probs_unrounded(accelerator(fsdp_plugin=SimpleNamespace(mixed_precision_policy=None)))
    model.return_log_probs_unrounded(accelerator())


def test_other_trainers_are_refused_by_name(said: dict[str, Any]) -> None:
    found = said["refusals"]
    fix = "Use one of these, or run this program without jetrl_patch (JETRL_ENABLED=0)."
    of = f"required trl.GRPOTrainer or trl.RLOOTrainer, found another trainer. {fix}"
    named = "trl.trainer.distillation_trainer.DistillationTrainer"
    assert found["distillation"] == f"ConfigError: {named} with precision='fp8-unified': {of}"
    assert found["swift"] == f"ConfigError: swift.trainers.Theirs with precision='fp8-unified': {of}"
    assert found["no config"].startswith("ConfigError: GRPOTrainer: required a GRPOConfig with use_vllm=True, found none.")
    assert found["before"] == (
        "NotPatchedError: TRL: required a trainer that is built after jetrl_patch.enable(), found a GRPOTrainer from before it. "
        "Build the trainer after enable()."
    )


def test_the_trainers_that_build_engines_are_known() -> None:
    """Each of these is refused where it builds an engine: by this adapter, or as a package that builds one of its own."""
    users = set()
    for path in (TRL / "trl").rglob("*.py"):
        calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        if any(isinstance(call, ast.Name) and call.id in ("VLLMGeneration", "LLM") for call in calls):
            users.add(path.relative_to(TRL / "trl").with_suffix("").as_posix())
    assert users == {
        "generation/vllm_generation", "trainer/grpo_trainer", "trainer/rloo_trainer", "trainer/distillation_trainer",
        "experimental/sdpo/sdpo_trainer", "experimental/gold/gold_trainer", "experimental/iw_opd/iw_opd_trainer",
        "experimental/sdft/sdft_trainer", "experimental/online_dpo/online_dpo_trainer",
    }  # fmt: skip


def test_disable_restores_the_identical_objects_with_trl_imported(said: dict[str, Any]) -> None:
    unified = Config(**UNIFIED)
    assert said["patched"] == sorted({patch.target for patch in patches.patches_of(unified)})
    assert said["left"] == []


def test_another_version_of_trl_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engines are refused as those of an unknown trainer, and a program that only has it installed goes on."""
    monkeypatch.setattr(patches, "check_version", lambda name: (False, "trl 0.9"))
    assert adapter.ADAPTER.patches(Config(**UNIFIED)) == ()
    assert "trl" not in adapter.ADAPTER.requires and guards.check_version("trl")


def test_a_trainer_that_nobody_holds_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of a trainer must not hold it, or its model would stay in memory."""

    class Trainer:
        def __init__(self, model: Any = None, args: Any = None, tools: Any = None) -> None: ...

    monkeypatch.setattr(model.session, "active_config", lambda: Config(precision="bf16"))
    monkeypatch.setattr(Trainer, "__init__", model.trainer_init(Trainer.__init__))
    trainer = Trainer()
    assert trainer in state.RUNS
    held = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert held() is None


def test_acr_in_trls_own_loss(tmp_path: Path) -> None:
    """The formula where ratios are truncated, and TIS bit for bit where none is. TRL 1.16 has five losses that clip."""
    done = run_python(tmp_path, str(Path(__file__).with_name("loss_script.py")))
    assert done.returncode == 0 and len(done.stdout.split()) == 10, done.stderr[-3000:]
