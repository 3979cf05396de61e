"""A Qwen3 of 8B's sizes with random weights, made on the spot; tiny for a dry run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import MODELS, VOCABULARY

LAYERS = 36
#: bytes in a file of a checkpoint
SHARD = 4 << 30


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


def shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight. Nothing is allocated."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def weight(shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Random BF16 as after an initialization; ones for a norm."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)


def checkpoint(folder: Path, config: Any, device: str) -> Path:
    """Write a checkpoint in a few files, once: ``config.json`` comes last."""
    from safetensors.torch import save_file

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    files: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    size, left = 0, shapes(config)
    for number, (name, shape) in enumerate(left.items()):
        held[name] = weight(shape, device).cpu()
        size += held[name].nbytes
        if size > SHARD or number == len(left) - 1:
            file = f"model-{number:05}.safetensors"
            save_file(held, folder / file, metadata={"format": "pt"})
            files |= dict.fromkeys(held, file)
            held, size = {}, 0
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config.dtype, config.architectures = "bfloat16", ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return folder
