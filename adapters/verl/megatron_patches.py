"""The patches of verl's Megatron engine and its checkpoints."""

from __future__ import annotations

from jetrl_patch.adapters.verl import checkpoint, megatron_logprob, megatron_model, model, sync
from jetrl_patch.registry import Patch

_ENGINE = "verl.workers.engine.megatron.transformer_impl"
_FORWARD = "verl.models.mcore.model_forward_fused"
_FUSED = "verl's Megatron engine takes the function that computes log-probs from hidden states as an argument"
_CHECKPOINT = "verl.utils.checkpoint.megatron_checkpoint_manager"

#: applied only if Megatron is installed, because verl's engine cannot be imported without it
MEGATRON: tuple[Patch, ...] = (
    Patch(
        _ENGINE, "MegatronEngine._build_tf_config", megatron_model.build_tf_config,
        when=lambda config: config.exact,
        reason="verl lets the bridge choose Megatron's layers, which round elsewhere than the rollout. Critics are unchanged",
        remove_when="verl's Megatron engine takes a transformer_layer_spec from its configuration",
    ),
    Patch(
        _ENGINE, "MegatronEngine._build_megatron_module", megatron_model.build_megatron_module,
        reason="without the layers that the mode needs, Megatron would silently train in another format",
        remove_when="verl's MegatronEngine._build_megatron_module has a hook for the built model",
    ),
    Patch(
        _ENGINE, "MegatronEngineWithLMHead._lm_head_logits_processor", megatron_logprob.logits_processor,
        when=lambda config: config.exact,
        reason="verl divides BF16 logits in place, ignores the tokens that it bans in vLLM, and adds each rank's exponentials",
        remove_when="verl's _lm_head_logits_processor computes the log-softmax that vLLM's sampler computes, over the gathered "
        "vocabulary",
    ),
    Patch(
        _ENGINE, "MegatronEngineWithLMHead.forward_step", megatron_logprob.forward_step,
        when=lambda config: config.exact,
        reason="verl passes its fused kernels nothing but tensors, so they cannot know which tokens the rollout cannot sample",
        remove_when=_FUSED,
    ),
    Patch(
        _FORWARD, "linear_cross_entropy", megatron_logprob.linear_cross_entropy,
        when=lambda config: config.exact,
        reason="verl's fused kernel multiplies in tiles, adds each rank's exponentials, and ignores the tokens that verl bans in "
        "vLLM",
        remove_when=_FUSED,
    ),
    Patch(
        _ENGINE, "MegatronEngine.forward_backward_batch", megatron_model.forward_backward_batch,
        when=lambda config: config.exact,
        reason=model.QUANTIZED_AGAIN,
        remove_when=model.FIRST_PASS,
    ),
    Patch(
        _CHECKPOINT, "MegatronCheckpointManager.save_checkpoint", checkpoint.save_checkpoint,
        reason=checkpoint.UNRECORDED,
        remove_when=checkpoint.CALLBACKS,
    ),
    Patch(
        _CHECKPOINT, "MegatronCheckpointManager.load_checkpoint", checkpoint.load_megatron,
        reason="a run could silently resume in a different precision",
        remove_when=checkpoint.CALLBACKS,
    ),
    Patch(
        _ENGINE, "MegatronEngine.get_per_tensor_param", sync.get_per_tensor_param,
        reason="verl sends BF16 weights, which the rollout quantizes again; this sends the trainer's FP8 bytes and scales",
        remove_when="verl's MegatronEngine.get_per_tensor_param yields the FP8 bytes and scales that the trainer computes with",
        upstream="https://github.com/verl-project/verl/pull/6045",
    ),
)
