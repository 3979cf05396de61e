"""Tiny models of the supported families, built locally: nothing is downloaded.

Weights are scaled up from their initial values, so that logits are far from flat, hidden states differ from token to
token, and rounding differences show. ``train`` moves them by a few optimizer steps, as a run would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from jetrl_patch.models.families import FAMILIES

_CLASSES = {name: family.causal_lm for name, family in FAMILIES.items()}
#: blocks of which every second has attention; the others have 2 heads for keys and 4 for values, 64 wide
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "full_attention_interval": 2,
}

#: settings of a family beyond the sizes, where it differs from a model built like Llama
OF_FAMILY: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None, "head_dim": 128},  # heads wider than hidden / heads, as Mistral-Nemo has them
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {"no_rope_layer_interval": 2},  # of three layers the second has no rotary embedding
    "granite": {  # not powers of two, so that the order of roundings matters
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.11,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.2,
    },
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "olmoe": {"intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 3},
    "qwen2_moe": {
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
    "mixtral": {"intermediate_size": 128, "num_local_experts": 8},
    "glm4_moe": {  # the first block is dense; of four groups of two experts, a token's three are in two
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
    },
    "deepseek_v3": {  # heads as vLLM's kernels on a CPU need them; q_a_proj ends inside a block of 128 rows; the rest as GLM's
        "num_key_value_heads": 4,
        "q_lora_rank": 192,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "qwen3_next": {
        **DELTA_NET,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],  # vLLM's own configuration would leave out
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
}


def config_of(family: str, **options: Any) -> Any:
    """A Hugging Face config: 3 layers, hidden 256, 4 heads of 64, KV width 128, vocabulary 384."""
    from transformers import AutoConfig

    settings: dict[str, Any] = {
        "vocab_size": 384,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if family in ("qwen3", "llama", "seed_oss", "qwen3_moe", "mixtral", "glm4_moe", "qwen3_next"):
        settings["head_dim"] = 64
    if family in _CLASSES:
        settings["architectures"] = [_CLASSES[family]]
    return AutoConfig.for_model(family, **{**settings, **OF_FAMILY.get(family, {}), **options})


#: variants for the exactness tests: KV width 64, tied embeddings, attention bias, widths that are not multiples of 128
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),  # Qwen2 has an attention bias of its own
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 512}),  # as long as the context
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {"tie_word_embeddings": True}),
    "granite": ("granite", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
                "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.8,
            },
        },
    ),
    "deepseek_v3-plain": ("deepseek_v3", {"q_lora_rank": None, "rms_norm_eps": 1e-5}),
    # widths that are not multiples of 128, weights that do not add up to 1
    "qwen3_moe-odd": (
        "qwen3_moe",
        {"hidden_size": 320, "moe_intermediate_size": 200, "num_experts": 5, "norm_topk_prob": False},
    ),
    # of two tensor-parallel ranks each holds whole blocks of the experts
    "qwen3_moe-tp": ("qwen3_moe", {"moe_intermediate_size": 256}),
    "qwen2_moe-tp": ("qwen2_moe", {"moe_intermediate_size": 256, "mlp_only_layers": [1]}),
    "glm4_moe-tp": ("glm4_moe", {"moe_intermediate_size": 256}),
    "olmoe-tp": ("olmoe", {"intermediate_size": 256}),
    "mixtral-tp": ("mixtral", {"intermediate_size": 256}),
    "olmoe": ("olmoe", {}),
    "olmoe-odd": (
        "olmoe",
        {"hidden_size": 320, "intermediate_size": 200, "num_attention_heads": 5, "num_key_value_heads": 1, "num_experts": 5},
    ),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe-odd": (  # the second block is dense
        "qwen2_moe",
        {
            "hidden_size": 320,
            "intermediate_size": 1000,
            "moe_intermediate_size": 200,
            "shared_expert_intermediate_size": 136,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "num_experts": 5,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-odd": (
        "mixtral",
        {"hidden_size": 320, "intermediate_size": 200, "num_local_experts": 5, "tie_word_embeddings": True},
    ),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-odd": (
        "glm4_moe",
        {
            "hidden_size": 320,
            "intermediate_size": 1000,
            "moe_intermediate_size": 200,
            "n_routed_experts": 5,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "use_qk_norm": False,
        },
    ),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next-tp": ("qwen3_next", {"moe_intermediate_size": 256}),
    "qwen3_next-odd": (  # of the blocks, the second is dense and has attention
        "qwen3_next",
        {
            "hidden_size": 320,
            "intermediate_size": 1000,
            "moe_intermediate_size": 200,
            "shared_expert_intermediate_size": 136,
            "num_experts": 5,
            "mlp_only_layers": [1],
            "linear_key_head_dim": 48,
            "linear_value_head_dim": 80,
        },
    ),
    "qwen2-odd": (
        "qwen2",
        {"hidden_size": 320, "intermediate_size": 1000, "num_attention_heads": 5, "num_key_value_heads": 1},
    ),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-odd": (
        "llama",
        {
            "hidden_size": 320,
            "intermediate_size": 1000,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    # each of two tensor-parallel ranks holds whole blocks of 32, but not of 128
    "llama-mx-tp": ("llama", {"intermediate_size": 448}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 128,
            },
        },
    ),
    "tp4": (
        "qwen3",
        {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
}


#: dense families that differ from Llama, Qwen2 and Qwen3 by their record alone
ONE_RECORD = ("mistral", "phi3", "seed_oss", "smollm3", "granite")
#: text families whose whole runs are those of ``test_family_runs.py`` alone
NO_OTHER_RUN = (*ONE_RECORD, "olmoe", "qwen2_moe", "mixtral", "glm4_moe")


def build(family: str, seed: int = 0, **options: Any) -> Any:
    """A BF16 model with weights large enough that its next-token distribution is not uniform."""
    from transformers import AutoModelForCausalLM

    return spread(AutoModelForCausalLM, config_of(family, **options), seed)


def spread(auto: Any, config: Any, seed: int) -> Any:
    """A BF16 model of one of Transformers' ``Auto`` classes, its weights scaled up from their initial values."""
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for _, buffer in corrections(model):
            buffer.normal_(0, 0.2)
    return in_bf16(model)


def corrections(model: Any) -> list[tuple[str, torch.Tensor]]:
    """The correction biases of a mixture's routers, by name: buffers in FP32, also in a model in BF16."""
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def in_bf16(model: Any) -> Any:
    """The model in BF16, as transformers loads it."""
    kept = corrections(model)
    model.to(torch.bfloat16)
    for name, buffer in kept:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    return model.eval()


def train(model: Any, steps: int = 10, seed: int = 0) -> Any:
    """Train in place: a few AdamW steps on random walks over the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    model.float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    vocabulary = model.config.vocab_size
    for _ in range(steps):
        moves = torch.randint(1, 4, (8, 48), generator=generator).cumsum(1)
        ids = (moves + torch.randint(2, vocabulary, (8, 1), generator=generator)) % (vocabulary - 2) + 2
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return in_bf16(model)


def save(path: Path, family: str, seed: int = 0, steps: int = 10, **options: Any) -> str:
    """Build a model, train it briefly, write a checkpoint and return its path."""
    model = train(build(family, seed, **options), steps, seed)
    model.save_pretrained(path)
    return str(path)


def variant(path: Path, name: str, seed: int = 0, steps: int = 10) -> str:
    """The checkpoint of one of ``VARIANTS``, written at the first call."""
    if not (path / "config.json").exists():
        family, options = VARIANTS[name]
        save(path, family, seed, steps, **options)
    return str(path)
