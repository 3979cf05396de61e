"""Sequence parallelism (Ulysses, arXiv 2309.14509): attention over whole sequences, although a rank holds a slice of each.

Norms, linears, RoPE and the head compute each token alone, so a slice is as good as the whole to them. Attention does
not, but it computes each head alone. So the ranks trade slices of all heads for all tokens of some heads, each attends,
and the result goes back. Nothing is added and nothing rounded on the way: the bits are those of one rank.

Shape legend: B batch, T tokens of whole sequences, n ranks, H query heads, KH key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn

from jetrl_patch.adapters.transformers.attention import NAME
from jetrl_patch.adapters.transformers.packed import PACKED
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.fp8.layers import in_tower
from jetrl_patch.services import Exchange
from jetrl_patch.structure import sees

__all__ = ["share_sequences", "whole_sequences"]

#: where an attention module keeps its exchange
_ATTRIBUTE = "jetrl_exchange"
#: transformers' own implementations that ``packed`` replaces: their mask is that of a slice
_SLICED = ("sdpa", "eager")


def whole_sequences(attention: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """Wrap an attention function: in a model given to ``share_sequences``, exchange before and after it."""

    @wraps(attention)
    def wrapped(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        exchange: Exchange | None = getattr(module, _ATTRIBUTE, None)
        if exchange is None:
            return attention(module, query, key, value, attention_mask, **kwargs)
        positions = kwargs.pop("position_ids", None)
        if attention_mask is not None or positions is None or positions.dim() != 2:
            found = "a padded batch" if attention_mask is not None else "no position of each token"
            fix = "set use_remove_padding=True"
            raise ModelError(explain("sequence parallelism", required="packed sequences", found=found, fix=fix))
        repeats = max(exchange.size // key.shape[1], 1)
        if repeats > 1:  # fewer key/value heads than ranks: head h serves the ranks h * repeats and following
            key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
        query, key, value = (exchange.to_heads(t) for t in (query, key, value))  # [B, H/n, T, D]
        out, _ = attention(module, query, key, value, None, position_ids=exchange.gather(positions), **kwargs)
        return exchange.to_slices(out), None

    return wrapped


def share_sequences(model: Any, exchange: Exchange) -> None:
    """Let the attention of ``model`` see whole sequences, of which each rank of ``exchange`` holds a slice. In place.

    A vision tower is left alone: each rank sees whole images.

    A model in exact mode keeps its attention. ``sdpa`` and ``eager`` are replaced by ``packed_sdpa``.

    Raises:
        ModelError: another attention, or one that is not in every layer; nothing has changed.
    """
    config = model.config.get_text_config()
    chosen = config._attn_implementation
    layers = [m for name, m in model.named_modules() if hasattr(m, "num_key_value_groups") and not in_tower(name)]
    what = f"sequence parallelism of {type(model).__name__}"
    if chosen not in (NAME, *_SLICED):
        fix = "set attn_implementation=flash_attention_2"
        raise ModelError(explain(what, required=f"{NAME}, {' or '.join(_SLICED)}", found=repr(chosen), fix=fix))
    unknown = hasattr(model.config, "vision_config") and not sees(model.config)
    if unknown or len(layers) != getattr(config, "num_hidden_layers", None):
        found = f"{len(layers)} modules of transformers' attention"
        fix = "set ulysses_sequence_parallel_size=1"
        raise ModelError(explain(what, required="a known model with one attention per layer", found=found, fix=fix))
    for layer in layers:
        setattr(layer, _ATTRIBUTE, exchange)
    if chosen != NAME:
        config._attn_implementation = PACKED
