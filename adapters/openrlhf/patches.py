"""The patches of OpenRLHF. The replacements are in the other modules of this folder.

Ray pickles classes under ``@ray.remote`` by value in the driver. The patches therefore replace their plain base classes, the
classes and functions that they use by name, and names in the modules that look them up. ``@ray.remote`` also copies inherited
methods into the class; ``startup.renew`` renews copies made before the patch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

from jetrl_patch.adapters.openrlhf import (
    checkpoint,
    correction,
    logprob,
    metrics,
    model,
    settings,
    startup,
    support,
    sync,
    transport,
)  # fmt: skip
from jetrl_patch.adapters.openrlhf.vision import VISION
from jetrl_patch.patching.patch import NO_REPORT, needed
from jetrl_patch.registry import Config, Journal, OnImport, Patch

_ACTORS = "OpenRLHF loads plugins in its Ray actors (an entry point or a hook in BaseModelActor), with the driver's arguments"
_SUPPORTS = "OpenRLHF's Experience has vLLM's sampling masks, and Actor.forward computes log-probs with them"
_VERSION = "vLLM's RequestOutput carries the engine core's weight version (set_weight_version), and OpenRLHF's sync sets it"
_FIRST = "OpenRLHF's ActorPPOTrainer.ppo_train passes a flag like TransformerEngine's is_first_microbatch to the layers"
_STATE = "OpenRLHF's DeepspeedStrategy.save_ckpt and load_ckpt have a hook for extra state such as jetrl.json"

#: ``when`` says which settings need one
PATCHES: tuple[Patch, ...] = (
    Patch(
        "openrlhf.utils", "get_strategy", settings.get_strategy,
        reason="OpenRLHF does not know jetrl_patch; this rejects conflicting arguments before actors start, and stores settings",
        remove_when="openrlhf.cli.train_ppo_ray calls plugins (such as entry points) with its arguments before it starts actors",
    ),
    Patch(
        "openrlhf.trainer.ray.ppo_actor", "ActorPPOTrainer._init_vllm_sync_group", startup.init_vllm_sync_group,
        reason="OpenRLHF waits forever for engines that failed to start, so the run hangs and hides their error",
        upstream=NO_REPORT,
        remove_when="OpenRLHF's _init_vllm_sync_group waits for the engines to be up first, or has a timeout",
        fixes="openrlhf",
    ),
    Patch(
        "openrlhf.trainer.ray", "create_vllm_engines", metrics.create_vllm_engines,
        reason="OpenRLHF's engines return processed log-probs only with a correction, but the mismatch needs them in every run",
        remove_when="openrlhf.cli.train_ppo_ray has an option for the logprobs_mode that it passes to create_vllm_engines",
    ),
    Patch(
        "openrlhf.trainer.ppo_utils.samples_generator", "SamplingParams", metrics.sampling_params,
        reason="OpenRLHF requests log-probs only with a correction, but the mismatch needs them in every run",
        remove_when="OpenRLHF's SamplesGenerator can request log-probs with is_correction_level off",
    ),
    Patch(
        "openrlhf.trainer.ppo_trainer", "BasePPOTrainer.__init__", metrics.trainer_init,
        reason="nobody would notice a trainer loop whose settings differ from the driver's",
        remove_when=_ACTORS,
    ),
    Patch(
        "openrlhf.trainer.ppo_trainer", "BasePPOTrainer.train_step", metrics.train_step,
        reason="jetrl_patch's metrics would not be in the step's status, which OpenRLHF sends to the user's loggers",
        remove_when="OpenRLHF's BasePPOTrainer.train_step has a callback that can add to the status it returns",
    ),
    Patch(
        "openrlhf.trainer.ppo_trainer", "BasePPOTrainer.broadcast_to_vllm", metrics.broadcast_to_vllm,
        reason="OpenRLHF discards what actors return from a sync, so neither an unpatched actor nor the sync's cost would show",
        remove_when="OpenRLHF's BasePPOTrainer.broadcast_to_vllm returns the actors' results",
    ),
    Patch(
        "openrlhf.trainer.ppo_utils.experience_maker", "RemoteExperienceMaker.make_experience", metrics.make_experience,
        reason="without a correction OpenRLHF does not measure how rollout and trainer log-probs differ",
        remove_when="OpenRLHF logs the mismatch (today vllm_kl in PolicyLoss) with is_correction_level off too",
    ),
    Patch(
        "openrlhf.trainer.ray.launcher", "BaseModelActor._setup_distributed", model.setup_distributed,
        reason="an actor with settings other than the driver's would silently build a different model",
        remove_when=_ACTORS,
    ),
    Patch(
        "torch.utils.file_baton", "FileBaton.wait", startup.wait,
        reason="a process killed while DeepSpeed compiles its operators leaves a lock file, and later runs wait for it forever",
        upstream="https://github.com/pytorch/pytorch/issues/189245",
        remove_when="the oldest supported PyTorch releases the FileBaton lock when its owner dies (pytorch#190543)",
        fixes="torch",
    ),
    Patch(
        "openrlhf.models.actor", "Actor.__init__", model.actor_init,
        reason="OpenRLHF cannot train in FP8; this converts policy, reference and EMA after loading, before DeepSpeed wraps "
        "them. Critics and reward models are not converted",
        remove_when="OpenRLHF's Actor.__init__ has a hook for the loaded model, before DeepspeedStrategy.prepare",
    ),
    Patch(
        "openrlhf.models.actor", "get_peft_model", model.get_peft_model,
        when=lambda config: config.quantized_rollout,
        reason="OpenRLHF adds adapters in Actor.__init__ before a hook could convert the model, and its sync sends peft's names, "
        "which vLLM rejects",
        upstream=NO_REPORT,
        remove_when="OpenRLHF's Actor.__init__ has a hook for the model without adapters, and its sync sends merged weights",
    ),
    Patch(
        "openrlhf.trainer.ray.ppo_actor", "ActorPPOTrainer.__init__", sync.trainer_init,
        reason="OpenRLHF samples its first batch before any weight sync, when trainer and rollout have not been compared",
        remove_when="OpenRLHF calls broadcast_to_vllm before it samples the first batch",
    ),
    Patch(
        "openrlhf.trainer.ray.ppo_actor", "ActorPPOTrainer.broadcast_to_vllm", sync.broadcast_to_vllm,
        reason="OpenRLHF sends one BF16 weight a call, and the rollout quantizes it; this sends buckets of FP8 bytes and scales",
        remove_when="OpenRLHF's ActorPPOTrainer.broadcast_to_vllm sends FP8 bytes with scales, several tensors per remote call",
    ),
    *(
        Patch(
            "openrlhf.trainer.ray.vllm_worker_wrap", f"WorkerWrap.{name}", make,
            always="a patched trainer's order is an error in an unpatched engine",
            reason="OpenRLHF's vLLM worker, colocated or not, loads only BF16 weights and does not check what arrived",
            remove_when="OpenRLHF's WorkerWrap loads FP8 bytes unchanged and checks that every tensor arrived intact",
        )
        for name, make in (
            ("update_weight", transport.update_weight), ("update_weight_cuda_ipc", transport.update_weight_cuda_ipc)
        )
    ),
    *(
        Patch(
            "openrlhf.utils.agent", f"{kind}AgentExecutor.execute", metrics.execute,
            reason="OpenRLHF's samples do not record their weight version, so stale samples would count as mismatch. Custom "
            "executors that call neither of these are not covered",
            remove_when="OpenRLHF's AgentExecutor.execute returns the weight version of a sample",
        )
        for kind in ("SingleTurn", "MultiTurn")
    ),
    Patch(
        "vllm.v1.engine.async_llm", "AsyncLLM.generate", metrics.generate,
        reason="vLLM's outputs do not say which weights produced their tokens",
        remove_when=_VERSION,
    ),
    Patch(
        "vllm.v1.engine.async_llm", "AsyncLLM.collective_rpc", metrics.collective_rpc,
        reason="a new weight version starts when a sync ends, which the engine process sees only in this call",
        remove_when=_VERSION,
    ),
    Patch(
        "openrlhf.models.actor", "Actor.forward", logprob.actor_forward,
        when=lambda config: config.same_log_probs,
        reason="vLLM masks EOS at the first token of a response (min_tokens=1) but OpenRLHF's trainer does not; its log-prob "
        "function must know where responses begin",
        remove_when="OpenRLHF's SamplesGenerator samples with min_tokens=0, or Actor.forward masks EOS at a response's start",
    ),
    Patch(
        "openrlhf.models.actor", "log_probs_from_logits", logprob.log_probs_from_logits,
        when=lambda config: config.same_log_probs,
        reason="OpenRLHF's log-probs depend on the logits' dtype and the installed library, and on how CUDA divides by a "
        "Python number; vLLM divides by a tensor and computes log-softmax in FP32",
        remove_when="OpenRLHF's log_probs_from_logits divides by a tensor and computes log-softmax in FP32",
    ),
    Patch(
        "openrlhf.models.actor", "unpad_and_slice_tensor", logprob.unpad_and_slice_tensor,
        when=lambda config: config.exact,
        reason="attention does not learn how many sequences a packed row has, so the host would wait while they are counted",
        remove_when="OpenRLHF's Actor.forward passes cu_seqlens to its model",
    ),
    Patch(
        "openrlhf.models.actor", "compute_entropy", logprob.compute_entropy,
        when=lambda config: config.same_log_probs,
        reason="the patched log_probs_from_logits applies the temperature, so OpenRLHF's entropy would get logits without it",
        remove_when="OpenRLHF's log_probs_from_logits divides by a tensor and computes log-softmax in FP32",
    ),
    Patch(
        "openrlhf.trainer.ppo_utils.samples_generator", "SamplesGenerator._process_response_into_experience",
        logprob.process_response,
        when=lambda config: config.exact,
        reason="OpenRLHF's mask merges two agent turns without feedback between them, so the trainer would not mask EOS at the "
        "start of the second, as vLLM does",
        remove_when="OpenRLHF's SamplesGenerator samples with min_tokens=0, or its experiences keep action_ranges",
    ),
    Patch(
        "openrlhf.trainer.ppo_utils.experience_maker", "RemoteExperienceMaker._dispatch_forward", logprob.dispatch_forward,
        when=lambda config: config.skips_old_pass,
        reason="OpenRLHF recomputes the policy's log-probs, although in exact mode the rollout returned the same ones",
        remove_when="OpenRLHF's RemoteExperienceMaker has an option to use rollout_log_probs as the old log-probs",
    ),
    Patch(
        "openrlhf.trainer.ray.ppo_actor", "ActorPPOTrainer.training_step", logprob.training_step,
        when=lambda config: config.skips_old_pass,
        reason="OpenRLHF would use the rollout's log-probs as the trainer's unchecked; this compares them in the first update",
        remove_when="OpenRLHF's ActorPPOTrainer.training_step compares rollout and trainer log-probs before the backward pass",
    ),
    Patch(
        "openrlhf.models.loss", "PolicyLoss.forward", correction.policy_loss,
        when=correction.is_ours,
        reason="OpenRLHF has no sequence ratio in product form, no geometric mask with weight 1 and no adaptive clipping range",
        remove_when="OpenRLHF's PolicyLoss offers all three through is_correction_level and is_correction_mode",
    ),
    Patch(
        "openrlhf.trainer.ray.launcher", "BaseModelActor.execute_batch", support.execute_batch,
        when=lambda config: config.exact,
        reason="only vision-language models get the samples' dictionaries, which say what top_p left of a sample's tokens",
        remove_when=_SUPPORTS,
    ),
    *(
        Patch(
            module, "merge_mm_train_inputs", support.merge_mm_train_inputs,
            when=lambda config: config.exact,
            reason="vision-language models would get all of the samples' dictionaries, also what top_p left of their tokens",
            remove_when=_SUPPORTS,
        )
        for module in ("openrlhf.utils.vlm_utils", "openrlhf.trainer.ray.ppo_actor")
    ),
    Patch(
        "openrlhf.utils.deepspeed.deepspeed", "DeepspeedStrategy.optimizer_step", settings.optimizer_step,
        when=lambda config: config.mode.scales_loss,
        reason="OpenRLHF does not log skipped steps, so nobody would notice a run in which the loss scaler skips every step",
        remove_when="OpenRLHF's DeepspeedStrategy.optimizer_step logs DeepSpeed's loss scale and skipped_steps",
    ),
    *(
        Patch(
            "openrlhf.utils.deepspeed.deepspeed", f"DeepspeedStrategy.{name}", make,
            reason="OpenRLHF's checkpoints do not record the settings, so a run could silently resume in a different precision, "
            "with different optimizer states, or with norms that invariant_scale scales twice or not at all",
            remove_when=_STATE,
        )
        for name, make in (("save_ckpt", checkpoint.save_ckpt), ("load_ckpt", checkpoint.load_ckpt))
    ),
    Patch(
        "deepspeed", "initialize", settings.initialize,
        when=lambda config: config.optimizer_states != "fp32",
        reason="OpenRLHF passes DeepSpeed an optimizer's name, and DeepSpeed has none with 8-bit states",
        remove_when="OpenRLHF's DeepspeedStrategy.prepare takes an optimizer object or class",
    ),
    Patch(
        "openrlhf.trainer.ray.ppo_actor", "ActorPPOTrainer.ppo_train", model.ppo_train,
        when=lambda config: config.fp8_train,
        reason="a GPU has no cheap way to see that a weight is unchanged, so every forward and backward would quantize it again",
        remove_when=_FIRST,
    ),
    Patch(
        "openrlhf.utils.deepspeed.deepspeed", "DeepspeedStrategy.optimizer_step", model.optimizer_step,
        when=lambda config: config.fp8_train,
        reason="DeepSpeed updates the weights between two micro-batches in ways that the tensors do not show",
        remove_when=_FIRST,
    ),
)


_REPORTS = "OpenRLHF's actors cannot report their patches and settings; the plugin calls this method through execute_batch"


def _add_report(module: ModuleType, journal: Journal) -> None:
    target = f"{module.__name__}.BaseModelActor.jetrl_report"
    journal.set_attr(module.BaseModelActor, "jetrl_report", sync.report, target=target, reason=_REPORTS)


REPORT = OnImport(
    module="openrlhf.trainer.ray.launcher",
    name="BaseModelActor.jetrl_report",
    apply=_add_report,
    reason=_REPORTS,
    remove_when=_ACTORS,
)
RENEWED = tuple(
    OnImport(
        module=module,
        name=names,
        apply=functools.partial(startup.renew, base=base, names=methods),
        reason=startup.REASON,
        remove_when="Ray's ray.remote no longer copies inherited methods into the class it exports (modified_class)",
    )
    for module, names, base, methods in (
        (
            "openrlhf.trainer.ray.launcher", "ReferenceModelActor, RewardModelActor", "BaseModelActor",
            ("_setup_distributed", "execute_batch", "jetrl_report"),
        ),
        ("openrlhf.trainer.ppo_trainer", "PPOTrainer", "BasePPOTrainer", ("train_step", "broadcast_to_vllm")),
    )
)  # fmt: skip
#: they add a report method to OpenRLHF's actors and renew Ray's copies of patched methods
HOOKS: tuple[OnImport, ...] = (REPORT, *RENEWED)


def patches(config: Config) -> Sequence[Patch]:
    """Those that these settings need."""
    return needed((*PATCHES, *VISION), config)
