"""The patches of TRL. The replacements are in the other modules of this folder."""

from __future__ import annotations

from collections.abc import Sequence

from jetrl_patch.adapters.trl import logprob, metrics, model, settings, sync
from jetrl_patch.adapters.trl.state import GRPO
from jetrl_patch.patching.guards import check_version
from jetrl_patch.patching.patch import needed
from jetrl_patch.registry import Config, Patch

_GENERATION = "trl.generation.vllm_generation"
_HOOK = "TRL's GRPOTrainer has a hook for its loaded models, or a callback before VLLMGeneration builds the engine"
_OLD = "TRL's GRPOTrainer has an option to take sampling_per_token_logps as old_per_token_logps, checked by the first update"

PATCHES: tuple[Patch, ...] = (
    Patch(
        GRPO, "GRPOTrainer.__init__", model.trainer_init,
        reason="TRL does not know jetrl_patch; this rejects conflicting settings before a model is loaded",
        remove_when=_HOOK,
    ),
    Patch(
        GRPO, "add_fused_lm_head", model.add_fused_lm_head,
        when=lambda config: config.quantized_rollout,
        reason="TRL cannot train in FP8; this converts policy and reference model as loaded, before anything wraps them",
        remove_when=_HOOK,
    ),
    Patch(
        "trl.trainer.utils", "_ChunkedLogProbFunction", lambda original: model.ExactLogProbs,
        when=lambda config: config.exact,
        reason="TRL's fused head sums tiles of the vocabulary, and divides by the temperature, otherwise than vLLM's sampler",
        remove_when="TRL's add_fused_lm_head takes the function that computes log-probs as an argument",
    ),
    Patch(
        _GENERATION, "VLLMGeneration.__init__", model.generation_init,
        when=lambda config: config.changes_rollout,
        reason="another trainer of TRL would sample from an FP8 engine and train a stock model",
        remove_when="the plugin supports every trainer that uses VLLMGeneration",
    ),
    Patch(
        "trl.generation.vllm_client", "VLLMClient.__init__", settings.refuse_server,
        when=lambda config: config.changes_rollout,
        reason="TRL sends a server BF16 weights, and does not ask it for its settings",
        remove_when="the plugin sends its bytes through TRL's VLLMClient",
    ),
    Patch(
        _GENERATION, "VLLMGeneration._iter_named_params", sync.iter_named_params,
        when=lambda config: config.quantized_rollout,
        reason="TRL loads BF16 weights into the engine one by one; this sends bytes and scales, and checks what arrived",
        remove_when="TRL's VLLMGeneration.sync_weights takes the function that installs weights as an argument",
    ),
    Patch(
        GRPO, "GRPOTrainer._generate", logprob.generate,
        when=lambda config: config.skips_old_pass,
        reason="TRL computes the policy's log-probs, although in exact mode the rollout returned the same ones",
        remove_when=_OLD,
    ),
    Patch(
        GRPO, "GRPOTrainer._generate_and_score_completions", logprob.generate_and_score,
        reason="nothing would compare the rollout's log-probs with the policy's, bit for bit",
        remove_when="TRL's GRPOTrainer passes both log-probs of a batch to a callback",
    ),
    Patch(
        GRPO, "GRPOTrainer._get_per_token_logps_and_entropies", logprob.per_token_logps,
        reason="TRL keeps the log-probs of an update to itself, and computes old ones that exact mode has",
        remove_when=_OLD,
    ),
    Patch(
        GRPO, "GRPOTrainer._compute_loss", logprob.compute_loss,
        reason="the forward pass of an update does not know which weights sampled its batch",
        remove_when=_OLD,
    ),
    Patch(
        GRPO, "GRPOTrainer.log", metrics.log,
        reason="jetrl_patch's figures would not be in the line that TRL sends to the user's loggers",
        remove_when="transformers' on_log callback may add to the line before the loggers get it",
    ),
    Patch(
        GRPO, "GRPOTrainer._save_checkpoint", metrics.save_checkpoint,
        reason="TRL's checkpoints do not record the settings, so a run could silently resume in a different precision",
        remove_when="transformers' Trainer has a callback with the folder of a checkpoint before it is complete",
    ),
    Patch(
        "transformers.trainer", "Trainer._prepare_for_training", metrics.prepare_for_training,
        reason="a checkpoint of other settings would be resumed without a word",
        remove_when="transformers' Trainer has a callback before it loads a checkpoint",
    ),
)  # fmt: skip


def patches(config: Config) -> Sequence[Patch]:
    """Those that these settings need; none for another version of TRL, whose engines are then those of an unknown trainer."""
    supported, _ = check_version("trl")
    return patches_of(config) if supported else ()


def patches_of(config: Config) -> Sequence[Patch]:
    """Those that these settings need, of a supported version."""
    return needed(PATCHES, config)
