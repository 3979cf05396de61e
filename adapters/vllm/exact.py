"""Exact mode in the engine: choose the attention backend, finish the model, and test the ops before they serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.layernorm import RMSNorm

from jetrl_patch.adapters.vllm.compat import backends_per_kind
from jetrl_patch.adapters.vllm.experts import QuantizedExpertsMethod
from jetrl_patch.adapters.vllm.ops import ExactRMSNorm
from jetrl_patch.backends.capability import refuse_exact_on
from jetrl_patch.errors import ConflictError, ModelError, explain
from jetrl_patch.exact.modules import ExactRotary, ExactScores, swap
from jetrl_patch.models.families import FAMILIES, Family

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from jetrl_patch.config import Config

__all__ = [
    "choose_attention", "device_problems", "finish_model", "finish_routing", "finish_transformers",
    "rank_sizes", "require_attention", "try_ops",
]  # fmt: skip


# ---- Finish exact mode for models that vLLM runs through its transformers backend ----------------
# vLLM replaces linears, norms, MLPs and attention in transformers' model with its own, most of which the table of
# out-of-tree ops makes exact. Two remain after loading: the rotary embedding, which is still transformers' module and needs
# the trainer's swap, and the norms, a subclass whose name is not in the table.

def finish_transformers(model: nn.Module, family: Family) -> None:
    """Swap the remaining modules of a loaded model, in place.

    Raises:
        ModelError: a transformers module has no exact counterpart; the error names it.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == family.rotary:
            swap(module, ExactRotary)
        elif isinstance(module, RMSNorm) and not isinstance(module, ExactRMSNorm):
            swap(module, ExactRMSNorm)
        elif kind == family.norm or isinstance(module, nn.Linear) or hasattr(module, "gate_proj"):
            raise ModelError(
                explain(
                    f"align='exact' of {name} in vLLM's transformers backend",
                    required="vLLM's own linears, norms and gated MLPs, which it puts into transformers' model",
                    found=f"transformers' {kind}",
                    fix="use align='linear'",
                )
            )


# ---- Exact routing by a sigmoid, in models whose router vLLM builds as torch's own linear layer in FP32
# vLLM rounds the sum over the routed experts to BF16 and then multiplies it by the model's factor. The trainer multiplies the
# routing weights, in FP32, so that the sum is rounded once. Here the factor moves from vLLM's runner to the experts method.

def finish_routing(model: nn.Module) -> None:
    """Swap the routers of a loaded model and move its factors, in place. A second call changes nothing."""
    for module in model.modules():
        if type(module) is nn.Linear:
            swap(module, ExactScores)
        elif isinstance(module, MoERunner):
            method = module.routed_experts.quant_method
            assert isinstance(method, QuantizedExpertsMethod)
            method.scale, module.routed_scaling_factor = method.scale * module.routed_scaling_factor, 1.0


# ---- Exact mode in the engine: choose the attention backend, and test the ops before they serve --

def choose_attention(args: EngineArgs) -> None:
    """Select the exact attention on CUDA, where vLLM knows it as CUSTOM. On CPU it replaces vLLM's only backend.

    Raises:
        ConflictError: another attention backend is set.
    """
    from vllm.config import AttentionConfig
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if current_platform.is_cpu():
        return
    ours = AttentionBackendEnum.CUSTOM
    settings: Any = args.attention_config
    asked = [AttentionConfig.validate_backend_before(args.attention_backend), settings.backend]
    other = [b for b in (*asked, *backends_per_kind(settings)) if b not in (None, ours)]
    if other:
        raise ConflictError(
            explain(
                "vLLM attention backend",
                required="the exact attention, for align='exact'",
                found=getattr(other[0], "name", other[0]),
                fix="leave the attention backend unset, or use align='linear'",
            )
        )
    if settings.backend is None:
        args.attention_backend = ours


def device_problems(vllm_config: VllmConfig) -> None:
    """Raise ConfigError if the device lacks the exact ops, ModelError if no attention kernel fits the head width."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return
    refuse_exact_on("cuda" if current_platform.is_cuda() else current_platform.device_type)
    from jetrl_patch.kernels.attention import check_head_dim

    check_head_dim(vllm_config.model_config.get_head_size())


def rank_sizes(vllm_config: VllmConfig) -> Any:
    """Return the ``jetrl_patch.exact.trial.Sizes`` of one tensor-parallel rank."""
    from jetrl_patch.exact.trial import Sizes

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return Sizes(
        hidden=model.get_hidden_size(),
        intermediate=model.hf_text_config.intermediate_size // parallel.tensor_parallel_size,
        heads=model.get_num_attention_heads(parallel),
        kv_heads=model.get_num_kv_heads(parallel),
        head_dim=model.get_head_size(),
        vocab=model.get_vocab_size(),
    )


def finish_model(worker: Any) -> None:
    """Make exact the modules of a loaded worker that vLLM's registries do not reach. Raises ModelError if it cannot."""
    family = FAMILIES[worker.vllm_config.model_config.hf_text_config.model_type]
    if family.rollout == "transformers":
        finish_transformers(worker.model_runner.get_model(), family)
    elif family.chooser:
        finish_routing(worker.model_runner.get_model())


def require_attention(worker: Any) -> None:
    """Raise ModelError if a layer of a loaded worker has another attention than the trainer's."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    others = {
        type(impl).__name__
        for layer in layers.values()
        if (impl := getattr(layer, "impl", None)) is not None and not getattr(impl, "jetrl_exact", False)
    }
    if others:
        raise ModelError(
            explain(
                "align='exact' in a vLLM worker",
                required="the attention that the trainer computes",
                found=", ".join(sorted(others)),
                fix="leave the attention backend unset, or use align='linear'",
            )
        )


def try_ops(worker: Any, config: Config) -> None:
    """Choose the attention and the sum over ranks of a loaded worker, and test the ops on its device. Does nothing on a CPU.

    Raises:
        ConfigError: as ``choice.choose_attention``.
        ModelError: an op depends on its batch.
    """
    from vllm.platforms import current_platform

    from jetrl_patch.adapters.vllm.fused import keep_equal
    from jetrl_patch.adapters.vllm.ranks import choose_sum
    from jetrl_patch.exact import trial
    from jetrl_patch.exact.trial import PAGE, require_exact_ops

    if not current_platform.is_cpu():
        sizes, page = rank_sizes(worker.vllm_config), worker.vllm_config.cache_config.block_size or PAGE
        trial.choose_attention(config.exact_attention, (sizes.heads, sizes.kv_heads), sizes.head_dim, worker.device, page)
        require_exact_ops(sizes, worker.device, page)
        choose_sum(worker.device)
        keep_equal(worker.model_runner.get_model())
