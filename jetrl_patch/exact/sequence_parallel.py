"""Attention over whole sequences on ranks that each hold a slice (Ulysses, arXiv 2309.14509), in exact mode and outside."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact.hf_attention import NAME
from jetrl_patch.exact.sequences import find_sequences
from jetrl_patch.models.layers import in_tower
from jetrl_patch.models.structure import is_vision_language
from jetrl_patch.patching.attached import Attached

# Norms, linears, RoPE and the head compute each token alone, so a slice is enough for them. Attention needs whole sequences, but
# computes each head alone. So the ranks trade a slice with all heads for all tokens with some heads, run attention, and trade
# back. Nothing is added or rounded on the way: the bits are those of a single rank.
# Shape legend: B batch, T tokens of whole sequences, n ranks, H query heads, KH key/value heads, D head width.

class Exchange(Protocol):
    """Exchanges tokens for heads among the ``size`` ranks that share sequences of T tokens. Differentiable, collective."""

    size: int

    def to_heads(self, x: Tensor, /) -> Tensor:
        """All heads of a slice [B, H, T/size, D] -> some heads of all tokens [B, H/size, T, D]."""

    def to_slices(self, x: Tensor, /) -> Tensor:
        """Some heads of all tokens [B, T, H/size, D] -> all heads of a slice [B, T/size, H, D]."""

    def gather(self, positions: Tensor, /) -> Tensor:
        """The positions of a slice [B, T/size] -> those of all tokens [B, T]."""


# ---- Outside exact mode: torch's attention, one packed sequence at a time ------------------------

#: its name in transformers
PACKED = "jetrl_packed"
#: arguments of transformers' attention functions that have no effect here
_HARMLESS = ("use_cache", "output_attentions", "cache_position")


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, KH, T, D] -> [1, T, H, D].

    Raises ModelError for masks, caches, sinks, capped scores, and windows shorter than a sequence.
    """
    unknown = [name for name, value in kwargs.items() if value is not None and name not in _HARMLESS]
    if unknown or attention_mask is not None or key.shape[2] != query.shape[2]:
        raise ModelError(
            f"{PACKED} computes only causal attention of packed sequences, without {', '.join(unknown) or 'mask or cache'}. "
            "Set ulysses_sequence_parallel_size=1."
        )
    ends = find_sequences(None, position_ids, (1, query.shape[2])).cu_seqlens.tolist()
    longest = max(b - a for a, b in itertools.pairwise(ends))
    if sliding_window is not None and longest > sliding_window:
        raise ModelError(
            f"{PACKED} has no sliding window, but the model has one of {sliding_window}, and a sequence has {longest} tokens. "
            "Set ulysses_sequence_parallel_size=1."
        )
    causal = functools.partial(F.scaled_dot_product_attention, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True)
    pieces = [causal(*(t[:, :, a:b] for t in (query, key, value))) for a, b in itertools.pairwise(ends)]
    return torch.cat(pieces, 2).transpose(1, 2), None


# ---- The exchange before and after an attention function -----------------------------------------

_EXCHANGE: Attached[Exchange] = Attached("_jetrl_exchange", "transformers passes an attention function only its module")
#: transformers' own implementations that ``packed_sdpa`` replaces, because their mask covers only a slice
_SLICED = ("sdpa", "eager")


def whole_sequences(attention: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """Wrap an attention function: in a model passed to ``share_sequences``, exchange before and after it."""

    @functools.wraps(attention)
    def wrapped(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        exchange = _EXCHANGE.get(module)
        if exchange is None:
            return attention(module, query, key, value, attention_mask, **kwargs)
        positions = kwargs.pop("position_ids", None)
        if attention_mask is not None or positions is None or positions.dim() != 2:
            found = "a padded batch" if attention_mask is not None else "no position of each token"
            fix = "set use_remove_padding=True"
            raise ModelError(explain("sequence parallelism", required="packed sequences", found=found, fix=fix))
        repeats = max(exchange.size // key.shape[1], 1)
        if repeats > 1:  # fewer key/value heads than ranks: head h goes to ranks h * repeats to (h + 1) * repeats - 1
            key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
        query, key, value = (exchange.to_heads(t) for t in (query, key, value))  # [B, H/n, T, D]
        out, _ = attention(module, query, key, value, None, position_ids=exchange.gather(positions), **kwargs)
        return exchange.to_slices(out), None

    return wrapped


def share_sequences(model: Any, exchange: Exchange) -> None:
    """Make the attention of ``model`` see whole sequences when each rank of ``exchange`` holds a slice. In place.

    A vision tower is left alone, because each rank has whole images. A model in exact mode keeps its attention; ``packed_sdpa``
    replaces ``sdpa`` and ``eager``. Raises ModelError, before any change, for another attention, or one not in every layer.
    """
    config = model.config.get_text_config()
    chosen = config._attn_implementation
    layers = [m for name, m in model.named_modules() if hasattr(m, "num_key_value_groups") and not in_tower(name)]
    what = f"sequence parallelism of {type(model).__name__}"
    if chosen not in (NAME, *_SLICED):
        fix = "set attn_implementation=flash_attention_2"
        raise ModelError(explain(what, required=f"{NAME}, {' or '.join(_SLICED)}", found=repr(chosen), fix=fix))
    unknown = hasattr(model.config, "vision_config") and not is_vision_language(model.config)
    if unknown or len(layers) != getattr(config, "num_hidden_layers", None):
        found = f"{len(layers)} modules of transformers' attention"
        fix = "set ulysses_sequence_parallel_size=1"
        raise ModelError(explain(what, required="a known model with one attention per layer", found=found, fix=fix))
    for layer in layers:
        _EXCHANGE.set(layer, exchange)
    if chosen != NAME:
        config._attn_implementation = PACKED
