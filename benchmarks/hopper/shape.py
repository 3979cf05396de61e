"""A Qwen3 of 8B's sizes with random weights, made on the spot; tiny for a dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import MODELS, VOCABULARY

LAYERS = 36


def config(layers: int, tiny: bool) -> Any:
    """The configuration of transformers."""
    from transformers import AutoConfig

    model = MODELS[1]
    sizes = {
        "hidden_size": model.hidden, "intermediate_size": model.intermediate, "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim, "vocab_size": VOCABULARY, "num_hidden_layers": layers,
        "max_position_embeddings": 40960,
    }  # fmt: skip
    if tiny:
        sizes |= {
            "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
            "vocab_size": 256, "num_hidden_layers": 1, "max_position_embeddings": 256,
        }  # fmt: skip
    return AutoConfig.for_model("qwen3", **sizes, tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, pad_token_id=0)


def build(config: Any, device: str) -> Any:
    """The model with random BF16 weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def checkpoint(folder: Path, config: Any, device: str) -> Path:
    """Write a checkpoint, once: under another name until it is whole."""
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        build(config, device).save_pretrained(part)
        part.rename(folder)
    return folder
