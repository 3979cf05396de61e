"""The patches of TRL. The replacements are in the other modules of this folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jetrl_patch.adapters.trl import compat, logprob, metrics, model, support, sync, vision
from jetrl_patch.adapters.trl.state import TRAINERS
from jetrl_patch.patching.guards import check_version
from jetrl_patch.patching.patch import needed
from jetrl_patch.registry import Config, Patch

_GENERATION = "trl.generation.vllm_generation"
_HOOK = "TRL's trainers have a hook for their loaded models, or a callback before VLLMGeneration builds the engine"
_OLD = "TRL's trainers have an option to take the rollout's log-probs as the old ones, checked by the first update"


def _of_trainer(module: str, kind: str) -> Iterator[Patch]:
    """The patches that GRPO and RLOO both need: one class is not the other's base."""
    yield Patch(
        module, f"{kind}.__init__", model.trainer_init,
        reason="TRL does not know jetrl_patch; this rejects conflicting settings before a model is loaded",
        remove_when=_HOOK,
    )
    yield Patch(
        module, "create_model_from_path", model.create_model,
        when=lambda config: config.quantized_rollout,
        reason="TRL cannot train in FP8; this converts policy and reference model as loaded, before anything wraps them",
        remove_when=_HOOK,
    )
    yield Patch(
        module, "get_peft_model", model.get_peft_model,
        when=lambda config: config.quantized_rollout and importlib.util.find_spec("peft") is not None,
        reason="LoRA's layers would compute B A x beside W x, which a rollout with one merged, quantized weight cannot reproduce",
        remove_when=_HOOK,
    )
    yield Patch(
        module, f"{kind}._generate_and_score_completions", logprob.generate_and_score,
        reason="nothing would compare the rollout's log-probs with the policy's, bit for bit",
        remove_when="TRL's trainers pass both log-probs of a batch to a callback",
    )
    yield Patch(
        module, f"{kind}._get_per_token_logps_and_entropies", logprob.per_token_logps,
        reason="TRL keeps the log-probs of an update to itself, and computes old ones that exact mode has",
        remove_when=_OLD,
    )
    yield Patch(
        module, f"{kind}._compute_loss", logprob.compute_loss,
        reason="the forward pass of an update does not know which weights sampled its batch",
        remove_when=_OLD,
    )
    yield Patch(
        module, f"{kind}.log", metrics.log,
        reason="jetrl_patch's figures would not be in the line that TRL sends to the user's loggers",
        remove_when="transformers' on_log callback may add to the line before the loggers get it",
    )
    yield Patch(
        module, f"{kind}._save_checkpoint", metrics.save_checkpoint,
        reason="TRL's checkpoints do not record the settings, so a run could silently resume in a different precision",
        remove_when="transformers' Trainer has a callback with the folder of a checkpoint before it is complete",
    )


PATCHES: tuple[Patch, ...] = (
    *vision.VISION,
    *(patch for module, kind in TRAINERS.items() for patch in _of_trainer(module, kind)),
    Patch(
        "trl.trainer.grpo_trainer", "GRPOTrainer._generate", logprob.generate,
        reason="the rollout's log-probs are not known where TRL computes the policy's, which they stand for in exact mode",
        remove_when=_OLD,
    ),
    Patch(
        _GENERATION, "VLLMGeneration.__init__", model.generation_init,
        reason="another trainer of TRL would sample from an FP8 engine and train a stock model, and RLOO asks for no log-probs",
        remove_when="the plugin supports every trainer that uses VLLMGeneration",
    ),
    Patch(
        _GENERATION, "VLLMGeneration.generate", logprob.engine_generate,
        reason="RLOO drops the rollout's log-probs, so nothing could be compared with the policy's",
        remove_when="TRL's RLOOTrainer keeps the rollout's log-probs",
    ),
    Patch(
        _GENERATION, "extract_logprobs", support.extract_logprobs,
        when=lambda config: config.exact,
        reason="TRL does not keep which tokens top_k, top_p and min_p left, which the trainer must leave too",
        remove_when="TRL's trainers keep vLLM's sampling masks, and compute log-probs with them",
    ),
    Patch(
        _GENERATION, "VLLMGeneration._iter_named_params", sync.iter_named_params,
        when=lambda config: config.changes_rollout,
        reason="TRL loads unchecked 16-bit weights into the engine one by one; this sends bytes and scales, and checks them",
        remove_when="TRL's VLLMGeneration.sync_weights takes the function that installs weights as an argument",
    ),
    Patch(
        _GENERATION, "VLLMGeneration.sync_weights", sync.sync_weights,
        when=lambda config: config.quantized_rollout,
        reason="TRL announces a server all weights before the first, and sends them in the trainer's precision",
        remove_when="TRL's VLLMGeneration.sync_weights takes the function that installs weights as an argument",
    ),
    Patch(
        "trl.generation.vllm_client", "VLLMClient.init_communicator", sync.init_communicator,
        when=lambda config: config.quantized_rollout,
        reason="TRL's group for weights needs NCCL and vLLM's weight-transfer engine, and a server is not asked for its settings",
        remove_when="TRL's VLLMClient takes a transport of weights as an argument",
    ),
    Patch(
        "transformers.trainer", "Trainer._prepare_for_training", metrics.prepare_for_training,
        reason="a checkpoint of other settings would be resumed without a word",
        remove_when="transformers' Trainer has a callback before it loads a checkpoint",
    ),
)  # fmt: skip

#: of releases whose models compute log-probs
OF_FUSED_HEAD: tuple[Patch, ...] = (
    Patch(
        "trl.trainer.utils", "_ChunkedLogProbFunction", lambda original: model.ExactLogProbs,
        when=lambda config: config.exact,
        reason="TRL's fused head sums tiles of the vocabulary, and divides by the temperature, otherwise than vLLM's sampler",
        remove_when="TRL's add_fused_lm_head takes the function that computes log-probs as an argument",
    ),
)  # fmt: skip


def _of_logits(name: str, make: Callable[[Any], Any]) -> tuple[Patch, ...]:
    """Both trainers' patches of a function that takes logits."""
    return tuple(
        Patch(
            module, name, make,
            when=lambda config: config.exact,
            reason="TRL subtracts the logarithm of a sum from a logit, which rounds otherwise than vLLM's sampler",
            remove_when="TRL 1.15 is the oldest supported release",
        )
        for module in TRAINERS
    )  # fmt: skip


#: of releases whose models compute logits, and of those among them that leave the division by the temperature to a function
OF_LOGITS = _of_logits("selective_log_softmax", model.selective_log_softmax)
OF_DIVIDED_LOGITS = _of_logits("selective_log_softmax_and_entropy", model.selective_log_softmax_and_entropy)


def patches(config: Config) -> Sequence[Patch]:
    """Those that these settings need; none for another version of TRL, whose engines are then those of an unknown trainer."""
    supported, _ = check_version("trl")
    return patches_of(config) if supported else ()


def patches_of(config: Config) -> Sequence[Patch]:
    """Those that these settings need, of a supported version."""
    return needed(of_version(), config)


def of_version() -> tuple[Patch, ...]:
    """All that the installed version has targets for."""
    if compat.has_fused_head():
        return PATCHES + OF_FUSED_HEAD
    return PATCHES + OF_LOGITS + (() if compat.divides_by_temperature() else OF_DIVIDED_LOGITS)
