"""The patches of verl. The replacements are in the other modules of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from jetrl_patch.adapters.verl import (
    checkpoint,
    correction,
    logprob,
    lora,
    metrics,
    model,
    old_log_probs,
    precision,
    rollout,
    routes,
    settings,
    support,
    sync,
    transport,
    turns,
    ulysses,
)
from jetrl_patch.adapters.verl.compat import wants_float_logits
from jetrl_patch.adapters.verl.megatron_patches import MEGATRON
from jetrl_patch.adapters.verl.vision import VISION
from jetrl_patch.patching.guards import is_installed
from jetrl_patch.patching.patch import NO_REPORT, needed
from jetrl_patch.registry import Config, Journal, OnImport, Patch

_CORRECTION = "verl.trainer.ppo.rollout_corr_helper"
_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_CHECKPOINT = "verl.utils.checkpoint.fsdp_checkpoint_manager"
_SEPARATION = "verl.experimental.separation.engine_workers"
_VEOMNI = "verl.workers.engine.veomni.transformer_impl"
_CALLS_PLUGINS = "verl calls its plugins (entry points verl.plugins) with the composed Hydra config before run_ppo calls ray.init"
_VEOMNI_CALLS = "verl's VeOmniEngine._build_model_optimizer has a hook for the built model, before build_parallelize_model"
_FIRST_BATCH = "verl's bypass_mode loss logs the log-probs' mismatch, over the first mini-batch of a step only"
_TURNS = "verl's TokenOutput and AgentLoopOutput have vLLM's sampling masks, and the loops join those of their turns"
_COPIES = "verl's fsdp2_sharded_save_to_cpu clones parameters that are on the CPU, after pending copies from the GPU"

#: ``when`` says which settings need one
PATCHES: tuple[Patch, ...] = (
    Patch(
        "verl.utils.config", "validate_config", settings.settled,
        reason="verl does not know jetrl_patch; this rejects conflicting settings before Ray starts and fills in missing ones",
        remove_when=_CALLS_PLUGINS,
    ),
    Patch(
        "verl.trainer.main_ppo", "run_ppo", settings.settled,
        reason="verl's asynchronous programs validate their settings after Ray has started, or not at all",
        remove_when=_CALLS_PLUGINS,
    ),
    Patch(
        "verl.experimental.separation.ray_trainer", "SeparateRayPPOTrainer._init_resource_pools", settings.separate_pools,
        reason="the asynchronous trainers skip RayPPOTrainer.__init__, so the settings would not reach their workers",
        remove_when="verl's SeparateRayPPOTrainer.__init__ calls RayPPOTrainer.__init__",
    ),
    Patch(
        "verl.experimental.separation.ray_trainer", "SeparateRayPPOTrainer._fit_compute_log_prob", metrics.separate_log_prob,
        reason="in bypass mode the loss measures the mismatch, but it cannot tell stale samples from current ones",
        remove_when="verl.workers.utils.losses.ppo_loss receives the weight version of each sample",
    ),
    Patch(
        "verl.trainer.ppo.ray_trainer", "RayPPOTrainer.__init__", settings.trainer_init,
        reason="a driver that does not call validate_config would start unchecked (V0)",
        remove_when="verl removes the V0 trainer (verl.trainer.ppo.ray_trainer.RayPPOTrainer)",
    ),
    Patch(
        "verl.trainer.ppo.ray_trainer", "RayPPOTrainer._compute_old_log_prob", metrics.v0_old_log_prob,
        reason="without a correction verl does not log the mismatch, and outside bypass mode it always recomputes log-probs (V0)",
        remove_when="verl removes the V0 trainer (verl.trainer.ppo.ray_trainer.RayPPOTrainer)",
        upstream="https://github.com/verl-project/verl/issues/3996",
    ),
    Patch(
        "verl.trainer.ppo.v1.trainer_base", "PPOTrainer.__init__", settings.trainer_init,
        reason="a driver that does not call validate_config would start unchecked (V1)",
        remove_when="verl's PPOTrainer.__init__ (verl.trainer.ppo.v1) calls validate_config",
    ),
    Patch(
        "verl.trainer.ppo.v1.trainer_base", "PPOTrainer._compute_old_log_prob", metrics.v1_old_log_prob,
        reason="without a correction verl does not log the mismatch, and outside bypass mode it always recomputes log-probs (V1)",
        remove_when="verl's PPOTrainer._compute_old_log_prob logs the mismatch without rollout_correction, and can take the "
        "rollout's log-probs after a check",
        upstream="https://github.com/verl-project/verl/issues/3996",
    ),
    Patch(
        "verl.utils.tracking", "Tracking.log", metrics.log,
        reason="jetrl_patch's metrics would not reach the user's loggers",
        remove_when="verl logs what CheckpointEngineManager.update_weights returns, or Tracking.log has a hook for extra metrics",
    ),
    Patch(
        "verl.checkpoint_engine.base", "CheckpointEngineManager.update_weights", metrics.manager_update_weights,
        always="verl's auto_await inspects its caller, so it stays outermost; what it awaits is gated",
        reason="verl discards what workers return from a sync, so neither an unpatched worker nor the sync's cost would show",
        remove_when="verl's CheckpointEngineManager.update_weights returns the workers' results with the naive backend too",
    ),
    Patch(
        "verl.workers.engine_workers", "ActorRolloutRefWorker.init_model", sync.init_model,
        reason="a worker with settings other than the trainer loop's would silently build a different model",
        remove_when="verl starts its plugins (verl.plugins) in each worker with the driver's config, and fails if a plugin does",
    ),
    Patch(
        "verl.workers.engine_workers", "ActorRolloutRefWorker.update_weights", sync.worker_update_weights,
        reason="verl does not report how long a sync took and how many bytes it sent",
        remove_when="verl's ActorRolloutRefWorker.update_weights returns the seconds and bytes of the sync",
    ),
    Patch(
        _ENGINE, "FSDPEngine._build_module", model.build_module,
        reason="verl's FSDP engine cannot train in FP8; this converts the model after loading, before LoRA, QAT or FSDP wrap "
        "it. Value models are not converted",
        remove_when="verl's FSDPEngine._build_module has a hook for the loaded model; verl#4325 (FP8 by torchao) adds none",
        upstream="https://github.com/verl-project/verl/pull/4325",
    ),
    Patch(
        _ENGINE, "FSDPEngine._build_module", ulysses.build_module,
        when=lambda config: not config.exact,
        reason="verl runs the Ulysses all-to-all only around flash attention: with sdpa or eager each rank silently attends "
        "within its own slice. Exact mode and VeOmni have their own all-to-all",
        upstream=NO_REPORT,
        remove_when="verl.models.transformers.monkey_patch adds the all-to-all to sdpa and eager, or rejects them under Ulysses",
        fixes="verl",
    ),
    Patch(
        _ENGINE, "FSDPEngine._build_lora_module", lora.build_lora_module,
        reason="verl's LoRA layers add B A x to W x, which a rollout with one merged, quantized weight cannot reproduce. "
        "Critics and precision='bf16' are unchanged",
        remove_when="verl's FSDPEngine._build_lora_module can build layers that compute with the merged weight W + BA",
    ),
    Patch(
        _ENGINE, "FSDPEngine._merged_lora_per_tensor_param", lora.merged_lora_per_tensor_param,
        reason="verl's merge for a sync rounds unlike the layers that trained, and copies all weights to the CPU and back",
        remove_when="verl.utils.fsdp_utils.merged_lora_context yields the same merged weights that the LoRA layers compute with",
    ),
    Patch(
        _ENGINE, "FSDPEngine._build_fsdp_module", precision.build_fsdp_module,
        reason="verl's loss scaler is off without CUDA, so gradients underflow. Modes without a loss scale are unchanged",
        remove_when="verl's FSDPEngine._build_fsdp_module passes get_device_name() as device to ShardedGradScaler",
    ),
    Patch(
        _ENGINE, "FSDPEngine.optimizer_step", precision.optimizer_step,
        reason="verl does not log skipped steps, so nobody would notice a run in which the loss scaler skips every step",
        remove_when="verl's FSDPEngine.optimizer_step returns the loss scale and whether the step was skipped",
    ),
    Patch(
        _ENGINE, "FSDPEngine.load_checkpoint", model.compare_scales,
        reason="a checkpoint resumed with a different invariant_scale would scale the norms twice, or not at all",
        remove_when=checkpoint.CALLBACKS,
    ),
    Patch(
        _CHECKPOINT, "FSDPCheckpointManager.save_checkpoint", checkpoint.save_checkpoint,
        reason=checkpoint.UNRECORDED,
        remove_when=checkpoint.CALLBACKS,
    ),
    Patch(
        _CHECKPOINT, "FSDPCheckpointManager.load_checkpoint", checkpoint.load_checkpoint,
        reason="a run could silently resume in a different precision or with different optimizer states",
        remove_when=checkpoint.CALLBACKS,
    ),
    Patch(
        _ENGINE, "FSDPEngine.get_per_tensor_param", sync.get_per_tensor_param,
        reason="verl sends FP32 weights and the rollout quantizes them again; this sends the trainer's FP8 bytes and scales",
        remove_when="verl's FSDPEngine.get_per_tensor_param yields the FP8 bytes and scales that the trainer computes with",
    ),
    Patch(
        "verl.workers.rollout.vllm_rollout.vllm_rollout", "ServerAdapter.update_weights", sync.server_update_weights,
        reason="verl's sender waits forever for a vLLM worker that died",
        remove_when="the oldest supported verl contains verl#7366: a timeout for the sender, and the receiver's errors reported",
        upstream="https://github.com/verl-project/verl/pull/7366",
    ),
    Patch(
        "verl.workers.rollout.vllm_rollout.vllm_async_server", "vLLMReplica.__init__", rollout.replica_init,
        when=lambda config: not config.mode.only_measures,
        reason="verl runs reward models and distillation teachers in the policy's server class, so they would be quantized and "
        "wait for a sync. Only vLLM engines need this",
        remove_when="verl's vLLMReplica passes is_reward_model and is_teacher_model on to vLLMHttpServer and its engine",
    ),
    Patch(
        "verl.workers.rollout.vllm_rollout.utils", "vLLMColocateWorkerExtension.update_weights_from_ipc",
        transport.update_weights_from_ipc,
        always="an unpatched engine must reject a patched trainer",
        reason="verl loads each bucket without checking what arrived, and quantizes FP8 weights again",
        remove_when="verl's update_weights_from_ipc loads FP8 bytes unchanged and checks that every tensor arrived intact",
        upstream="https://github.com/verl-project/verl/pull/7986",
    ),
    Patch(
        _SEPARATION, "DetachActorWorker.save_model_to_cpu", old_log_probs.save_model_to_cpu,
        reason="verl's asynchronous trainers lose updates between two syncs, because they do not clone FSDP2 or VeOmni "
        "parameters that are on the CPU. FSDP1 and Megatron are not affected",
        remove_when=_COPIES,
        upstream=NO_REPORT,
    ),
    Patch(
        _SEPARATION, "DetachActorWorker.restore_model_from_cpu", old_log_probs.restore_model_from_cpu,
        reason="verl does not notice lost updates, and overwrites parameters that param_offload may still be copying from the "
        "GPU. Megatron's are not compared",
        remove_when=_COPIES,
        upstream=NO_REPORT,
    ),
    Patch(
        _ENGINE, "logprobs_from_logits", logprob.logprobs_from_logits,
        when=lambda config: config.same_log_probs,
        reason="verl rounds the log-probs of BF16 logits to BF16; vLLM computes log-softmax in FP32",
        remove_when="verl's logprobs_from_logits computes log-softmax in FP32 for every dtype of logits",
    ),
    Patch(
        _ENGINE, "FSDPEngineWithLMHead.prepare_model_inputs", logprob.prepare_model_inputs,
        when=lambda config: config.exact,
        reason="the model is not told how many sequences a packed row has, so exact attention would stall the GPU to count; and "
        "samples do not bring their own temperature",
        remove_when="verl's prepare_model_inputs passes the model the number of sequences, and a micro-batch has temperatures",
    ),
    Patch(
        _ENGINE, "FSDPEngineWithLMHead.prepare_model_outputs", logprob.prepare_model_outputs,
        when=lambda config: config.same_log_probs,
        reason="verl masks padding logits beyond the tokenizer and vision placeholders in vLLM only, not in the trainer",
        remove_when="verl's FSDP engine masks the same logits as monkey_patch_compute_logits does in vLLM",
        upstream="https://github.com/verl-project/verl/pull/7038",
    ),
    Patch(
        "verl.models.transformers.dense_common", "forward_with_torch_backend", logprob.forward_with_torch_backend,
        when=lambda config: config.same_log_probs,
        reason="verl's fused forward does not mask the tokens that verl masks in vLLM. The Triton forward is not covered; the "
        "driver selects this one",
        remove_when="verl's FSDP engine masks the same logits as monkey_patch_compute_logits does in vLLM",
        upstream="https://github.com/verl-project/verl/pull/7038",
    ),
    Patch(
        "verl.utils.experimental.torch_functional", "FusedLinearForPPO.forward", logprob.forward,
        when=lambda config: config.same_log_probs,
        reason="verl's fused log-probs use a matmul that depends on the batch, and divide by the temperature in BF16",
        remove_when="verl's FusedLinearForPPO.forward calls the model's lm_head, and applies temperature and log-softmax in FP32",
    ),
    Patch(
        _ENGINE, "FSDPEngine.forward_backward_batch", model.forward_backward_batch,
        when=lambda config: config.fp8_train,
        reason=model.QUANTIZED_AGAIN,
        remove_when=model.FIRST_PASS,
    ),
    Patch(
        _ENGINE, "FSDPEngineWithLMHead.forward_step", routes.forward_step,
        when=lambda config: config.returns_routes,
        reason="verl's FSDP engine neither compares nor replays (R3) the experts that the rollout chose. Others are not covered",
        remove_when="verl's FSDPEngineWithLMHead.forward_step supports router_replay R3 and logs how many routes differ; "
        "verl#4101 covers Megatron only",
        upstream="https://github.com/verl-project/verl/pull/4101",
    ),
    Patch(
        "verl.workers.rollout.vllm_rollout.vllm_async_server", "extract_prompt_logprobs", support.extract_prompt_logprobs,
        when=lambda config: config.exact,
        reason="verl does not keep which tokens top_k, top_p and min_p left, which the trainer must leave too",
        remove_when="verl's TokenOutput has vLLM's sampling masks, and its engines compute log-probs with them",
    ),
    Patch(
        "verl.experimental.agent_loop.agent_loop", "AgentLoopWorker._run_agent_loop", turns.run_agent_loop,
        when=lambda config: config.exact,
        reason="agent loops do not return which tokens each turn was drawn from, so the turns are noted beside them",
        remove_when=_TURNS,
    ),
    Patch(
        "verl.workers.rollout.llm_server", "LLMServerClient.generate", turns.generate,
        when=lambda config: config.exact,
        reason="it is the one place that every turn of every agent loop passes",
        remove_when=_TURNS,
    ),
    Patch(
        "verl.experimental.agent_loop.agent_loop", "AgentLoopWorker._compute_score", turns.compute_score,
        when=lambda config: config.exact,
        reason="a sample of an agent loop has no record of what its tokens were drawn from",
        remove_when=_TURNS,
    ),
    Patch(
        "verl.workers.rollout.vllm_rollout.vllm_async_server", "vLLMHttpServer.collective_rpc", sync.collective_rpc,
        when=lambda config: config.sync == "delta",
        reason="verl discards what the engine's workers return, so the trainer loop could not ask which weights they hold",
        remove_when="verl's vLLMHttpServer.collective_rpc returns the result of engine.collective_rpc",
    ),
    Patch(
        "verl.workers.engine_workers", "TrainingWorker.train_batch", old_log_probs.train_batch,
        always="it ends what a sync of a patched process began",
        reason="only a step's first mini-batch runs on the weights that sampled: a loss must not count later ones as mismatch",
        remove_when=_FIRST_BATCH,
    ),
    Patch(
        "verl.workers.utils.losses", "get_policy_loss_fn", old_log_probs.get_policy_loss_fn,
        when=lambda config: config.skips_old_pass,
        reason="when the rollout's log-probs serve as the old ones, only the loss can compare them with the trainer's before the "
        "backward pass. Distillation losses are refused",
        remove_when="verl.workers.utils.losses.ppo_loss compares rollout and trainer log-probs before it returns the loss",
    ),
    Patch(
        _CORRECTION, "compute_is_metrics", correction.compute_is_metrics,
        when=correction.drops_tokens,
        reason="verl 0.9.1 raises ZeroDivisionError if a correction drops all tokens of a batch (bypass mode: a micro-batch)",
        upstream="https://github.com/verl-project/verl/pull/7559",
        remove_when="the oldest supported verl contains verl#7559",
        fixes="verl",
    ),
    Patch(
        _CORRECTION, "compute_rollout_correction_and_rejection_mask", correction.weights_and_mask,
        when=lambda config: config.acr,
        reason="ACR needs the ratio before truncation, but verl passes only the truncated weights to its losses",
        remove_when="verl.workers.utils.losses.ppo_loss passes rollout_log_probs to the function from POLICY_LOSS_REGISTRY",
    ),
    *(
        Patch(
            module, "compute_rollout_correction_and_add_to_batch", correction.add_to_batch,
            when=lambda config: config.correction == "geo-mis",
            reason="verl's V0 trainer does not count what geo-mis drops, V1 does. Not for bypass mode, whose losses count it",
            remove_when="verl's V1 trainer writes loss_mask with response_mask, or both count tokens by response_mask",
        )
        for module in (_CORRECTION, "verl.trainer.ppo.v1.trainer_base")
    ),
)

# ---- Patches that depend on what is installed, and entries of verl's registry of policy losses ----

#: applied only if VeOmni is installed, because verl's engine cannot be imported without it
VEOMNI: tuple[Patch, ...] = (
    Patch(
        _VEOMNI, "VeOmniEngine._build_model_optimizer", model.build_model_optimizer,
        reason="build_parallelize_model does not get the engine, whose settings conversion needs. Critics are not converted",
        remove_when=_VEOMNI_CALLS,
    ),
    Patch(
        _VEOMNI, "build_parallelize_model", model.build_parallelize_model,
        reason="verl trains VeOmni models in BF16; this converts the model before VeOmni shards and loads it",
        remove_when=_VEOMNI_CALLS,
    ),
    Patch(
        _VEOMNI, "VeOmniEngine.get_per_tensor_param", sync.get_per_tensor_param,
        reason="verl sends FP32 weights and the rollout quantizes them again; this sends the trainer's FP8 bytes and scales",
        remove_when="verl's VeOmniEngine.get_per_tensor_param yields the FP8 bytes and scales that the trainer computes with",
    ),
)

#: applied only if verl has the function; ``compat.py`` says what older releases get instead
TEMPERATURE = Patch(
    _ENGINE, "_scale_logits_by_temperature", logprob.scale_logits,
    when=lambda config: config.same_log_probs,
    reason="verl divides BF16 logits by the temperature in BF16; vLLM divides in FP32",
    remove_when="verl's _scale_logits_by_temperature divides in FP32",
)


def _policy_loss(name: str, made: Callable[[Any], Any], reason: str, remove_when: str) -> OnImport:
    """Set an entry of verl's registry of policy losses to what ``made`` returns for the registry."""
    entry = f"POLICY_LOSS_REGISTRY[{name!r}]"

    def register(module: ModuleType, journal: Journal) -> None:
        losses, target = module.POLICY_LOSS_REGISTRY, f"{module.__name__}.{entry}"
        journal.set_item(losses, name, made(losses), target=target, reason=reason, remove_when=remove_when)

    return OnImport(module="verl.trainer.ppo.core_algos", name=entry, apply=register, reason=reason, remove_when=remove_when)


BYPASS = _policy_loss(
    old_log_probs.LOSS,
    lambda losses: old_log_probs.measured(losses[old_log_probs.LOSS]),
    reason="in bypass mode only the loss sees rollout and trainer log-probs, and it does not log their mismatch",
    remove_when=_FIRST_BATCH,
)
ACR = _policy_loss(
    correction.ACR_LOSS,
    lambda losses: correction.policy_loss,
    reason="verl has no policy loss with QuRL's adaptive clipping range (ACR)",
    remove_when="verl registers a policy loss with ACR in POLICY_LOSS_REGISTRY",
)


def patches(config: Config) -> Sequence[Patch]:
    """Those that these settings need, for the engines that are installed."""
    engines = (MEGATRON if is_installed("megatron.core") else ()) + (VEOMNI if is_installed("veomni") else ())
    logits = () if wants_float_logits() else (TEMPERATURE,)
    return needed((*PATCHES, *VISION, *engines, *logits), config)


def hooks(config: Config) -> Sequence[OnImport]:
    """The entries for verl's registry of policy losses."""
    return (BYPASS, ACR) if config.acr else (BYPASS,)
