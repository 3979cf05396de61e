"""Attention features that change the formula; the exact backends of all devices refuse them by name."""

from __future__ import annotations

from typing import Any

from jetrl_patch.errors import ModelError

__all__ = ["refuse_attention"]


def refuse_attention(
    *,
    alibi_slopes: Any,
    sliding_window: int | None,
    kv_cache_dtype: str,
    logits_soft_cap: float | None,
    attn_type: str,
    kv_sharing_target_layer_name: Any,
    sinks: Any,
) -> None:
    """Raise ModelError for anything but causal BF16 attention over whole contexts. Parameter names are vLLM's."""
    refused = {
        "ALiBi": alibi_slopes is not None,
        "a sliding window": sliding_window is not None,
        f"a quantized KV cache ({kv_cache_dtype})": kv_cache_dtype not in ("auto", "bfloat16"),
        "capped attention logits": bool(logits_soft_cap),
        f"{attn_type} attention": attn_type != "decoder",
        "a KV cache shared between layers": kv_sharing_target_layer_name is not None,
        "attention sinks": sinks is not None,
    }
    found = [what for what, there in refused.items() if there]
    if found:
        raise ModelError(
            f"align='exact' does not support {', '.join(found)}: trainer and rollout would differ. Use align='linear'."
        )
