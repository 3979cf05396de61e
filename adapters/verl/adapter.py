"""The verl adapter: the list of its patches. Each replacement lives in the module of its concern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jetrl_patch.adapters.verl import (
    checkpoint,
    correction,
    logprob,
    lora,
    megatron,
    megatron_engine,
    metrics,
    model,
    old_log_probs,
    old_weights,
    precision,
    reward_engines,
    routes,
    settings,
    state,
    sync,
    ulysses,
    veomni_engine,
    worker,
)
from jetrl_patch.adapters.verl.compat import wants_float_logits
from jetrl_patch.adapters.verl.correction import ACR_LOSS, drops_tokens
from jetrl_patch.adapters.verl.vision import SEEING
from jetrl_patch.patching.guards import is_installed
from jetrl_patch.patching.patch import NO_REPORT
from jetrl_patch.registry import Adapter, Config, Journal, OnImport, Patch, Services

__all__ = ["correction_hooks", "correction_patches"]


# ---- The patches and registry entries of the corrections in verl ---------------------------------

_ALGORITHMS = "verl.trainer.ppo.core_algos"

_TRAIN_BATCH = Patch(
    module="verl.workers.engine_workers",
    attr="TrainingWorker.train_batch",
    make=old_log_probs.train_batch,
    reason="later mini-batches run on updated weights and would count as mismatch in bypass mode, and where the rollout's "
    "log-probs are the old ones",
    remove_when="verl logs the mismatch of a bypassed batch over its first mini-batch",
)

_WEIGHTS = Patch(
    module="verl.trainer.ppo.rollout_corr_helper",
    attr="compute_rollout_correction_and_rejection_mask",
    make=correction.weights_and_mask,
    reason="ACR needs the ratio before truncation, and verl passes its losses only the truncated weights",
    remove_when="verl passes rollout_log_probs to its policy losses",
)

_MEASURES = Patch(
    module="verl.trainer.ppo.rollout_corr_helper",
    attr="compute_is_metrics",
    make=correction.compute_is_metrics,
    reason="verl 0.9.1 raises ZeroDivisionError when a correction drops every token of a batch (of a micro-batch in bypass mode)",
    upstream="https://github.com/verl-project/verl/pull/7559",
    remove_when="verl has verl#7559",
    fixes="verl",
)

_CHECKED_LOSS = Patch(
    module="verl.workers.utils.losses",
    attr="get_policy_loss_fn",
    make=old_log_probs.get_policy_loss_fn,
    reason="where the rollout's log-probs are the old ones, the loss is the only place that sees the trainer's too, before the "
    "backward pass. Distillation's losses are not covered and are refused",
    remove_when="verl compares rollout and trainer log-probs in every policy loss",
)


def correction_patches(config: Config) -> tuple[Patch, ...]:
    """Return the patch that ends the losses' comparisons, and those that the settings need."""
    masks = (_MEASURES,) if drops_tokens(config) else ()
    checked = (_CHECKED_LOSS,) if config.skips_old_pass else ()
    return (_TRAIN_BATCH, *checked, *masks, *((_WEIGHTS,) if config.acr else ()))


def correction_hooks(config: Config) -> tuple[OnImport, ...]:
    """Return the entries for verl's registry of policy losses."""
    bypass = OnImport(
        module=_ALGORITHMS,
        name=f"POLICY_LOSS_REGISTRY[{old_log_probs.LOSS!r}]",
        apply=old_log_probs.register_bypass,
        reason="bypass mode compares rollout and trainer log-probs only in the loss, and does not log their mismatch",
        remove_when="verl logs the mismatch of a bypassed batch over its first mini-batch",
    )
    acr = OnImport(
        module=_ALGORITHMS,
        name=f"POLICY_LOSS_REGISTRY[{ACR_LOSS!r}]",
        apply=correction.register_acr,
        reason="verl has no policy loss with QuRL's adaptive clipping range",
        remove_when="verl has ACR",
    )
    return (bypass, acr) if config.acr else (bypass,)


