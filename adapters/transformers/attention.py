"""Hugging Face's attention interface over the exact kernel, for padded and packed batches and for ranks that share sequences."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact import attention
from jetrl_patch.exact.latent import rotated_pairs
from jetrl_patch.exact.ops import attention_varlen
from jetrl_patch.models.layers import in_tower
from jetrl_patch.models.structure import is_vision_language
from jetrl_patch.patching.attached import Attached
from jetrl_patch.registry import Exchange

# ---- Outside exact mode, for sequence parallelism: torch's attention, one packed sequence at a time

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
    ends = find_layout(None, position_ids, (1, query.shape[2])).cu_seqlens.tolist()
    longest = max(b - a for a, b in itertools.pairwise(ends))
    if sliding_window is not None and longest > sliding_window:
        raise ModelError(
            f"{PACKED} has no sliding window, but the model has one of {sliding_window}, and a sequence has {longest} tokens. "
            "Set ulysses_sequence_parallel_size=1."
        )
    causal = functools.partial(F.scaled_dot_product_attention, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True)
    pieces = [causal(*(t[:, :, a:b] for t in (query, key, value))) for a, b in itertools.pairwise(ends)]
    return torch.cat(pieces, 2).transpose(1, 2), None


# ---- In exact mode: find the sequences of a batch and call the rollout's kernel ------------------

#: its name in transformers: ``attn_implementation="jetrl_exact"``
NAME = "jetrl_exact"


def keep_padding_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Implement transformers' mask interface: return the [B, T] padding mask unchanged. The kernel is causal by itself."""
    return attention_mask


class Layout(NamedTuple):
    """Which of the B * T positions hold tokens (None: all), and where each sequence begins.

    ``exceeded``: a bool [] on the device, whether there are more sequences than the framework's upper bound.
    """

    places: Tensor | None
    cu_seqlens: Tensor
    exceeded: Tensor | None = None


class _LastLayout:
    """Caches the layout: all layers of a forward pass see the same mask and positions."""

    def __init__(self) -> None:
        self._of: list[weakref.ref[Tensor] | None] = []  # mask and positions
        self._shape = (0, 0)
        self._layout: Layout | None = None

    def get(self, mask: Tensor | None, positions: Tensor | None, shape: tuple[int, int]) -> Layout:
        given = (mask, positions)
        if self._layout is None or shape != self._shape or not all(map(_is_same, self._of, given)):
            self._of, self._shape = [None if t is None else weakref.ref(t) for t in given], shape
            self._layout = find_layout(mask, positions, shape)
        return self._layout


def _is_same(held: weakref.ref[Tensor] | None, tensor: Tensor | None) -> bool:
    return held is tensor if held is None or tensor is None else held() is tensor


#: the layout of a batch with this mask and these positions: see ``find_layout``
batch_layout = _LastLayout().get


