"""The OpenRLHF adapter: what goes in where. Each replacement lives in the module of its concern.

Classes under ``@ray.remote`` travel by value from the driver, so replaced are their plain base classes, the classes
and functions they use by name, and names in the modules where they are looked up. Ray copies inherited methods into
such a class when it is decorated; where that was before our patch, ``remote.py`` renews the copies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar

from jetrl_patch.adapters.base import Adapter, Config, Journal, OnImport, Patch, Services
from jetrl_patch.adapters.openrlhf import (
    checkpoint,
    correction,
    logprob,
    metrics,
    model,
    optimizer,
    precision,
    remote,
    scaling,
    settings,
    state,
    sync,
    versions,
    worker,
)

_NO_HOOK = "OpenRLHF has an extension point for this"

EVERY_MODE: tuple[Patch, ...] = (
    Patch(
        module="openrlhf.utils",
        attr="get_strategy",
        make=settings.get_strategy,
        reason="refuse arguments that contradict ours before any actor starts, and leave our settings in them",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module="openrlhf.trainer.ray",
        attr="create_vllm_engines",
        make=metrics.create_vllm_engines,
        reason="engines return log-probs only when a correction is on; the mismatch is measured always",
        remove_when="logprobs_mode is an argument of OpenRLHF",
    ),
    Patch(
        module="openrlhf.trainer.ppo_utils.samples_generator",
        attr="SamplingParams",
        make=metrics.sampling_params,
        reason="log-probs are asked for only when a correction is on; the mismatch is measured always",
        remove_when="OpenRLHF has a measure-only mode",
    ),
    Patch(
        module="openrlhf.trainer.ppo_trainer",
        attr="BasePPOTrainer.__init__",
        make=metrics.trainer_init,
        reason="the process of the trainer loop compares its settings with the driver's",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module="openrlhf.trainer.ppo_trainer",
        attr="BasePPOTrainer.train_step",
        make=metrics.train_step,
        reason="our figures go with the step's status, into every logger the user has",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module="openrlhf.trainer.ppo_trainer",
        attr="BasePPOTrainer.broadcast_to_vllm",
        make=metrics.broadcast_to_vllm,
        reason="collect what a sync cost and who took part; OpenRLHF drops what actors return",
        remove_when="OpenRLHF hands on the actors' results of a sync",
    ),
    Patch(
        module="openrlhf.trainer.ppo_utils.experience_maker",
        attr="RemoteExperienceMaker.make_experience",
        make=metrics.make_experience,
        reason="mismatch between rollout and trainer log-probs, also without a correction",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module="openrlhf.trainer.ray.launcher",
        attr="BaseModelActor._setup_distributed",
        make=model.setup_distributed,
        reason="an actor compares its settings with the driver's before it builds a model",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module="openrlhf.models.actor",
        attr="Actor.__init__",
        make=model.actor_init,
        reason="convert policy, reference and EMA after they are loaded and before DeepSpeed wraps them",
        remove_when=_NO_HOOK,
    ),
    Patch(
        module="openrlhf.trainer.ray.ppo_actor",
        attr="ActorPPOTrainer.__init__",
        make=sync.trainer_init,
        reason="a first sync, so that both sides are compared before the first rollout",
        remove_when="OpenRLHF syncs before it samples",
    ),
    Patch(
        module="openrlhf.trainer.ray.ppo_actor",
        attr="ActorPPOTrainer.broadcast_to_vllm",
        make=sync.broadcast_to_vllm,
        reason="send the trainer's FP8 bytes and scales in buckets; OpenRLHF sends BF16, one remote call a parameter",
        remove_when="OpenRLHF's sync takes quantized tensors and buckets",
    ),
    Patch(
        module="openrlhf.trainer.ray.vllm_worker_wrap",
        attr="WorkerWrap.update_weight",
        make=worker.update_weight,
        reason="take buckets through the receiver's checks; OpenRLHF loads what comes, and BF16 only",
        remove_when="OpenRLHF's receiver checks completeness and content, and loads FP8 as it comes",
    ),
    Patch(
        module="openrlhf.trainer.ray.vllm_worker_wrap",
        attr="WorkerWrap.update_weight_cuda_ipc",
        make=worker.update_weight_cuda_ipc,
        reason="the same for colocated engines",
        remove_when="OpenRLHF's receiver checks completeness and content, and loads FP8 as it comes",
    ),
    *(
        Patch(
            module="openrlhf.utils.agent",
            attr=f"{kind}AgentExecutor.execute",
            make=versions.execute,
            reason="a sample carries the version of the weights that made it; an executor of the user's own that calls "
            "neither of these is not covered",
            remove_when="OpenRLHF's samples carry the version of their weights",
        )
        for kind in ("SingleTurn", "MultiTurn")
    ),
    Patch(
        module="vllm.v1.engine.async_llm",
        attr="AsyncLLM.generate",
        make=versions.generate,
        reason="which weights stand in the engine when tokens come",
        remove_when="vLLM's outputs carry the version of the weights",
    ),
    Patch(
        module="vllm.v1.engine.async_llm",
        attr="AsyncLLM.collective_rpc",
        make=versions.collective_rpc,
        reason="when a weight sync has ended",
        remove_when="vLLM's outputs carry the version of the weights",
    ),
)

SAME_LOG_PROBS: tuple[Patch, ...] = (
    Patch(
        module="openrlhf.models.actor",
        attr="Actor.forward",
        make=logprob.actor_forward,
        reason="remember where responses begin: vLLM bans the end of a response at its first token (min_tokens=1)",
        remove_when="OpenRLHF samples with min_tokens=0, or masks in the trainer too",
    ),
    Patch(
        module="openrlhf.models.actor",
        attr="log_probs_from_logits",
        make=logprob.log_probs_from_logits,
        reason="OpenRLHF takes another formula per dtype and library; vLLM takes log-softmax in FP32",
        remove_when="OpenRLHF takes log-softmax in FP32",
    ),
)

CORRECTION = Patch(
    module="openrlhf.models.loss",
    attr="PolicyLoss.forward",
    make=correction.policy_loss,
    reason="OpenRLHF has no product-form sequence ratio, no geometric mask with weight 1 and no adaptive clip",
    remove_when="it has them",
)


LOSS_SCALE = Patch(
    module="openrlhf.utils.deepspeed.deepspeed",
    attr="DeepspeedStrategy.optimizer_step",
    make=precision.optimizer_step,
    reason="count the steps that the loss scale skips, and stop a run that skips all of them",
    remove_when="OpenRLHF logs the scale and the skipped steps",
)

INVARIANT_SCALE: tuple[Patch, ...] = tuple(
    Patch(
        module="openrlhf.utils.deepspeed.deepspeed",
        attr=f"DeepspeedStrategy.{name}",
        make=make,
        reason="a checkpoint that is resumed must be scaled (invariant_scale) as the model was when it was built",
        remove_when=_NO_HOOK,
    )
    for name, make in (("save_ckpt", scaling.save_ckpt), ("load_ckpt", scaling.load_ckpt))
)

CHECKPOINT: tuple[Patch, ...] = tuple(
    Patch(
        module="openrlhf.utils.deepspeed.deepspeed",
        attr=f"DeepspeedStrategy.{name}",
        make=make,
        reason="jetrl.json: a run that is resumed in another precision, or with other optimizer states, must say so",
        remove_when=_NO_HOOK,
    )
    for name, make in (("save_ckpt", checkpoint.save_ckpt), ("load_ckpt", checkpoint.load_ckpt))
)

OPTIMIZER = Patch(
    module="deepspeed",
    attr="initialize",
    make=optimizer.initialize,
    reason="OpenRLHF gives DeepSpeed the name of an optimizer, and DeepSpeed has none with states in 8 bits",
    remove_when="OpenRLHF can pass an optimizer of its user's",
)


class OpenRLHFAdapter(Adapter):
    """OpenRLHF 0.11: ``train_ppo_ray``, ZeRO-0 to 3, synchronous, asynchronous and colocated."""

    name: ClassVar[str] = "openrlhf"
    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers", "vllm", "openrlhf", "ray")

    def patches(self, config: Config) -> Sequence[Patch]:
        """All modes measure and check; some also compute log-probs as the rollout does."""
        ours = (CORRECTION,) if correction.is_ours(config) else ()
        scaled = INVARIANT_SCALE if config.quantized_rollout else ()
        states = (OPTIMIZER,) if config.optimizer_states != "fp32" else ()
        loss_scale = (LOSS_SCALE,) if config.mode.scales_loss else ()
        return EVERY_MODE + (SAME_LOG_PROBS if config.same_log_probs else ()) + ours + scaled + loss_scale + CHECKPOINT + states

    def services(self) -> Services:
        """OpenRLHF's arguments and models."""
        from jetrl_patch.adapters.openrlhf import services

        return Services(trainer=services)

    def hooks(self, config: Config) -> Sequence[OnImport]:
        """A method for reports on OpenRLHF's actors, and Ray's copies of what was patched."""
        return (
            OnImport(
                module="openrlhf.trainer.ray.launcher",
                name="BaseModelActor.jetrl_report",
                apply=_add_report,
                reason="actors can be asked what stands in them, through OpenRLHF's own execute_batch",
                remove_when=_NO_HOOK,
            ),
            OnImport(
                module="openrlhf.trainer.ray.launcher",
                name="ReferenceModelActor, RewardModelActor",
                apply=functools.partial(
                    remote.renew, base="BaseModelActor", names=("_setup_distributed", "jetrl_report")
                ),
                reason=remote.REASON,
                remove_when=remote.REMOVE_WHEN,
            ),
            OnImport(
                module="openrlhf.trainer.ppo_trainer",
                name="PPOTrainer",
                apply=functools.partial(remote.renew, base="BasePPOTrainer", names=("train_step", "broadcast_to_vllm")),
                reason=remote.REASON,
                remove_when=remote.REMOVE_WHEN,
            ),
        )

    def on_undo(self) -> None:
        """Forget figures that wait for a log line."""
        state.reset()


def _add_report(module: ModuleType, journal: Journal) -> None:
    journal.set_attr(
        module.BaseModelActor,
        "jetrl_report",
        sync.report,
        target="openrlhf.trainer.ray.launcher.BaseModelActor.jetrl_report",
        reason="actors can be asked what stands in them",
    )


ADAPTER = OpenRLHFAdapter()