# ---- The verl adapter: the list of its patches. Each replacement lives in the module of its concern

_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_CHECKPOINT = "verl.utils.checkpoint.fsdp_checkpoint_manager"
_MEGATRON = "verl.workers.engine.megatron.transformer_impl"
_VEOMNI = "verl.workers.engine.veomni.transformer_impl"
_HANDED = "verl hands its composed configuration to plugins (VERL_USE_EXTERNAL_PLUGINS) before Ray starts"
_STATE = "verl's checkpoint manager saves and loads the state of plugins"
_VEOMNI_CALLS = "verl's VeOmni engine calls a plugin between building and sharding a model"

EVERY_MODE: tuple[Patch, ...] = (
    Patch(
        module="verl.utils.config",
        attr="validate_config",
        make=settings.validate_config,
        reason="a setting that contradicts jetrl_patch would fail late or break equality unnoticed; it is refused before Ray "
        "starts, and missing settings (calculate_log_probs, ...) are filled in",
        remove_when=_HANDED,
    ),
    Patch(
        module="verl.trainer.main_ppo",
        attr="run_ppo",
        make=settings.run_ppo,
        reason="verl's asynchronous programs check their settings after Ray has started, or never",
        remove_when=_HANDED,
    ),
    Patch(
        module="verl.experimental.separation.ray_trainer",
        attr="SeparateRayPPOTrainer._init_resource_pools",
        make=settings.separate_pools,
        reason="the asynchronous trainers do not call RayPPOTrainer.__init__, so their workers would find no mark",
        remove_when="verl's asynchronous trainers call RayPPOTrainer.__init__",
    ),
    Patch(
        module="verl.experimental.separation.ray_trainer",
        attr="SeparateRayPPOTrainer._fit_compute_log_prob",
        make=metrics.separate_log_prob,
        reason="in bypass mode the loss measures the mismatch, and cannot tell samples of older weights from others",
        remove_when="verl passes the versions of the samples to the policy loss",
    ),
    Patch(
        module="verl.trainer.ppo.ray_trainer",
        attr="RayPPOTrainer.__init__",
        make=settings.trainer_init,
        reason="a driver that never calls validate_config would start unchecked (V0)",
        remove_when="verl drops the V0 trainer",
    ),
    Patch(
        module="verl.trainer.ppo.ray_trainer",
        attr="RayPPOTrainer._compute_old_log_prob",
        make=metrics.v0_old_log_prob,
        reason="without a correction verl does not measure the mismatch between rollout and trainer log-probs (V0)",
        remove_when="verl drops the V0 trainer",
    ),
    Patch(
        module="verl.trainer.ppo.v1.trainer_base",
        attr="PPOTrainer.__init__",
        make=settings.trainer_init,
        reason="a driver that never calls validate_config would start unchecked (V1)",
        remove_when="verl calls validate_config in PPOTrainer.__init__",
    ),
    Patch(
        module="verl.trainer.ppo.v1.trainer_base",
        attr="PPOTrainer._compute_old_log_prob",
        make=metrics.v1_old_log_prob,
        reason="without a correction verl does not measure the mismatch between rollout and trainer log-probs (V1)",
        remove_when="verl logs this mismatch without a correction too",
    ),
    Patch(
        module="verl.utils.tracking",
        attr="Tracking.log",
        make=metrics.log,
        reason="jetrl_patch's metrics would miss the step's line in the user's loggers",
        remove_when="verl logs what its workers return from update_weights, or lets a plugin add to a step's metrics",
    ),
    Patch(
        module="verl.checkpoint_engine.base",
        attr="CheckpointEngineManager.update_weights",
        make=metrics.manager_update_weights,
        reason="verl drops what workers return from a sync, so an unpatched worker and the sync's cost go unnoticed",
        remove_when="verl returns the workers' results of a naive sync",
    ),
    Patch(
        module="verl.workers.engine_workers",
        attr="ActorRolloutRefWorker.init_model",
        make=sync.init_model,
        reason="a worker whose settings differ from the trainer loop's would build a different model unnoticed",
        remove_when="verl compares the settings of plugins (VERL_USE_EXTERNAL_PLUGINS) between trainer loop and workers",
    ),
    Patch(
        module="verl.workers.engine_workers",
        attr="ActorRolloutRefWorker.update_weights",
        make=sync.worker_update_weights,
        reason="verl does not report the seconds and bytes of a sync",
        remove_when="verl's update_weights returns its seconds and bytes",
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngine._build_module",
        make=model.build_module,
        reason="verl trains in BF16; the model is converted after loading, before LoRA, QAT or FSDP wrap it. "
        "Value models are not covered",
        remove_when="verl's FSDP engine calls a plugin between loading and wrapping a model",
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngine._build_module",
        make=ulysses.build_module,
        reason="verl exchanges slices for heads inside flash attention alone: with sdpa or eager a rank of Ulysses attends "
        "within its slice, without an error. Exact mode has the exchange anyway, VeOmni's engine its own",
        upstream=NO_REPORT,
        remove_when="verl exchanges around every attention, or refuses those without an exchange",
        fixes="verl",
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngine._build_lora_module",
        make=lora.build_lora_module,
        reason="verl's trainer adds B A x to W x, which no rollout with one quantized weight repeats; its layers compute with "
        "the merged weight. Critics and precision='bf16' are not changed",
        remove_when="verl trains adapters on the merged weight",
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngine._merged_lora_per_tensor_param",
        make=lora.merged_lora_per_tensor_param,
        reason="verl merges FP32 parameters in place, which gives other values than those that the layers compute with, and "
        "copies all weights to the CPU to restore them",
        remove_when="verl's layers compute with the weights that it merges",
        upstream="verl/utils/fsdp_utils.py: merged_lora_context",
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngine._build_fsdp_module",
        make=precision.build_fsdp_module,
        reason="without CUDA verl's loss scaler is disabled and gradients underflow. "
        "Modes without a loss scale are not changed",
        remove_when="verl passes its device to ShardedGradScaler",
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngine.optimizer_step",
        make=precision.optimizer_step,
        reason="verl does not log skipped steps, so a run in which the loss scale skips every step goes on unnoticed",
        remove_when="verl logs the scale and the skipped steps",
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngine.load_checkpoint",
        make=model.compare_scales,
        reason="a checkpoint resumed with another invariant_scale would scale the norms twice or not at all",
        remove_when=_STATE,
    ),
    Patch(
        module=_CHECKPOINT,
        attr="FSDPCheckpointManager.save_checkpoint",
        make=checkpoint.save_checkpoint,
        reason="verl's checkpoints do not record the settings they were saved with (jetrl.json). "
        "Megatron's checkpoints are not covered",
        remove_when=_STATE,
    ),
    Patch(
        module=_CHECKPOINT,
        attr="FSDPCheckpointManager.load_checkpoint",
        make=checkpoint.load_checkpoint,
        reason="a run would resume in another precision, or with other optimizer states, unnoticed",
        remove_when=_STATE,
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngine.get_per_tensor_param",
        make=sync.get_per_tensor_param,
        reason="verl sends FP32 weights, which the rollout would quantize again; the trainer's own bytes and scales are sent, "
        "and BF16 for the rest",
        remove_when="verl's FSDP engine sends weights that it has quantized itself",
    ),
    Patch(
        module="verl.workers.rollout.vllm_rollout.vllm_rollout",
        attr="ServerAdapter.update_weights",
        make=sync.server_update_weights,
        reason="verl's sender waits forever for a vLLM worker that has died",
        remove_when="verl has verl#7366: its sender has a timeout and is told of the receiver's errors",
        upstream="https://github.com/verl-project/verl/pull/7366",
    ),
    Patch(
        module="verl.workers.rollout.vllm_rollout.vllm_async_server",
        attr="vLLMReplica.__init__",
        make=reward_engines.replica_init,
        reason="verl serves reward models and distillation teachers with the policy's server class, so their engines would be "
        "quantized and wait for a weight sync. Engines other than vLLM are left alone already",
        remove_when="verl tells a server whose model it serves",
    ),
    Patch(
        module="verl.workers.rollout.vllm_rollout.utils",
        attr="vLLMColocateWorkerExtension.update_weights_from_ipc",
        make=worker.update_weights_from_ipc,
        reason="verl loads each bucket without checking what arrived, and would quantize FP8 weights again",
        remove_when="verl's receiver checks completeness and content and loads FP8 unchanged",
    ),
)

