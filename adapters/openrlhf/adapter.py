"""The OpenRLHF adapter: the list of its patches. Each replacement lives in the module of its concern.

Ray pickles classes under ``@ray.remote`` by value in the driver. The patches therefore replace their plain base classes, the
classes and functions that they use by name, and names in the modules that look them up. ``@ray.remote`` also copies inherited
methods into the class; ``remote.py`` renews copies made before the patch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar

from jetrl_patch.adapters.openrlhf import (
    checkpoint,
    correction,
    logprob,
    metrics,
    model,
    settings,
    startup,
    state,
    sync,
    worker,
)
from jetrl_patch.adapters.openrlhf.vision import SEEING
from jetrl_patch.patching.patch import NO_REPORT
from jetrl_patch.registry import Adapter, Config, Journal, OnImport, Patch, Services

_ACTORS = "OpenRLHF loads plugins in its actors, with the driver's settings"
_FIRST = "OpenRLHF tells a model's layers a step's first micro-batch, as TransformerEngine's is_first_microbatch does"
_STATE = "OpenRLHF saves and loads the state of plugins with its checkpoints"

EVERY_MODE: tuple[Patch, ...] = (
    Patch(
        module="openrlhf.utils",
        attr="get_strategy",
        make=settings.get_strategy,
        reason="arguments that contradict jetrl_patch would fail late or break equality unnoticed; they are refused before any "
        "actor starts, and the settings are stored in them",
        remove_when="OpenRLHF hands its parsed arguments to plugins before it starts an actor",
    ),
    Patch(
        module="openrlhf.trainer.ray.ppo_actor",
        attr="ActorPPOTrainer._init_vllm_sync_group",
        make=startup.init_vllm_sync_group,
        reason="the group waits without a limit for engines that could not be built, so the run hangs and hides their error",
        upstream=NO_REPORT,
        remove_when="OpenRLHF waits for its engines before it opens the group, or with a time-out",
        fixes="openrlhf",
    ),
    Patch(
        module="openrlhf.trainer.ray",
        attr="create_vllm_engines",
        make=metrics.create_vllm_engines,
        reason="engines return processed log-probs only with a correction; without them the mismatch cannot be measured",
        remove_when="logprobs_mode is an argument of OpenRLHF",
    ),
    Patch(
        module="openrlhf.trainer.ppo_utils.samples_generator",
        attr="SamplingParams",
        make=metrics.sampling_params,
        reason="OpenRLHF requests log-probs only with a correction; without them the mismatch cannot be measured",
        remove_when="OpenRLHF can request log-probs without a correction",
    ),
    Patch(
        module="openrlhf.trainer.ppo_trainer",
        attr="BasePPOTrainer.__init__",
        make=metrics.trainer_init,
        reason="a trainer loop whose settings differ from the driver's would go unnoticed",
        remove_when=_ACTORS,
    ),
    Patch(
        module="openrlhf.trainer.ppo_trainer",
        attr="BasePPOTrainer.train_step",
        make=metrics.train_step,
        reason="jetrl_patch's metrics would miss the step's status, which OpenRLHF sends to the user's loggers",
        remove_when="OpenRLHF lets a plugin add to a step's status",
    ),
    Patch(
        module="openrlhf.trainer.ppo_trainer",
        attr="BasePPOTrainer.broadcast_to_vllm",
        make=metrics.broadcast_to_vllm,
        reason="OpenRLHF drops what actors return from a sync, so an unpatched actor and the sync's cost go unnoticed",
        remove_when="OpenRLHF returns the actors' results of a sync",
    ),
    Patch(
        module="openrlhf.trainer.ppo_utils.experience_maker",
        attr="RemoteExperienceMaker.make_experience",
        make=metrics.make_experience,
        reason="without a correction OpenRLHF does not measure the mismatch between rollout and trainer log-probs",
        remove_when="OpenRLHF logs this mismatch without a correction too",
    ),
    Patch(
        module="openrlhf.trainer.ray.launcher",
        attr="BaseModelActor._setup_distributed",
        make=model.setup_distributed,
        reason="an actor whose settings differ from the driver's would build a different model unnoticed",
        remove_when=_ACTORS,
    ),
    Patch(
        module="torch.utils.file_baton",
        attr="FileBaton.wait",
        make=startup.wait,
        reason="a process killed while DeepSpeed builds its operators leaves a lock, for which every later run waits forever",
        upstream="https://github.com/pytorch/pytorch/issues/189245",
        remove_when="PyTorch's lock ends with the process that holds it (pytorch#190543)",
        fixes="torch",
    ),
    Patch(
        module="openrlhf.models.actor",
        attr="Actor.__init__",
        make=model.actor_init,
        reason="OpenRLHF trains in BF16; policy, reference and EMA are converted after loading, before DeepSpeed wraps them. "
        "Critics and reward models are not covered",
        remove_when="OpenRLHF calls a plugin between loading a model and handing it to DeepSpeed",
    ),
    Patch(
        module="openrlhf.trainer.ray.ppo_actor",
        attr="ActorPPOTrainer.__init__",
        make=sync.trainer_init,
        reason="OpenRLHF samples its first batch before any weight sync, so nothing would have compared the two sides",
        remove_when="OpenRLHF syncs before it samples",
    ),
    Patch(
        module="openrlhf.trainer.ray.ppo_actor",
        attr="ActorPPOTrainer.broadcast_to_vllm",
        make=sync.broadcast_to_vllm,
        reason="OpenRLHF sends BF16, which the rollout would quantize again, with one remote call per parameter; the trainer's "
        "own bytes and scales are sent in buckets",
        remove_when="OpenRLHF's sync accepts quantized tensors and buckets",
    ),
    Patch(
        module="openrlhf.trainer.ray.vllm_worker_wrap",
        attr="WorkerWrap.update_weight",
        make=worker.update_weight,
        reason="OpenRLHF loads what arrives without checking it, and BF16 only",
        remove_when="OpenRLHF's receiver checks completeness and content and loads FP8 unchanged",
    ),
    Patch(
        module="openrlhf.trainer.ray.vllm_worker_wrap",
        attr="WorkerWrap.update_weight_cuda_ipc",
        make=worker.update_weight_cuda_ipc,
        reason="OpenRLHF loads what colocated engines receive without checking it, and BF16 only",
        remove_when="OpenRLHF's receiver checks completeness and content and loads FP8 unchanged",
    ),
    *(
        Patch(
            module="openrlhf.utils.agent",
            attr=f"{kind}AgentExecutor.execute",
            make=metrics.execute,
            reason="samples do not record the version of the weights that made them, so stale ones count as mismatch. A custom "
            "executor that calls neither of these is not covered",
            remove_when="OpenRLHF's samples record the version of their weights",
        )
        for kind in ("SingleTurn", "MultiTurn")
    ),
    Patch(
        module="vllm.v1.engine.async_llm",
        attr="AsyncLLM.generate",
        make=metrics.generate,
        reason="vLLM's outputs do not say which weights produced their tokens",
        remove_when="vLLM's outputs carry the version of their weights",
    ),
    Patch(
        module="vllm.v1.engine.async_llm",
        attr="AsyncLLM.collective_rpc",
        make=metrics.collective_rpc,
        reason="the end of a weight sync, which starts a new version, is visible only here",
        remove_when="vLLM's outputs carry the version of their weights",
    ),
)

SAME_LOG_PROBS: tuple[Patch, ...] = (
    Patch(
        module="openrlhf.models.actor",
        attr="Actor.forward",
        make=logprob.actor_forward,
        reason="vLLM bans EOS at the first token of a response (min_tokens=1), which OpenRLHF's trainer ignores; the log-prob "
        "function needs to know where responses begin",
        remove_when="OpenRLHF samples with min_tokens=0, or bans EOS in the trainer too",
    ),
    Patch(
        module="openrlhf.models.actor",
        attr="log_probs_from_logits",
        make=logprob.log_probs_from_logits,
        reason="OpenRLHF's formula depends on the dtype and the library, and it divides by a number, for which CUDA multiplies "
        "by the reciprocal; vLLM divides by a tensor and computes log-softmax in FP32",
        remove_when="OpenRLHF divides by a tensor and computes log-softmax in FP32",
    ),
    Patch(
        module="openrlhf.models.actor",
        attr="compute_entropy",
        make=logprob.compute_entropy,
        reason="the logits reach it undivided, because the temperature belongs to the log-probs' formula",
        remove_when="OpenRLHF divides by a tensor and computes log-softmax in FP32",
    ),
    Patch(
        module="openrlhf.trainer.ppo_utils.samples_generator",
        attr="SamplesGenerator._process_response_into_experience",
        make=logprob.process_response,
        reason="a sample's mask joins two turns of an agent without feedback between them, so the trainer would not ban EOS at "
        "the first token of the second, as vLLM does",
        remove_when="OpenRLHF samples with min_tokens=0, or its samples keep their action_ranges",
    ),
)

OLD_LOG_PROBS: tuple[Patch, ...] = (
    Patch(
        module="openrlhf.trainer.ppo_utils.experience_maker",
        attr="RemoteExperienceMaker._dispatch_forward",
        make=logprob.dispatch_forward,
        reason="OpenRLHF computes the policy's log-probs again, which in exact mode are those that the rollout returned",
        remove_when="OpenRLHF can train with the rollout's log-probs as the old ones",
    ),
    Patch(
        module="openrlhf.trainer.ray.ppo_actor",
        attr="ActorPPOTrainer.training_step",
        make=logprob.training_step,
        reason="the rollout's log-probs would be taken as the trainer's without any proof; the first update compares them",
        remove_when="OpenRLHF compares the rollout's log-probs with the trainer's before an update",
    ),
)

CORRECTION = Patch(
    module="openrlhf.models.loss",
    attr="PolicyLoss.forward",
    make=correction.policy_loss,
    reason="OpenRLHF has no sequence ratio in product form, no geometric mask with weight 1 and no adaptive clipping range",
    remove_when="OpenRLHF's PolicyLoss has all three",
)


SAME_WEIGHTS: tuple[Patch, ...] = (
    Patch(
        module="openrlhf.trainer.ray.ppo_actor",
        attr="ActorPPOTrainer.ppo_train",
        make=model.ppo_train,
        reason="nothing on a GPU tells cheaply that a weight is unchanged, so that each micro-batch's forward, recomputation "
        "and backward would quantize it",
        remove_when=_FIRST,
    ),
    Patch(
        module="openrlhf.utils.deepspeed.deepspeed",
        attr="DeepspeedStrategy.optimizer_step",
        make=model.optimizer_step,
        reason="DeepSpeed writes the weights between two micro-batches, in ways that leave no trace on the tensors",
        remove_when=_FIRST,
    ),
)

LOSS_SCALE = Patch(
    module="openrlhf.utils.deepspeed.deepspeed",
    attr="DeepspeedStrategy.optimizer_step",
    make=settings.optimizer_step,
    reason="OpenRLHF does not log skipped steps, so a run in which the loss scale skips every step goes on unnoticed",
    remove_when="OpenRLHF logs the scale and the skipped steps",
)

INVARIANT_SCALE: tuple[Patch, ...] = tuple(
    Patch(
        module="openrlhf.utils.deepspeed.deepspeed",
        attr=f"DeepspeedStrategy.{name}",
        make=make,
        reason="a checkpoint resumed with another invariant_scale would scale the norms twice or not at all",
        remove_when=_STATE,
    )
    for name, make in (("save_ckpt", checkpoint.save_scales), ("load_ckpt", checkpoint.compare_scales))
)

CHECKPOINT: tuple[Patch, ...] = tuple(
    Patch(
        module="openrlhf.utils.deepspeed.deepspeed",
        attr=f"DeepspeedStrategy.{name}",
        make=make,
        reason="OpenRLHF's checkpoints do not record their settings (jetrl.json), so a run would resume in another precision, or "
        "with other optimizer states, unnoticed",
        remove_when=_STATE,
    )
    for name, make in (("save_ckpt", checkpoint.save_ckpt), ("load_ckpt", checkpoint.load_ckpt))
)

OPTIMIZER = Patch(
    module="deepspeed",
    attr="initialize",
    make=settings.initialize,
    reason="OpenRLHF passes DeepSpeed the name of an optimizer, and DeepSpeed has none with 8-bit states",
    remove_when="OpenRLHF accepts a custom optimizer",
)


class OpenRLHFAdapter(Adapter):
    """OpenRLHF 0.11: ``train_ppo_ray``, ZeRO-0 to 3, synchronous, asynchronous and colocated."""

    name: ClassVar[str] = "openrlhf"
    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers", "vllm", "openrlhf", "ray")

    def patches(self, config: Config) -> Sequence[Patch]:
        """Return the patches of every mode, and those that the settings in ``config`` need."""
        ours = (CORRECTION,) if correction.is_ours(config) else ()
        scaled = INVARIANT_SCALE if config.quantized_rollout else ()
        states = (OPTIMIZER,) if config.optimizer_states != "fp32" else ()
        loss_scale = (LOSS_SCALE,) if config.mode.scales_loss else ()
        same = SAME_LOG_PROBS if config.same_log_probs else ()
        old = OLD_LOG_PROBS if config.skips_old_pass else ()
        kept = SAME_WEIGHTS if config.fp8_train else ()
        return EVERY_MODE + SEEING + same + old + ours + scaled + loss_scale + CHECKPOINT + states + kept

    def services(self) -> Services:
        """Offer OpenRLHF's arguments and models to the core."""
        from jetrl_patch.adapters.openrlhf import services

        return Services(trainer=services)

    def hooks(self, config: Config) -> Sequence[OnImport]:
        """Return the hooks that add a report method to OpenRLHF's actors and renew Ray's copies of patched methods."""
        return (
            OnImport(
                module="openrlhf.trainer.ray.launcher",
                name="BaseModelActor.jetrl_report",
                apply=_add_report,
                reason="OpenRLHF's actors cannot report their patches and settings; execute_batch calls this method",
                remove_when=_ACTORS,
            ),
            OnImport(
                module="openrlhf.trainer.ray.launcher",
                name="ReferenceModelActor, RewardModelActor",
                apply=functools.partial(
                    startup.renew, base="BaseModelActor", names=("_setup_distributed", "jetrl_report")
                ),
                reason=startup.REASON,
                remove_when=startup.REMOVE_WHEN,
            ),
            OnImport(
                module="openrlhf.trainer.ppo_trainer",
                name="PPOTrainer",
                apply=functools.partial(startup.renew, base="BasePPOTrainer", names=("train_step", "broadcast_to_vllm")),
                reason=startup.REASON,
                remove_when=startup.REMOVE_WHEN,
            ),
        )

    def on_undo(self) -> None:
        """Drop metrics that wait for a log line."""
        state.reset()


def _add_report(module: ModuleType, journal: Journal) -> None:
    journal.set_attr(
        module.BaseModelActor,
        "jetrl_report",
        sync.report,
        target="openrlhf.trainer.ray.launcher.BaseModelActor.jetrl_report",
        reason="OpenRLHF's actors cannot report their patches and settings",
    )


ADAPTER = OpenRLHFAdapter()
