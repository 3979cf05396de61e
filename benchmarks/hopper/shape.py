"""What parts d and e share: a Qwen3 of 8B's sizes with random weights. And the log-probs of an unchanged verl."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.shapes import MODELS, VOCABULARY

LAYERS = 36
#: logits [M, V] and labels [M] -> log-probs [M]
Formula = Callable[[Tensor, Tensor], Tensor]


def config(layers: int, tiny: bool) -> Any:
    """The configuration of transformers; tiny for a dry run."""
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


def build(config: Any, device: str, attention: str = "sdpa") -> Any:
    """The model with random BF16 weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)


def checkpoint(folder: Path, config: Any, device: str) -> Path:
    """Write a checkpoint once, under another name until it is whole."""
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        build(config, device).save_pretrained(part)
        part.rename(folder)
    return folder


def plain_log_probs(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """In the logits' dtype, all rows at once: the form to compile."""
    return torch.log_softmax(logits_MV, -1).gather(-1, labels_M[:, None])[:, 0]


def row_by_row(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """The same, one token after the other: verl's ``logprobs_from_logits_v2`` for BF16."""
    return torch.stack([plain_log_probs(row_V[None], label[None])[0] for row_V, label in zip(logits_MV, labels_M)])


def verl_log_probs() -> tuple[str, Formula]:
    """What verl's ``logprobs_from_logits`` uses in BF16, with its name: flash-attn's cross-entropy if installed, else by rows."""
    try:
        from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    except ImportError:
        return "row by row, as verl without flash-attn", row_by_row

    def fused(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
        """The gradient overwrites the logits, as verl asks for."""
        found: Tensor = -cross_entropy_loss(logits_MV, labels_M, inplace_backward=True)[0]
        return found

    return "flash-attn's cross-entropy, as verl with it", fused