#: applied only where Megatron is installed, because verl's engine cannot be imported without it
MEGATRON: tuple[Patch, ...] = (
    Patch(
        module=_MEGATRON,
        attr="MegatronEngine._build_megatron_module",
        make=megatron_engine.build_megatron_module,
        reason="a Megatron model whose layers are not TransformerEngine's, or use another recipe, would train in another format "
        "than the rollout's",
        remove_when="verl's Megatron engine calls a plugin once a model is built",
    ),
    Patch(
        module=_MEGATRON,
        attr="MegatronEngine.get_per_tensor_param",
        make=sync.get_per_tensor_param,
        reason="verl sends BF16 weights, which the rollout would quantize again; the bytes and scales that TransformerEngine "
        "computes with are sent, and BF16 for the rest",
        remove_when="verl's Megatron engine exports what TransformerEngine computes with",
    ),
)

#: applied only where VeOmni is installed, because verl's engine cannot be imported without it
VEOMNI: tuple[Patch, ...] = (
    Patch(
        module=_VEOMNI,
        attr="VeOmniEngine._build_model_optimizer",
        make=veomni_engine.build_model_optimizer,
        reason="what shards VeOmni's model does not know the engine, whose settings decide how the model is converted. Value "
        "models are not covered",
        remove_when=_VEOMNI_CALLS,
    ),
    Patch(
        module=_VEOMNI,
        attr="build_parallelize_model",
        make=veomni_engine.build_parallelize_model,
        reason="verl trains VeOmni's model in BF16; it is converted after it is built, before VeOmni shards and loads it",
        remove_when=_VEOMNI_CALLS,
    ),
    Patch(
        module=_VEOMNI,
        attr="VeOmniEngine.get_per_tensor_param",
        make=sync.get_per_tensor_param,
        reason="verl sends FP32 weights, which the rollout would quantize again; the trainer's own bytes and scales are sent, "
        "and BF16 for the rest",
        remove_when="verl's VeOmni engine sends weights that it has quantized itself",
    ),
)

