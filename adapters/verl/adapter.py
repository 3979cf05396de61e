"""The verl adapter: what goes in where. Each replacement lives in the module of its concern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jetrl_patch.adapters.base import Adapter, Config, Journal, OnImport, Patch, Services
from jetrl_patch.adapters.verl import (
    checkpoint,
    logprob,
    megatron,
    megatron_engine,
    metrics,
    model,
    precision,
    scaling,
    settings,
    state,
    sync,
    worker,
)
from jetrl_patch.adapters.verl.correction_patches import correction_hooks, correction_patches
from jetrl_patch.patching.guards import is_installed

_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_CHECKPOINT = "verl.utils.checkpoint.fsdp_checkpoint_manager"
_MEGATRON = "verl.workers.engine.megatron.transformer_impl"
_NO_HOOK = "verl has an extension point for this"

EVERY_MODE: tuple[Patch, ...] = (
    Patch(
        module="verl.utils.config",
        attr="validate_config",
        make=settings.validate_config,
        reason="refuse settings that contradict ours before Ray starts, set calculate_log_probs and the like",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module="verl.trainer.ppo.ray_trainer",
        attr="RayPPOTrainer.__init__",
        make=settings.trainer_init,
        reason="the same check where the trainer loop runs (V0), for drivers that do not validate",
        remove_when="verl drops the V0 trainer",
    ),
    Patch(
        module="verl.trainer.ppo.ray_trainer",
        attr="RayPPOTrainer._compute_old_log_prob",
        make=metrics.v0_old_log_prob,
        reason="mismatch between rollout and trainer log-probs, also without a correction (V0)",
        remove_when="verl drops the V0 trainer",
    ),
    Patch(
        module="verl.trainer.ppo.v1.trainer_base",
        attr="PPOTrainer.__init__",
        make=settings.trainer_init,
        reason="the same check where the trainer loop runs (V1)",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module="verl.trainer.ppo.v1.trainer_base",
        attr="PPOTrainer._compute_old_log_prob",
        make=metrics.v1_old_log_prob,
        reason="mismatch between rollout and trainer log-probs, also without a correction (V1)",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module="verl.utils.tracking",
        attr="Tracking.log",
        make=metrics.log,
        reason="our figures go with the step's line, into every logger the user has",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module="verl.checkpoint_engine.base",
        attr="CheckpointEngineManager.update_weights",
        make=metrics.manager_update_weights,
        reason="verl drops what workers return from a sync; it says who is patched and what the sync cost. "
        "Backends other than 'naive' are refused with FP8",
        remove_when="verl hands on the workers' results of a naive sync",
    ),
    Patch(
        module="verl.workers.engine_workers",
        attr="ActorRolloutRefWorker.init_model",
        make=sync.init_model,
        reason="a worker compares its settings with the trainer loop's before it builds a model",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module="verl.workers.engine_workers",
        attr="ActorRolloutRefWorker.update_weights",
        make=sync.worker_update_weights,
        reason="report seconds and bytes of a sync",
        remove_when="verl reports them",
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngine._build_module",
        make=model.build_module,
        reason="convert the model after it is loaded and before LoRA, QAT or FSDP wrap it; value models stay as they are",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngine._build_fsdp_module",
        make=precision.build_fsdp_module,
        reason="a loss scaler must scale: verl's does nothing without CUDA; in modes without one it is verl's own",
        remove_when="verl hands its device to ShardedGradScaler",
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngine.optimizer_step",
        make=precision.optimizer_step,
        reason="count the steps that a loss scale skips, and stop a run that skips all of them",
        remove_when="verl logs the scale and the skipped steps",
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngine.load_checkpoint",
        make=scaling.load_checkpoint,
        reason="a checkpoint that is resumed must be scaled (invariant_scale) as the model was when it was built",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module=_CHECKPOINT,
        attr="FSDPCheckpointManager.save_checkpoint",
        make=checkpoint.save_checkpoint,
        reason="jetrl.json: a checkpoint says what settings it was saved with. Megatron's are not covered",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module=_CHECKPOINT,
        attr="FSDPCheckpointManager.load_checkpoint",
        make=checkpoint.load_checkpoint,
        reason="a run that is resumed in another precision, or with other optimizer states, must say so",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngine.get_per_tensor_param",
        make=sync.get_per_tensor_param,
        reason="send the trainer's FP8 bytes and scales (BF16 for the rest) instead of FP32 weights",
        remove_when="verl's FSDP engine can quantize once",
    ),
    Patch(
        module="verl.workers.rollout.vllm_rollout.vllm_rollout",
        attr="ServerAdapter.update_weights",
        make=sync.server_update_weights,
        reason="verl's sender waits without a limit for a vLLM worker that may be dead",
        remove_when="BucketedWeightSender has a time-out and watches its peer",
    ),
    Patch(
        module="verl.workers.rollout.vllm_rollout.utils",
        attr="vLLMColocateWorkerExtension.update_weights_from_ipc",
        make=worker.update_weights_from_ipc,
        reason="verl loads bucket by bucket with no check of what arrived; with FP8 it would quantize again",
        remove_when="verl's receiver checks completeness and content, and loads FP8 as it comes",
    ),
)

#: where Megatron is installed; elsewhere verl's engine cannot be imported
MEGATRON: tuple[Patch, ...] = (
    Patch(
        module=_MEGATRON,
        attr="MegatronEngine._build_megatron_module",
        make=megatron_engine.build_megatron_module,
        reason="a Megatron model is checked once it is loaded: TransformerEngine's layers, in the run's recipe, and no others",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module=_MEGATRON,
        attr="MegatronEngine.get_per_tensor_param",
        make=sync.get_per_tensor_param,
        reason="send the bytes and scales that TransformerEngine computes with (BF16 for the rest) instead of BF16 weights",
        remove_when="verl's Megatron engine exports what TransformerEngine computes with",
    ),
)

SAME_LOG_PROBS: tuple[Patch, ...] = (
    Patch(
        module=_ENGINE,
        attr="_scale_logits_by_temperature",
        make=logprob.scale_logits,
        reason="verl divides BF16 logits by the temperature in BF16, vLLM in FP32",
        remove_when="verl scales in FP32",
    ),
    Patch(
        module=_ENGINE,
        attr="logprobs_from_logits",
        make=logprob.logprobs_from_logits,
        reason="verl takes another formula per dtype and rounds to BF16; vLLM takes log-softmax in FP32",
        remove_when="verl takes log-softmax in FP32",
    ),
    Patch(
        module=_ENGINE,
        attr="FSDPEngineWithLMHead.prepare_model_outputs",
        make=logprob.prepare_model_outputs,
        reason="verl bans tokens beyond the tokenizer and vision placeholders in vLLM only",
        remove_when="verl masks the same tokens on both sides",
        upstream="verl/workers/rollout/vllm_rollout/utils.py: monkey_patch_compute_logits",
    ),
)


class VerlAdapter(Adapter):
    """verl 0.9: trainers V0 and V1, FSDP1, FSDP2 and Megatron, asynchronous vLLM servers."""

    name: ClassVar[str] = "verl"
    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers", "vllm", "verl", "ray")

    def patches(self, config: Config) -> Sequence[Patch]:
        """All modes measure and check; some also compute log-probs as the rollout does."""
        megatron_patches = MEGATRON if is_installed("megatron.core") else ()
        return EVERY_MODE + megatron_patches + (SAME_LOG_PROBS if config.same_log_probs else ()) + correction_patches(config)

    def services(self) -> Services:
        """verl's settings and models, and its merger of shards."""
        from jetrl_patch.adapters.verl import services

        return Services(trainer=services, merger=services)

    def hooks(self, config: Config) -> Sequence[OnImport]:
        """Entries of verl's registry of policy losses."""
        return correction_hooks(config)

    def check(self, config: Config) -> None:
        """The environment must not ask TransformerEngine for other scales than the settings do."""
        megatron.check_scales(config)

    def on_apply(self, config: Config, journal: Journal) -> None:
        """With TransformerEngine, the format of its scales, for this process and its children."""
        megatron.export_scales(config, journal)

    def on_undo(self) -> None:
        """Forget figures that wait for a log line."""
        state.reset()


ADAPTER = VerlAdapter()
