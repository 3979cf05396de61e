"""The settings of accepted launches: checked by the plugin, known to be harmless, or unreviewed.

Accepted must mean right, so each setting on an accepted command line needs one of two answers. *Checked*: the plugin reads or
sets it. *Harmless*: a row of ``HARMLESS`` says why both sides still compute the same log-probs.
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

#: why trainer and rollout stay equal with any value of a setting -> patterns of settings
HARMLESS: dict[str, dict[str, str]] = {
    "verl": {
        "how samples are batched; a row's result does not depend on its batch": (
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
        "where parameters, gradients or optimizer states are stored between uses": (
            "actor_rollout_ref.*.*offload actor_rollout_ref.*.fsdp_config.offload_policy "
            "actor_rollout_ref.*.fsdp_config.use_orig_params actor_rollout_ref.*.fsdp_config.fsdp_size "
            "actor_rollout_ref.*.fsdp_config.forward_prefetch actor_rollout_ref.*.fsdp_config.reshard_after_forward "
            "actor_rollout_ref.*.megatron.*pipeline_model_parallel_size actor_rollout_ref.*.megatron.use_megatron_fsdp "
            "actor_rollout_ref.*.veomni.fsdp_size actor_rollout_ref.*.veomni.enable_full_shard "
            "actor_rollout_ref.*.veomni.forward_prefetch actor_rollout_ref.rollout.free_cache_engine "
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes "
            "actor_rollout_ref.*.fsdp_config.wrap_policy.min_num_params"
        ),
        "how the reference loads its weights; it never sends them": "actor_rollout_ref.ref.megatron.*mbridge",
        "how weight gradients are accumulated, after the log-probs": "actor_rollout_ref.*.gradient_accumulation_fusion",
        "verl accepts only one value": "actor_rollout_ref.rollout.mode",
        "VeOmni's BF16 ops around the FP8 layers; exact mode refuses them": "actor_rollout_ref.*.veomni.*_implementation",
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
        "the engine's weights before the first sync": "actor_rollout_ref.rollout.load_format",
        "the optimizer, before the weights are quantized and sent": (
            "actor_rollout_ref.*.optim.* actor_rollout_ref.actor.grad_clip"
        ),
        "where the model's files are read from": "actor_rollout_ref.model.use_shm",
        "the scaling of adapters; both sides compute with the merged weights": "actor_rollout_ref.model.lora_alpha",
        "which layers have adapters; the worker refuses those that it cannot merge": "actor_rollout_ref.model.*_modules",
        "how verl collects unmerged adapters": "actor_rollout_ref.rollout.layered_summon",
        "activations are recomputed by the same ops": (
            "actor_rollout_ref.model.enable_gradient_checkpointing actor_rollout_ref.model.enable_activation_offload "
            "actor_rollout_ref.*.entropy_checkpointing"
        ),
        "the entropy, which does not change the log-probs": (
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
        "number of answers per prompt": "actor_rollout_ref.rollout.n actor_rollout_ref.*.rollout_n rollout.n",
        "when an answer ends; both sides get the same tokens": "actor_rollout_ref.rollout.ignore_eos",
        "the first steps train the critic alone": "trainer.critic_warmup",
        "the critic or reward model, which the plugin does not change": "critic.* reward.reward_model.*",
        "the teacher, whose engine the plugin does not change, and the loss, after the log-probs": "distillation.*",
        "a shorthand for settings that the checks read": "model_engine",
        "which prompts are used, or how answers are rewarded; both sides get the same tokens": (
            "data.* reward.custom_reward_function.* reward.reward_manager.* reward.reward_kwargs.* reward.sandbox_fusion.*"
        ),
        "the workers' Python, which the doctor checks": "ray_kwargs.ray_init.runtime_env.py_executable",
        "a seed: what is sampled or shuffled": (
            "actor_rollout_ref.*.fsdp_config.seed actor_rollout_ref.actor.data_loader_seed actor_rollout_ref.rollout.seed"
        ),
        "deterministic variants of ops that trainer and rollout do not share": "actor_rollout_ref.*.fsdp_config.full_determinism",
        "when the gradients of micro-batches are accumulated, after the log-probs": (
            "actor_rollout_ref.*.use_no_sync_for_gradient_accumulation"
        ),
        "verl sets it for the reference and refuses to train with it": "actor_rollout_ref.*.fsdp_config.forward_only",
        "verl overwrites it with the actor's or the reference's strategy": "actor_rollout_ref.*.fsdp_config.strategy",
        "the reference's own parameters; it never sends them": "actor_rollout_ref.ref.fsdp_config.model_dtype",
        "an engine for Ascend, which a rule refuses": "actor_rollout_ref.*.fsdp_config.turbo_config.*",
        "part of a feature that a rule refuses or another setting enables": (
            "actor_rollout_ref.actor.fsdp_config.qat.* actor_rollout_ref.rollout.qat "
            "actor_rollout_ref.rollout.agent.custom_async_server.name actor_rollout_ref.rollout.mtp "
            "actor_rollout_ref.rollout.disaggregation.* actor_rollout_ref.model.tiled_mlp.num_shards "
            "actor_rollout_ref.model.mtp.* skip.*.dump_dir skip.*.steps skip.*.action"
        ),
        "verl applies it only to engines that train": "actor_rollout_ref.ref.fsdp_config.qat.*",
        "verl reads the model's setting of the same name, as does a check": "actor_rollout_ref.actor.use_fused_kernels",
        "a rollout engine other than vLLM, which a rule refuses": (
            "actor_rollout_ref.rollout.engine_kwargs.sglang actor_rollout_ref.rollout.engine_kwargs.trtllm"
        ),
        "which of several equal replicas answers a request": "actor_rollout_ref.rollout.router_config_path",
        "the turns of a conversation; both sides get the same tokens and mask": "actor_rollout_ref.rollout.multi_turn.*",
        "the user's code; its tokens and log-probs are compared like any others": (
            "actor_rollout_ref.rollout.agent.*agent_loop* actor_rollout_ref.model.external_lib "
            "trainer.checkpoint_callback_class"
        ),
        "how buckets are sent; digests verify what arrived": "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs",
        "the tokenizer of both sides; its length bans the same tokens on both": "actor_rollout_ref.model.tokenizer_path",
        "how text is tokenized, before either side sees it": "actor_rollout_ref.model.custom_chat_template",
        "the plugin sets it if fused kernels are on": "actor_rollout_ref.model.fused_kernel_options.impl_backend",
        "Megatron's adapters, which a rule refuses": "actor_rollout_ref.model.lora.*",
        "whether the trainer's devices also serve a rollout; samples carry their versions": "actor_rollout_ref.hybrid_engine",
        "an old name that verl moves to reward.* before the checks (fully asynchronous), or ignores": (
            "custom_reward_function.* reward_model.* sandbox_fusion.*"
        ),
        "where samples are stored, unchanged, between rollout and trainer": "transfer_queue.*",
        "both trainers are patched": "trainer.use_v1",
        "an empty section": "trainer.v1.sync",
        "which samples a step uses; each carries the version of its weights": "trainer.v1.sampler.*",
    },
    "openrlhf": {
        "the optimizer, before the weights are quantized and sent": "actor.adam.*",
        "the loss, after the log-probs": "actor.eps_clip_low_high actor.entropy_coef algo.advantage.* algo.kl.*",
        "which parameters are trained": "actor.freeze_visual_encoder",
        "activations are recomputed by the same ops": "actor.gradient_checkpointing_enable",
        "the size of the run: processes, engines, memory": (
            "*.num_nodes *.num_gpus_per_node vllm.num_engines vllm.gpu_memory_utilization rollout.max_new_tokens"
        ),
        "the plugin's own transport replaces it": "vllm.sync_backend",
        "where parameters, gradients or optimizer states are stored between uses": (
            "vllm.enable_sleep ds.enable_sleep ds.adam_offload ds.zero_stage train.colocate_*"
        ),
        "exact mode has its own attention; other modes need no bit-equality": "ds.attn_implementation",
        "part of ring attention, which exact mode refuses": "ds.ring_attn_head_stride",
        "which prompts are used, or how answers are rewarded; both sides get the same tokens": "train.agent_func_path data.*",
        "how samples are batched; a row's result does not depend on its batch": (
            "train.dynamic_batch_enable train.max_tokens_per_gpu rollout.max_tokens_per_gpu *.batch_size *.micro_batch_size "
            "train.max_epochs"
        ),
        "what is logged, saved or evaluated, and how often": "train.num_episodes ckpt.* eval.* logger.*",
        "number of answers per prompt": "rollout.n_samples_per_prompt",
        "which samples are used for training": "algo.dynamic_filtering_*",
        "the critic or reward model, which the plugin does not change": "critic.* reward.*",
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
            settings.RULES, precision.RULES, precision.BUFFER_RULES, precision.HEAD_RULES, megatron.RULES, veomni.RULES,
            lora.RULES, lora.WITH_ADAPTERS,
        )
        more = {f"{MODEL}.path", f"{MODEL}.trust_remote_code", f"{ROLLOUT}.tensor_model_parallel_size"}
        more |= {
            f"{ROLLOUT}.calculate_log_probs",
            f"{ROLLOUT}.enforce_eager",
            f"{ACTOR}.megatron.tensor_model_parallel_size",
        }
    else:
        from jetrl_patch.adapters.openrlhf import settings as own
        from jetrl_patch.adapters.openrlhf import vision

        rules = itertools.chain(own.RULES, own.PRECISION_RULES, own.HEAD_RULES, vision.RULES, vision.TEXT_RULES)
        more = {"actor.model_name_or_path", "vllm.tensor_parallel_size", "vllm.enforce_eager", "train.async_enable"}
    return frozenset(rule.path for rule in rules) | more


def reason(framework: str, name: str) -> str:
    """Why a setting may be on an accepted command line; empty if it is unreviewed."""
    parts = name.split(".")
    if any(".".join(parts[:n]) in checked(framework) for n in range(len(parts), 1, -1)):  # also as part of a section
        return "checked by the plugin"
    return harmless(framework, name)


def harmless(framework: str, name: str) -> str:
    """Why both sides stay equal with any value of a setting; empty if no row says so."""
    rows = HARMLESS[framework].items()
    return next((why for why, patterns in rows for pattern in patterns.split() if fnmatch.fnmatchcase(name, pattern)), "")


def open_keys(judged: Sequence[Judged], mode: str) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Setting -> (accepted launches that use it, its values), for unreviewed settings."""
    values: dict[str, set[str]] = defaultdict(set)
    number: dict[str, int] = defaultdict(int)
    for one in judged:
        if one.kind is not None and one.accepted(mode):
            for name, value in one.set_keys.items():
                if not reason(one.framework, name):
                    values[name].add(value)
                    number[name] += 1
    return {name: (number[name], tuple(sorted(values[name]))) for name in sorted(values)}
