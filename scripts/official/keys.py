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

#: why trainer and rollout stay equal whatever the value of a setting -> patterns of settings
HARMLESS: dict[str, dict[str, str]] = {
    "verl": {
        "how samples are put into batches, in which a row's result does not depend on the others": (
            "actor_rollout_ref.*.ppo_*batch_size* actor_rollout_ref.*.*max_token_len_per_gpu "
            "actor_rollout_ref.*.use_dynamic_bsz actor_rollout_ref.*.log_prob_* actor_rollout_ref.*.ppo_epochs "
            "actor_rollout_ref.model.use_remove_padding actor_rollout_ref.rollout.enable_chunked_prefill "
            "actor_rollout_ref.rollout.max_num_* actor_rollout_ref.rollout.enable_prefix_caching trainer.balance_batch "
            "actor_rollout_ref.actor.use_prefix_grouper actor_rollout_ref.*.pad_to_length "
            "actor_rollout_ref.*.pad_to_length_bucket actor_rollout_ref.actor.shuffle "
            "actor_rollout_ref.actor.use_remove_padding actor_rollout_ref.rollout.cudagraph_capture_sizes "
            "actor_rollout_ref.rollout.scheduling_policy"
        ),
        "the loss, after the log-probs": (
            "actor_rollout_ref.actor.clip_ratio* actor_rollout_ref.actor.entropy_coeff actor_rollout_ref.actor.kl_loss_* "
            "actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.actor.loss_agg_mode "
            "actor_rollout_ref.actor.loss_scale_factor actor_rollout_ref.actor.policy_loss.* "
            "actor_rollout_ref.actor.calculate_sum_pi_squared algorithm.* actor_rollout_ref.actor.tau_*"
        ),
        "where parameters, gradients or optimizer states lie between uses": (
            "actor_rollout_ref.*.*offload actor_rollout_ref.*.fsdp_config.offload_policy "
            "actor_rollout_ref.*.fsdp_config.use_orig_params actor_rollout_ref.*.fsdp_config.fsdp_size "
            "actor_rollout_ref.*.fsdp_config.forward_prefetch actor_rollout_ref.*.fsdp_config.reshard_after_forward "
            "actor_rollout_ref.*.megatron.*pipeline_model_parallel_size actor_rollout_ref.*.megatron.use_megatron_fsdp "
            "actor_rollout_ref.*.veomni.fsdp_size actor_rollout_ref.*.veomni.enable_full_shard "
            "actor_rollout_ref.*.veomni.forward_prefetch actor_rollout_ref.rollout.free_cache_engine "
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes "
            "actor_rollout_ref.*.fsdp_config.wrap_policy.min_num_params"
        ),
        "how the reference loads its weights, which it never sends": "actor_rollout_ref.ref.megatron.*mbridge",
        "how weight gradients are added up, after the log-probs": "actor_rollout_ref.*.gradient_accumulation_fusion",
        "verl refuses all but one value": "actor_rollout_ref.rollout.mode",
        "VeOmni's ops in BF16 around the FP8 layers, which exact mode refuses": "actor_rollout_ref.*.veomni.*_implementation",
        "what is logged, saved or evaluated, and how often": (
            "actor_rollout_ref.rollout.disable_log_stats trainer.max_*_ckpt_to_keep actor_rollout_ref.rollout.val_kwargs.* "
            "trainer.*_freq trainer.logger trainer.*_name trainer.total_* trainer.val_* trainer.log_val_generations "
            "trainer.default_local_dir trainer.resume_* ray_kwargs.timeline_json_file actor_rollout_ref.actor.checkpoint.* "
            "actor_rollout_ref.rollout.trace.* actor_rollout_ref.rollout.moe_load_balance_metrics_interval "
            "actor_rollout_ref.rollout.prometheus.* trainer.rollout_data_dir trainer.validation_data_dir "
            "trainer.esi_redundant_time trainer.default_hdfs_dir trainer.del_local_ckpt_after_load"
        ),
        "a field that no code of verl 0.9 reads": (
            "actor_rollout_ref.rollout.multi_stage_wake_up actor_rollout_ref.actor.qat.* "
            "actor_rollout_ref.actor.freeze_vision_tower actor_rollout_ref.actor.use_rollout_log_probs "
            "actor_rollout_ref.rollout.do_sample actor_rollout_ref.rollout.over_sample_rate "
            "actor_rollout_ref.rollout.skip_tokenizer_init actor_rollout_ref.nccl_timeout"
        ),
        "what the engine holds before the first weight sync": "actor_rollout_ref.rollout.load_format",
        "the optimizer, before the weights are quantized and sent": (
            "actor_rollout_ref.*.optim.* actor_rollout_ref.actor.grad_clip"
        ),
        "where the model's files lie while they are read": "actor_rollout_ref.model.use_shm",
        "the scaling of adapters; both sides compute with the merged weights": "actor_rollout_ref.model.lora_alpha",
        "which layers have adapters; the worker refuses others than it can merge": "actor_rollout_ref.model.*_modules",
        "how verl collects adapters that it does not merge": "actor_rollout_ref.rollout.layered_summon",
        "activations are computed again by the same ops": (
            "actor_rollout_ref.model.enable_gradient_checkpointing actor_rollout_ref.model.enable_activation_offload "
            "actor_rollout_ref.*.entropy_checkpointing"
        ),
        "the entropy, beside the log-probs": (
            "actor_rollout_ref.*.entropy_from_logits_with_chunking actor_rollout_ref.*.use_torch_compile "
            "actor_rollout_ref.*.entropy_from_logits_chunk_size actor_rollout_ref.actor.calculate_entropy"
        ),
        "a profiler around the step": "actor_rollout_ref.*.profiler.* global_profiler.*",
        "the size of the run: processes, engines, memory": (
            "actor_rollout_ref.rollout.gpu_memory_utilization actor_rollout_ref.rollout.max_model_len "
            "actor_rollout_ref.rollout.prompt_length actor_rollout_ref.rollout.response_length "
            "actor_rollout_ref.rollout.agent.num_workers trainer.n_gpus_per_node trainer.nnodes reward.num_workers "
            "ray_kwargs.ray_init.num_* actor_rollout_ref.rollout.nnodes actor_rollout_ref.rollout.n_gpus_per_node "
            "actor_rollout_ref.rollout.standalone_gpu_memory_utilization trainer.ray_wait_register_center_timeout "
            "rollout.nnodes rollout.n_gpus_per_node rollout.total_rollout_steps"
        ),
        "how many answers a prompt gets": "actor_rollout_ref.rollout.n actor_rollout_ref.*.rollout_n rollout.n",
        "when an answer ends; both sides get the same tokens": "actor_rollout_ref.rollout.ignore_eos",
        "the first steps train the critic alone": "trainer.critic_warmup",
        "the critic or reward model, which the plugin leaves as it is": "critic.* reward.reward_model.*",
        "the teacher, whose engine the plugin leaves as it is, and the loss, after the log-probs": "distillation.*",
        "a name for settings that the checks read where it has put them": "model_engine",
        "which prompts are asked, or how they are rewarded; both sides get the same tokens": (
            "data.* reward.custom_reward_function.* reward.reward_manager.* reward.reward_kwargs.* reward.sandbox_fusion.*"
        ),
        "the workers' Python, on which the doctor reports": "ray_kwargs.ray_init.runtime_env.py_executable",
        "a seed: what is sampled or shuffled": (
            "actor_rollout_ref.*.fsdp_config.seed actor_rollout_ref.actor.data_loader_seed actor_rollout_ref.rollout.seed"
        ),
        "deterministic variants of ops that trainer and rollout do not share": "actor_rollout_ref.*.fsdp_config.full_determinism",
        "when the gradients of micro-batches are added up, after the log-probs": (
            "actor_rollout_ref.*.use_no_sync_for_gradient_accumulation"
        ),
        "verl sets it for the reference, and refuses to train with it": "actor_rollout_ref.*.fsdp_config.forward_only",
        "verl overwrites it with the actor's or the reference's strategy": "actor_rollout_ref.*.fsdp_config.strategy",
        "the reference's own parameters, which it never sends": "actor_rollout_ref.ref.fsdp_config.model_dtype",
        "an engine for Ascend, which a rule refuses": "actor_rollout_ref.*.fsdp_config.turbo_config.*",
        "part of a feature that a rule refuses, or that another setting turns on": (
            "actor_rollout_ref.actor.fsdp_config.qat.* actor_rollout_ref.rollout.qat "
            "actor_rollout_ref.rollout.agent.custom_async_server.name actor_rollout_ref.rollout.mtp "
            "actor_rollout_ref.rollout.disaggregation.* actor_rollout_ref.model.tiled_mlp.num_shards "
            "actor_rollout_ref.model.mtp.* skip.*.dump_dir skip.*.steps skip.*.action"
        ),
        "verl applies it to engines that train, and the reference does not": "actor_rollout_ref.ref.fsdp_config.qat.*",
        "verl reads the model's setting of this name, which a check reads too": "actor_rollout_ref.actor.use_fused_kernels",
        "another rollout engine than vLLM, which a rule refuses": (
            "actor_rollout_ref.rollout.engine_kwargs.sglang actor_rollout_ref.rollout.engine_kwargs.trtllm"
        ),
        "which of the equal replicas answers a request": "actor_rollout_ref.rollout.router_config_path",
        "what a conversation consists of; both sides get the same tokens and mask": "actor_rollout_ref.rollout.multi_turn.*",
        "code of the user's own; the tokens and log-probs that it returns are compared as any others": (
            "actor_rollout_ref.rollout.agent.*agent_loop* actor_rollout_ref.model.external_lib "
            "trainer.checkpoint_callback_class"
        ),
        "how buckets travel; digests prove what has arrived": "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs",
        "one tokenizer for both sides, whose length bans the same tokens on both": "actor_rollout_ref.model.tokenizer_path",
        "how text becomes tokens, before either side sees them": "actor_rollout_ref.model.custom_chat_template",
        "the plugin sets it where fused kernels are on": "actor_rollout_ref.model.fused_kernel_options.impl_backend",
        "adapters of Megatron, which a rule refuses": "actor_rollout_ref.model.lora.*",
        "whether the trainer's devices serve a rollout too, whose samples carry versions": "actor_rollout_ref.hybrid_engine",
        "an old name that verl moves to reward.* before our checks (fully asynchronous), or does not read": (
            "custom_reward_function.* reward_model.* sandbox_fusion.*"
        ),
        "where samples lie between rollout and trainer, unchanged": "transfer_queue.*",
        "both trainers are patched": "trainer.use_v1",
        "an empty section": "trainer.v1.sync",
        "which samples a step trains on; each carries the version of its weights": "trainer.v1.sampler.*",
    },
    "openrlhf": {
        "the optimizer, before the weights are quantized and sent": "actor.adam.*",
        "the loss, after the log-probs": "actor.eps_clip_low_high actor.entropy_coef algo.advantage.* algo.kl.*",
        "which parameters learn": "actor.freeze_visual_encoder",
        "activations are computed again by the same ops": "actor.gradient_checkpointing_enable",
        "the size of the run: processes, engines, memory": (
            "*.num_nodes *.num_gpus_per_node vllm.num_engines vllm.gpu_memory_utilization rollout.max_new_tokens"
        ),
        "the plugin's wire takes its place": "vllm.sync_backend",
        "where parameters, gradients or optimizer states lie between uses": (
            "vllm.enable_sleep ds.enable_sleep ds.adam_offload ds.zero_stage train.colocate_*"
        ),
        "exact mode has its own attention; the other modes compare nothing bit by bit": "ds.attn_implementation",
        "part of ring attention, which exact mode refuses": "ds.ring_attn_head_stride",
        "which prompts are asked, or how they are rewarded; both sides get the same tokens": "train.agent_func_path data.*",
        "how samples are put into batches, in which a row's result does not depend on the others": (
            "train.dynamic_batch_enable train.max_tokens_per_gpu rollout.max_tokens_per_gpu *.batch_size *.micro_batch_size "
            "train.max_epochs"
        ),
        "what is logged, saved or evaluated, and how often": "train.num_episodes ckpt.* eval.* logger.*",
        "how many answers a prompt gets": "rollout.n_samples_per_prompt",
        "which samples are trained on": "algo.dynamic_filtering_*",
        "the critic or reward model, which the plugin leaves as it is": "critic.* reward.*",
    },
}  # fmt: skip



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
    rows = HARMLESS[framework].items()
    return next((why for why, patterns in rows for pattern in patterns.split() if fnmatch.fnmatchcase(name, pattern)), "")


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