#: applied only where verl has the function; ``compat`` says what older releases get instead
TEMPERATURE = Patch(
    module=_ENGINE,
    attr="_scale_logits_by_temperature",
    make=logprob.scale_logits,
    reason="verl divides BF16 logits by the temperature in BF16, vLLM divides in FP32",
    remove_when="verl divides by the temperature in FP32",
)

SAME_LOG_PROBS: tuple[Patch, ...] = (
    Patch(
        module=_ENGINE,
        attr="logprobs_from_logits",
        make=logprob.logprobs_from_logits,
        reason="verl's formula depends on the dtype and rounds BF16 logits' log-probs to BF16; vLLM computes log-softmax in FP32",
        remove_when="verl computes log-softmax in FP32",
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngineWithLMHead.prepare_model_inputs",
        make=logprob.prepare_model_inputs,
        reason="verl does not tell the model how many sequences a packed row holds, so exact attention would wait for the GPU to "
        "count them",
        remove_when="verl passes the number of sequences, or their boundaries on the host, to the model",
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngineWithLMHead.prepare_model_outputs",
        make=logprob.prepare_model_outputs,
        reason="verl bans tokens beyond the tokenizer and vision placeholders in vLLM only",
        remove_when="verl masks the same tokens on both sides",
        upstream="verl/workers/rollout/vllm_rollout/utils.py: monkey_patch_compute_logits",
    ),
    Patch(
        module="verl.models.transformers.dense_common",
        attr="forward_with_torch_backend",
        make=logprob.forward_with_torch_backend,
        reason="verl's fused forward does not know which tokens its rollout bans. Its Triton forward is not covered; the driver "
        "selects this one",
        remove_when="verl masks the same tokens on both sides",
        upstream="verl/workers/rollout/vllm_rollout/utils.py: monkey_patch_compute_logits",
    ),
    Patch(
        module="verl.utils.experimental.torch_functional",
        attr="FusedLinearForPPO.forward",
        make=logprob.forward,
        reason="verl's fused log-probs come from a product that depends on the batch and are divided by the temperature in BF16",
        remove_when="verl's fused kernels use the model's own lm_head and FP32 log-softmax",
    ),
)


