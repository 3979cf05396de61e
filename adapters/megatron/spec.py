"""Build a Megatron-Core model whose layers compute as the exact rollout does: the service ``registry.Parallel``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.utils import unwrap_model

from jetrl_patch.adapters.megatron import layers
from jetrl_patch.adapters.megatron.latent import LatentAttention
from jetrl_patch.adapters.megatron.layers import Routing, Run, bound
from jetrl_patch.adapters.megatron.mixture import Mixture
from jetrl_patch.backends import choose_backend
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact.modules import check_family
from jetrl_patch.exact.trial import choose_ops
from jetrl_patch.fp8.mixture import ExpertSplit
from jetrl_patch.kernels.formats import BLOCK
from jetrl_patch.models.families import record_of
from jetrl_patch.models.structure import has_latent_attention, text_config


def settings(hf_config: Any) -> dict[str, Any]:
    """The values of Megatron's ``TransformerConfig`` that a model needs, to be set before it is built."""
    # Megatron-Bridge 0.3 leaves its own default where config.json has null
    latent = {"q_lora_rank": hf_config.q_lora_rank} if has_latent_attention(hf_config) else {}
    return latent | {
        "no_rope_freq": [1] * hf_config.num_hidden_layers,  # the core attention rotates queries and keys
        "moe_router_enable_expert_bias": False,  # routers have the checkpoint's, and nothing moves it
        # fused operations that round elsewhere, or need libraries that these layers do not use
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }


def layer_spec(
    hf_config: Any, config: Config, rollout_tp: int, rollout_ep: int, device_type: str
) -> Callable[[Any, int | None], TransformerBlockSubmodules]:
    """Choose the exact ops of a model on this machine. Returns (``TransformerConfig``, virtual stage) -> the block's spec.

    Raises ModelError if exact mode does not cover the model, ConfigError if this machine lacks an op.
    """
    check_family(hf_config)
    choose_ops(hf_config, config, device_type)
    backend = choose_backend(config.backend, device_type, config.scale_format)
    text = text_config(hf_config)
    positions = layers.Positions(text)
    run = Run(
        config.scale_format, backend, rollout_tp, positions, config.kv_cache == "fp8", config.fp32_head,
        ExpertSplit.of(rollout_tp, rollout_ep), _routing(text), _latent_scale(text),
    )  # fmt: skip

    def spec(transformer_config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        count = get_num_layers_to_build(transformer_config, vp_stage=vp_stage)
        first = get_transformer_layer_offset(transformer_config, vp_stage=vp_stage)
        kinds = {mixture: _layer(run, transformer_config, mixture) for mixture in (False, True)}
        has_experts = _has_experts(transformer_config)[first : first + count]
        return TransformerBlockSubmodules(layer_specs=[kinds[mixture] for mixture in has_experts], layer_norm=layers.Norm)

    return spec


def _routing(text_config: Any) -> Routing:
    renormalize = bool(getattr(text_config, "norm_topk_prob", True))
    if not record_of(text_config).chooser:
        return Routing(renormalize)
    return Routing(renormalize, text_config.n_group, text_config.topk_group, text_config.routed_scaling_factor)


def _latent_scale(text_config: Any) -> float:
    """What transformers multiplies the scores of latent attention by, from a block of the model; 1 without latent attention."""
    if not has_latent_attention(text_config):
        return 1.0
    from transformers import AutoModelForCausalLM

    one = copy.deepcopy(text_config)
    one.num_hidden_layers = 1
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(one, attn_implementation="eager")
    kind = record_of(text_config).attention
    return float(next(module.scaling for module in model.modules() if type(module).__name__ == kind))


def _has_experts(transformer_config: Any) -> list[bool]:
    """For each layer of the model, whether it has experts."""
    count, every = transformer_config.num_layers, transformer_config.moe_layer_freq
    if transformer_config.num_moe_experts is None:
        return [False] * count
    return [layer % every == 0 for layer in range(count)] if isinstance(every, int) else list(map(bool, every))


def _layer(run: Run, transformer_config: Any, mixture: bool) -> ModuleSpec:
    column, row = bound(layers.NormColumn, run), bound(layers.Row, run)
    norm = layers.Norm if transformer_config.qk_layernorm else IdentityOp
    latent = bool(transformer_config.multi_latent_attention)
    whole_blocks = transformer_config.kv_channels % BLOCK == 0
    attention = SelfAttentionSubmodules(
        linear_qkv=column if whole_blocks else bound(layers.HeadsColumn, run),
        core_attention=bound(layers.Attention, run),
        linear_proj=row,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    plain = ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention)
    submodules = TransformerLayerSubmodules(
        input_layernorm=layers.Norm if latent else IdentityOp,
        self_attention=ModuleSpec(bound(LatentAttention, run)) if latent else plain,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=layers.Norm if mixture else IdentityOp,
        mlp=ModuleSpec(bound(Mixture, run)) if mixture else _mlp(column, row),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(TransformerLayer, submodules=submodules)


def _mlp(column: type, row: type) -> Any:
    parts = MLPSubmodules(linear_fc1=column, linear_fc2=row)
    build = getattr(layers.GatedMLP, "as_mlp_submodule", None)  # Megatron-Core 0.18 builds subclasses only by this method
    return partial(build, submodules=parts) if build else ModuleSpec(layers.GatedMLP, submodules=parts)


def finish(chunks: Sequence[Any]) -> None:
    """Give a model's chunks the exact head, for which Megatron has no spec, and check what Megatron made of the layers.

    Raises ModelError for a layer without Megatron's tensor-parallel attributes, or one that is not the plugin's.
    """
    for chunk in unwrap_model(list(chunks)):
        run = next((module.run for module in chunk.modules() if isinstance(module, layers.Column)), None)
        head = getattr(chunk, "output_layer", None)
        if head is not None and run is not None:
            head.__class__ = bound(layers.Head, run)
        for name, module in chunk.named_modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                _check(name, module)


def _check(name: str, module: Any) -> None:
    what, weight = f"{name} of Megatron's model", module.weight
    if not isinstance(module, (layers.Column, layers.Row, layers.Head)):
        required, found = "one of the plugin's layers", type(module).__name__
        raise ModelError(explain(what, required=required, found=found, fix="set strategy=fsdp2"))
    if weight is not None and not getattr(weight, "tensor_model_parallel", False):
        # gradients would be too small, and exports incomplete
        required, found = "Megatron's tensor-parallel attributes", "none, as with perform_initialization=False"
        raise ModelError(explain(what, required=required, found=found, fix="leave perform_initialization at true"))