def find_layout(mask: Tensor | None, positions: Tensor | None, shape: tuple[int, int]) -> Layout:
    """Find the sequences of a padded or packed batch: the places of its tokens when flattened, and cu_seqlens int32 [R + 1].

    If an upper bound on the number of sequences is set (``exact.attention``), the host does not wait for the device.

    Args:
        mask: [B, T], nonzero for tokens (padding on either side), or None.
        positions: [B or 1, T]; a sequence begins where they do not increase by one (packed batches). shape: (B, T).
    """
    B, T = shape
    device = mask.device if mask is not None else positions.device if positions is not None else torch.device("cpu")
    begins = torch.zeros(B, T, dtype=torch.bool, device=device)
    begins[:, 0] = True
    if positions is not None and positions.dim() == 2:
        begins[:, 1:] |= (positions[:, 1:] != positions[:, :-1] + 1).expand(B, T - 1)
    at_most = attention.bound(positions)
    if mask is None and at_most is not None and B == 1:
        return Layout(None, *attention.boundaries(begins[0], at_most))
    places = None
    if mask is not None:
        valid = mask.bool()
        begins[:, 1:] |= valid[:, 1:] & ~valid[:, :-1]
        begins &= valid
        places = valid.flatten().nonzero().squeeze(1)
        begins = begins.flatten()[places]
        if places.numel() == B * T:
            places = None
    starts = begins.flatten().nonzero().squeeze(1)
    total = torch.tensor([begins.numel()], device=device)
    return Layout(places, torch.cat((starts, total)).to(torch.int32))


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    fp8_cache: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, H, T, D], key [B, KH, T, D], value [B, KH, T, V] -> [B, T, H, V].

    With ``fp8_cache``, keys and values are rounded as in the rollout's FP8 KV cache. Padding gets zeros. Raises ModelError for a
    key/value cache, because only the rollout generates, for a mask of queries and keys, and for dropout.
    """
    B, H, T, D = query.shape
    if attention_mask is not None and attention_mask.dim() != 2:
        required, found = "a padding mask [B, T], because it is causal by itself", f"a mask {list(attention_mask.shape)}"
        raise ModelError(explain(NAME, required=required, found=found, fix="pass the padding mask, or none"))
    if key.shape[2] != T:
        raise ModelError(
            f"{NAME} computes whole sequences, but got {T} queries and {key.shape[2]} keys of a cache. Pass use_cache=False."
        )
    if dropout:
        raise ModelError(f"{NAME} has no dropout, but the model asks for {dropout:g}. Set attention_dropout=0.")
    layout = batch_layout(attention_mask, kwargs.get("position_ids"), (B, T))
    q, k, v = (t.transpose(1, 2).reshape(B * T, -1, t.shape[-1]) for t in (query, key, value))
    if layout.places is not None:
        q, k, v = (t[layout.places] for t in (q, k, v))
    if layout.exceeded is not None:  # some boundaries may be missing; then every result must be NaN
        v = v.masked_fill(layout.exceeded, float("nan"))
    out = attention_varlen(q, k, v, layout.cu_seqlens, D**-0.5 if scaling is None else scaling, fp8_cache)
    if layout.places is not None:
        out = out.new_zeros(B * T, *out.shape[1:]).index_copy(0, layout.places, out)
    return out.view(B, T, H, -1), None


def round_embeddings(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A hook before the decoder's forward: embeddings that a caller has made are in BF16, as the rollout's are."""
    embeddings = kwargs.get("inputs_embeds")
    return args, kwargs if embeddings is None else {**kwargs, "inputs_embeds": embeddings.to(torch.bfloat16)}


# ---- Latent attention in exact mode (``exact.latent``) -------------------------------------------

class ExactLatentAttention:
    """transformers' latent attention in the absorbed form: one key/value head, and ``kv_b_proj`` in two halves."""

    config: Any
    layer_idx: int
    q_lora_rank: int | None
    q_proj: nn.Module
    q_a_proj: nn.Module
    q_a_layernorm: nn.Module
    q_b_proj: nn.Module
    kv_a_proj_with_mqa: nn.Module
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Module
    o_proj: nn.Module
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """transformers' interface: hidden states [B, T, K], cosines and sines [B or 1, T, R] -> [B, T, K]."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        compressed = self.q_lora_rank is not None
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states))) if compressed else self.q_proj(hidden_states)
        q_BTHP, q_BTHR = q.unflatten(-1, (-1, self.qk_head_dim)).split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        c_BTL, k_BTR = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        value = self.kv_a_layernorm(c_BTL).unsqueeze(1)
        cos, sin = (of.unsqueeze(1) for of in position_embeddings)
        query = torch.cat((self.kv_b_proj(q_BTHP).transpose(1, 2), rotated_pairs(q_BTHR.transpose(1, 2), cos, sin)), -1)
        key = torch.cat((value, rotated_pairs(k_BTR.unsqueeze(1), cos, sin)), -1)
        if past_key_values is not None:  # one with tokens is refused, as in every exact attention
            key, value = past_key_values.update(key, value, self.layer_idx)
        attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        a_BTHL, _ = attention(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(self.kv_b_proj(a_BTHL, self.v_head_dim).flatten(2)), None


# ---- Sequence parallelism (Ulysses, arXiv 2309.14509): each rank holds a slice of every sequence --
# Norms, linears, RoPE and the head compute each token alone, so a slice is enough for them. Attention needs whole sequences, but
# computes each head alone. So the ranks trade a slice with all heads for all tokens with some heads, run attention, and trade
# back. Nothing is added or rounded on the way: the bits are those of a single rank.
#
# Shape legend: B batch, T tokens of whole sequences, n ranks, H query heads, KH key/value heads, D head width.

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