SAME_WEIGHTS = Patch(
    module=_ENGINE,
    attr="FSDPEngine.forward_backward_batch",
    make=model.forward_backward_batch,
    reason="nothing on a GPU tells cheaply that a weight is unchanged, so that each micro-batch's forward, recomputation and "
    "backward would quantize it",
    remove_when="verl tells a model's layers a step's first micro-batch, as TransformerEngine's is_first_microbatch does",
)


ROUTES = Patch(
    module=_ENGINE,
    attr="FSDPEngineWithLMHead.forward_step",
    make=routes.forward_step,
    reason="verl's FSDP engine ignores the experts that the rollout returned for its tokens, so nothing says how many routes "
    "differ, and no update replays them (R3). Other engines are not covered",
    remove_when="verl's FSDP engine compares and replays routes",
)


ANSWERS = Patch(
    module="verl.workers.rollout.vllm_rollout.vllm_async_server",
    attr="vLLMHttpServer.collective_rpc",
    make=sync.collective_rpc,
    reason="verl drops what the engine's workers return, so that the trainer loop could not ask which weights they hold",
    remove_when="verl's vLLMHttpServer.collective_rpc returns it",
)


class VerlAdapter(Adapter):
    """verl 0.9: trainers V0 and V1, FSDP1, FSDP2, Megatron and VeOmni, asynchronous vLLM servers."""

    name: ClassVar[str] = "verl"
    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers", "vllm", "verl", "ray")

    def patches(self, config: Config) -> Sequence[Patch]:
        """Return the patches of every mode, then those of other engines, log-probs and corrections where they are needed."""
        patches = EVERY_MODE + SEEING + old_weights.PATCHES + (MEGATRON if is_installed("megatron.core") else ())
        patches += VEOMNI if is_installed("veomni") else ()
        if config.same_log_probs:
            patches += SAME_LOG_PROBS if wants_float_logits() else (TEMPERATURE, *SAME_LOG_PROBS)
        if config.fp8_train:
            patches += (SAME_WEIGHTS,)
        if config.returns_routes:
            patches += (ROUTES,)
        if config.sync == "delta":
            patches += (ANSWERS,)
        return patches + correction_patches(config)

    def services(self) -> Services:
        """Offer verl's settings, models and shard merger to the core."""
        from jetrl_patch.adapters.verl import services

        return Services(trainer=services, merger=services)

    def hooks(self, config: Config) -> Sequence[OnImport]:
        """Return the entries for verl's registry of policy losses."""
        return correction_hooks(config)

    def check(self, config: Config) -> None:
        """Raise for a program of verl that is not supported, or a scale format that TransformerEngine would not use."""
        problem = settings.program_problem(settings.own_program())
        if problem is not None:
            raise problem
        megatron.check_scales(config)

    def on_apply(self, config: Config, journal: Journal) -> None:
        """Set TransformerEngine's scale format for this process and its children."""
        megatron.export_scales(config, journal)

    def on_undo(self) -> None:
        """Drop metrics that wait for a log line."""
        state.reset()


ADAPTER = VerlAdapter()
