"""The settings that accepted launches give: checked by the plugin, known to be harmless, or looked at by nobody.

Accepted must mean right, so each setting on an accepted command line needs one of two answers. *Checked*: a rule of the
plugin reads it, or the plugin sets it. *Harmless*: a row of ``HARMLESS`` says why both sides still compute the same log-probs.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from jetrl_patch.trainer.rules import Rule
from scripts.official.judge import READ, Judged

__all__ = ["HARMLESS", "checked", "harmless", "open_keys", "reason"]

_SCHEDULE = "how samples are put into batches, in which a row's result does not depend on the others"
_LOSS = "the loss, after the log-probs"
_PLACE = "where parameters, gradients or optimizer states lie between uses"
_LOG = "what is logged, saved or evaluated, and how often"
_DATA = "which prompts are asked, or how they are rewarded; both sides get the same tokens"
_OPTIMIZER = "the optimizer, before the weights are quantized and sent"
_SIZE = "the size of the run: processes, engines, memory"
_CRITIC = "the critic or reward model, which the plugin leaves as it is"
_RECOMPUTE = "activations are computed again by the same ops"
_SAMPLES = "how many answers a prompt gets"
_PROFILE = "a profiler around the step"
_ENTROPY = "the entropy, beside the log-probs"
_UNREAD = "a field that no code of verl 0.9 reads"
_OFF = "part of a feature that a rule refuses, or that another setting turns on"
_WHICH = "which samples a step trains on; each carries the version of its weights"
_OWN_CODE = "code of the user's own; the tokens and log-probs that it returns are compared as any others"
_SEED = "a seed: what is sampled or shuffled"
_DEFERRED = "when the gradients of micro-batches are added up, after the log-probs"
_DETERMINISTIC = "deterministic variants of ops that trainer and rollout do not share"
_TEXT = "how text becomes tokens, before either side sees them"
_MEGATRON_LORA = "adapters of Megatron, which a rule refuses"
_ENGINE_BESIDE = "another rollout engine than vLLM, which a rule refuses"
_OVERWRITTEN = "verl overwrites it with the actor's or the reference's strategy"
_LEGACY = "an old name that verl moves to reward.* before our checks (fully asynchronous), or does not read"
_QUEUE = "where samples lie between rollout and trainer, unchanged"

#: pattern of a setting -> why trainer and rollout stay equal whatever its value
HARMLESS: dict[str, dict[str, str]] = {
    "verl": {
        "actor_rollout_ref.*.ppo_*batch_size*": _SCHEDULE,
        "actor_rollout_ref.*.*max_token_len_per_gpu": _SCHEDULE,
        "actor_rollout_ref.*.use_dynamic_bsz": _SCHEDULE,
        "actor_rollout_ref.*.log_prob_*": _SCHEDULE,
        "actor_rollout_ref.*.ppo_epochs": _SCHEDULE,
        "actor_rollout_ref.model.use_remove_padding": _SCHEDULE,
        "actor_rollout_ref.rollout.enable_chunked_prefill": _SCHEDULE,
        "actor_rollout_ref.rollout.max_num_*": _SCHEDULE,
        "actor_rollout_ref.rollout.enable_prefix_caching": _SCHEDULE,
        "trainer.balance_batch": _SCHEDULE,
        "actor_rollout_ref.actor.use_prefix_grouper": _SCHEDULE,
        "actor_rollout_ref.actor.clip_ratio*": _LOSS,
        "actor_rollout_ref.actor.entropy_coeff": _LOSS,
        "actor_rollout_ref.actor.kl_loss_*": _LOSS,
        "actor_rollout_ref.actor.use_kl_loss": _LOSS,
        "actor_rollout_ref.actor.loss_agg_mode": _LOSS,
        "actor_rollout_ref.actor.loss_scale_factor": _LOSS,
        "actor_rollout_ref.actor.policy_loss.*": _LOSS,
        "actor_rollout_ref.actor.calculate_sum_pi_squared": _LOSS,
        "algorithm.*": _LOSS,
        "actor_rollout_ref.*.*offload": _PLACE,
        "actor_rollout_ref.*.fsdp_config.offload_policy": _PLACE,
        "actor_rollout_ref.*.fsdp_config.use_orig_params": _PLACE,
        "actor_rollout_ref.*.fsdp_config.fsdp_size": _PLACE,
        "actor_rollout_ref.*.fsdp_config.forward_prefetch": _PLACE,
        "actor_rollout_ref.*.fsdp_config.reshard_after_forward": _PLACE,
        "actor_rollout_ref.*.megatron.*pipeline_model_parallel_size": _PLACE,
        "actor_rollout_ref.*.megatron.use_megatron_fsdp": _PLACE,
        "actor_rollout_ref.ref.megatron.*mbridge": "how the reference loads its weights, which it never sends",
        "actor_rollout_ref.*.gradient_accumulation_fusion": "how weight gradients are added up, after the log-probs",
        "actor_rollout_ref.rollout.mode": "verl refuses all but one value",
        "actor_rollout_ref.*.veomni.fsdp_size": _PLACE,
        "actor_rollout_ref.*.veomni.enable_full_shard": _PLACE,
        "actor_rollout_ref.*.veomni.forward_prefetch": _PLACE,
        "actor_rollout_ref.*.veomni.*_implementation": "VeOmni's ops in BF16 around the FP8 layers, which exact mode refuses",
        "actor_rollout_ref.*.pad_to_length": _SCHEDULE,
        "actor_rollout_ref.rollout.disable_log_stats": _LOG,
        "trainer.max_*_ckpt_to_keep": _LOG,
        "actor_rollout_ref.rollout.free_cache_engine": _PLACE,
        "actor_rollout_ref.rollout.multi_stage_wake_up": _UNREAD,
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": _PLACE,
        "actor_rollout_ref.rollout.load_format": "what the engine holds before the first weight sync",
        "actor_rollout_ref.*.optim.*": _OPTIMIZER,
        "actor_rollout_ref.actor.grad_clip": _OPTIMIZER,
        "actor_rollout_ref.model.use_shm": "where the model's files lie while they are read",
        "actor_rollout_ref.model.lora_alpha": "the scaling of adapters; both sides compute with the merged weights",
        "actor_rollout_ref.model.*_modules": "which layers have adapters; the worker refuses others than it can merge",
        "actor_rollout_ref.rollout.layered_summon": "how verl collects adapters that it does not merge",
        "actor_rollout_ref.model.enable_gradient_checkpointing": _RECOMPUTE,
        "actor_rollout_ref.model.enable_activation_offload": _RECOMPUTE,
        "actor_rollout_ref.*.entropy_checkpointing": _RECOMPUTE,
        "actor_rollout_ref.*.entropy_from_logits_with_chunking": _ENTROPY,
        "actor_rollout_ref.*.use_torch_compile": _ENTROPY,
        "actor_rollout_ref.*.profiler.*": _PROFILE,
        "global_profiler.*": _PROFILE,
        "actor_rollout_ref.rollout.gpu_memory_utilization": _SIZE,
        "actor_rollout_ref.rollout.max_model_len": _SIZE,
        "actor_rollout_ref.rollout.prompt_length": _SIZE,
        "actor_rollout_ref.rollout.response_length": _SIZE,
        "actor_rollout_ref.rollout.agent.num_workers": _SIZE,
        "trainer.n_gpus_per_node": _SIZE,
        "trainer.nnodes": _SIZE,
        "actor_rollout_ref.rollout.n": _SAMPLES,
        "actor_rollout_ref.rollout.ignore_eos": "when an answer ends; both sides get the same tokens",
        "actor_rollout_ref.rollout.val_kwargs.*": _LOG,
        "trainer.*_freq": _LOG,
        "trainer.logger": _LOG,
        "trainer.*_name": _LOG,
        "trainer.total_*": _LOG,
        "trainer.val_*": _LOG,
        "trainer.log_val_generations": _LOG,
        "trainer.default_local_dir": _LOG,
        "trainer.resume_*": _LOG,
        "trainer.critic_warmup": "the first steps train the critic alone",
        "critic.*": _CRITIC,
        "distillation.*": "the teacher, whose engine the plugin leaves as it is, and the loss, after the log-probs",
        "reward.reward_model.*": _CRITIC,
        "model_engine": "a name for settings that the checks read where it has put them",
        "data.*": _DATA,
        "reward.custom_reward_function.*": _DATA,
        "reward.reward_manager.*": _DATA,
        "reward.reward_kwargs.*": _DATA,
        "reward.num_workers": _SIZE,
        "ray_kwargs.ray_init.num_*": _SIZE,
        "ray_kwargs.ray_init.runtime_env.py_executable": "the workers' Python, on which the doctor reports",
        "ray_kwargs.timeline_json_file": _LOG,
        "actor_rollout_ref.*.fsdp_config.seed": _SEED,
        "actor_rollout_ref.*.fsdp_config.full_determinism": _DETERMINISTIC,
        "actor_rollout_ref.*.entropy_from_logits_chunk_size": _ENTROPY,
        "actor_rollout_ref.*.use_no_sync_for_gradient_accumulation": _DEFERRED,
        "actor_rollout_ref.*.pad_to_length_bucket": _SCHEDULE,
        "actor_rollout_ref.*.fsdp_config.forward_only": "verl sets it for the reference, and refuses to train with it",
        "actor_rollout_ref.*.fsdp_config.strategy": _OVERWRITTEN,
        "actor_rollout_ref.*.fsdp_config.wrap_policy.min_num_params": _PLACE,
        "actor_rollout_ref.ref.fsdp_config.model_dtype": "the reference's own parameters, which it never sends",
        "actor_rollout_ref.*.fsdp_config.turbo_config.*": "an engine for Ascend, which a rule refuses",
        "actor_rollout_ref.actor.fsdp_config.qat.*": _OFF,
        "actor_rollout_ref.ref.fsdp_config.qat.*": "verl applies it to engines that train, and the reference does not",
        "actor_rollout_ref.actor.qat.*": _UNREAD,
        "actor_rollout_ref.rollout.qat": _OFF,
        "actor_rollout_ref.*.rollout_n": _SAMPLES,
        "actor_rollout_ref.actor.tau_*": _LOSS,
        "actor_rollout_ref.actor.freeze_vision_tower": _UNREAD,
        "actor_rollout_ref.actor.calculate_entropy": _ENTROPY,
        "actor_rollout_ref.actor.shuffle": _SCHEDULE,
        "actor_rollout_ref.actor.data_loader_seed": _SEED,
        "actor_rollout_ref.actor.checkpoint.*": _LOG,
        "actor_rollout_ref.actor.use_fused_kernels": "verl reads the model's setting of this name, which a check reads too",
        "actor_rollout_ref.actor.use_remove_padding": _SCHEDULE,
        "actor_rollout_ref.actor.use_rollout_log_probs": _UNREAD,
        "actor_rollout_ref.rollout.nnodes": _SIZE,
        "actor_rollout_ref.rollout.n_gpus_per_node": _SIZE,
        "actor_rollout_ref.rollout.standalone_gpu_memory_utilization": _SIZE,
        "actor_rollout_ref.rollout.seed": _SEED,
        "actor_rollout_ref.rollout.cudagraph_capture_sizes": _SCHEDULE,
        "actor_rollout_ref.rollout.scheduling_policy": _SCHEDULE,
        "actor_rollout_ref.rollout.do_sample": _UNREAD,
        "actor_rollout_ref.rollout.over_sample_rate": _UNREAD,
        "actor_rollout_ref.rollout.skip_tokenizer_init": _UNREAD,
        "actor_rollout_ref.rollout.engine_kwargs.sglang": _ENGINE_BESIDE,
        "actor_rollout_ref.rollout.engine_kwargs.trtllm": _ENGINE_BESIDE,
        "actor_rollout_ref.rollout.router_config_path": "which of the equal replicas answers a request",
        "actor_rollout_ref.rollout.multi_turn.*": "what a conversation consists of; both sides get the same tokens and mask",
        "actor_rollout_ref.rollout.agent.*agent_loop*": _OWN_CODE,
        "actor_rollout_ref.rollout.agent.custom_async_server.name": _OFF,
        "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs": "how buckets travel; digests prove what has arrived",
        "actor_rollout_ref.rollout.trace.*": _LOG,
        "actor_rollout_ref.rollout.moe_load_balance_metrics_interval": _LOG,
        "actor_rollout_ref.rollout.prometheus.*": _LOG,
        "actor_rollout_ref.rollout.mtp": _OFF,
        "actor_rollout_ref.rollout.disaggregation.*": _OFF,
        "actor_rollout_ref.model.tokenizer_path": "one tokenizer for both sides, whose length bans the same tokens on both",
        "actor_rollout_ref.model.custom_chat_template": _TEXT,
        "actor_rollout_ref.model.external_lib": _OWN_CODE,
        "actor_rollout_ref.model.fused_kernel_options.impl_backend": "the plugin sets it where fused kernels are on",
        "actor_rollout_ref.model.tiled_mlp.num_shards": _OFF,
        "actor_rollout_ref.model.mtp.*": _OFF,
        "actor_rollout_ref.model.lora.*": _MEGATRON_LORA,
        "actor_rollout_ref.nccl_timeout": _UNREAD,
        "actor_rollout_ref.hybrid_engine": "whether the trainer's devices serve a rollout too, whose samples carry versions",
        "custom_reward_function.*": _LEGACY,
        "reward_model.*": _LEGACY,
        "sandbox_fusion.*": _LEGACY,
        "reward.sandbox_fusion.*": _DATA,
        "transfer_queue.*": _QUEUE,
        "trainer.rollout_data_dir": _LOG,
        "trainer.validation_data_dir": _LOG,
        "trainer.esi_redundant_time": _LOG,
        "trainer.checkpoint_callback_class": _OWN_CODE,
        "trainer.default_hdfs_dir": _LOG,
        "trainer.del_local_ckpt_after_load": _LOG,
        "trainer.ray_wait_register_center_timeout": _SIZE,
        "trainer.use_v1": "both trainers are patched",
        "trainer.v1.sync": "an empty section",
        "trainer.v1.sampler.*": _WHICH,
        "skip.*.dump_dir": _OFF,
        "skip.*.steps": _OFF,
        "skip.*.action": _OFF,
        "rollout.nnodes": _SIZE,
        "rollout.n_gpus_per_node": _SIZE,
        "rollout.n": _SAMPLES,
        "rollout.total_rollout_steps": _SIZE,
    },
    "openrlhf": {
        "actor.adam.*": _OPTIMIZER,
        "actor.eps_clip_low_high": _LOSS,
        "actor.entropy_coef": _LOSS,
        "actor.freeze_visual_encoder": "which parameters learn",
        "actor.gradient_checkpointing_enable": _RECOMPUTE,
        "*.num_nodes": _SIZE,
        "*.num_gpus_per_node": _SIZE,
        "vllm.num_engines": _SIZE,
        "vllm.gpu_memory_utilization": _SIZE,
        "vllm.sync_backend": "the plugin's wire takes its place",
        "vllm.enable_sleep": _PLACE,
        "ds.enable_sleep": _PLACE,
        "ds.adam_offload": _PLACE,
        "ds.zero_stage": _PLACE,
        "ds.attn_implementation": "exact mode has its own attention; the other modes compare nothing bit by bit",
        "ds.ring_attn_head_stride": "part of ring attention, which exact mode refuses",
        "train.agent_func_path": _DATA,
        "train.dynamic_batch_enable": _SCHEDULE,
        "train.max_tokens_per_gpu": _SCHEDULE,
        "rollout.max_tokens_per_gpu": _SCHEDULE,
        "*.batch_size": _SCHEDULE,
        "*.micro_batch_size": _SCHEDULE,
        "train.max_epochs": _SCHEDULE,
        "train.num_episodes": _LOG,
        "train.colocate_*": _PLACE,
        "rollout.n_samples_per_prompt": _SAMPLES,
        "rollout.max_new_tokens": _SIZE,
        "algo.advantage.*": _LOSS,
        "algo.kl.*": _LOSS,
        "algo.dynamic_filtering_*": "which samples are trained on",
        "ckpt.*": _LOG,
        "eval.*": _LOG,
        "logger.*": _LOG,
        "critic.*": _CRITIC,
        "reward.*": _CRITIC,
        "data.*": _DATA,
    },
}


def checked(framework: str) -> frozenset[str]:
    """The settings that a check of the plugin reads, and those that the plugin sets."""
    return _ruled(framework) | (READ if framework == "verl" else frozenset())


@functools.cache
def _ruled(framework: str) -> frozenset[str]:
    if framework == "verl":
        from jetrl_patch.adapters.verl import lora, megatron, precision, settings, veomni
        from jetrl_patch.adapters.verl.yaml_settings import ACTOR, MODEL, ROLLOUT

        rules: Iterable[Rule] = itertools.chain(
            settings.RULES, precision.RULES, precision.HEAD_RULES, megatron.RULES, veomni.RULES, lora.RULES, lora.WITH_ADAPTERS
        )
        more = {f"{MODEL}.path", f"{MODEL}.trust_remote_code", f"{ROLLOUT}.tensor_model_parallel_size"}
        more |= {
            f"{ROLLOUT}.calculate_log_probs",
            f"{ROLLOUT}.enforce_eager",
            f"{ACTOR}.megatron.tensor_model_parallel_size",
        }
    else:
        from jetrl_patch.adapters.openrlhf import settings as openrlhf_precision
        from jetrl_patch.adapters.openrlhf import settings as openrlhf_settings
        from jetrl_patch.adapters.openrlhf import vision

        rules = itertools.chain(
            openrlhf_settings.RULES, openrlhf_precision.PRECISION_RULES, openrlhf_precision.HEAD_RULES,
            vision.RULES, vision.TEXT_RULES
        )
        more = {"actor.model_name_or_path", "vllm.tensor_parallel_size", "vllm.enforce_eager", "train.async_enable"}
    return frozenset(rule.path for rule in rules) | more


def reason(framework: str, name: str) -> str:
    """Why a setting may be on an accepted command line; empty if nobody has looked at it."""
    parts = name.split(".")
    if any(".".join(parts[:n]) in checked(framework) for n in range(len(parts), 1, -1)):  # also as part of a section
        return "checked by the plugin"
    return harmless(framework, name)


def harmless(framework: str, name: str) -> str:
    """Why both sides stay equal whatever the value of a setting; empty if no row says so."""
    return next((why for pattern, why in HARMLESS[framework].items() if fnmatch.fnmatchcase(name, pattern)), "")


def open_keys(judged: Sequence[Judged], mode: str) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Setting -> (accepted launches that give it, its values), for the settings that nobody has looked at."""
    values: dict[str, set[str]] = defaultdict(set)
    number: dict[str, int] = defaultdict(int)
    for one in judged:
        if one.kind is not None and one.accepted(mode):
            for name, value in one.set_keys.items():
                if not reason(one.framework, name):
                    values[name].add(value)
                    number[name] += 1
    return {name: (number[name], tuple(sorted(values[name]))) for name in sorted(values)}
