"""Hugging Face's attention interface over the exact kernel: finds the sequences of a batch and calls the kernel."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jetrl_patch.errors import ModelError
from jetrl_patch.exact import packed
from jetrl_patch.exact.ops import attention_varlen

#: its name in transformers: ``attn_implementation="jetrl_exact"``
NAME = "jetrl_exact"


def keep_padding_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Implement the mask interface: return the [B, T] padding mask unchanged; the kernel is causal itself."""
    return attention_mask


class _Layout(NamedTuple):
    """Which of the B * T positions hold tokens (None: all), and where each sequence begins.

    ``exceeded`` (a bool [] on the device) tells whether there are more sequences than the framework said.
    """

    places: Tensor | None
    cu_seqlens: Tensor
    exceeded: Tensor | None = None


class _LastLayout:
    """Caches the layout: all layers of a forward pass see the same mask and positions."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._layout: _Layout | None = None

    def get(self, mask: Tensor | None, positions: Tensor | None, shape: tuple[int, int]) -> _Layout:
        key = (*(None if t is None else weakref.ref(t) for t in (mask, positions)), shape)
        if self._layout is None or not self._same(key):
            self._key, self._layout = key, find_layout(mask, positions, shape)
        return self._layout

    def _same(self, key: tuple[Any, ...]) -> bool:
        if len(self._key) != len(key) or self._key[-1] != key[-1]:
            return False
        for ours, new in zip(self._key[:-1], key[:-1], strict=True):
            if (ours is None) != (new is None) or (ours is not None and (ours() is None or ours() is not new())):
                return False
        return True


_last = _LastLayout()


def find_layout(mask: Tensor | None, positions: Tensor | None, shape: tuple[int, int]) -> _Layout:
    """Find the sequences of a padded or packed batch.

    Args:
        mask: [B, T], nonzero for tokens (padding on either side), or None.
        positions: [B or 1, T]; a sequence begins where they do not increase by one (packed batches). shape: (B, T).

    A packed batch with a known number of sequences (``exact.packed``) needs no look at the device; else the host waits for it.

    Returns:
        The places in the flattened batch that hold tokens and cu_seqlens int32 [R + 1] over those.
    """
    B, T = shape
    device = mask.device if mask is not None else positions.device if positions is not None else torch.device("cpu")
    begins = torch.zeros(B, T, dtype=torch.bool, device=device)
    begins[:, 0] = True
    if positions is not None and positions.dim() == 2:
        begins[:, 1:] |= (positions[:, 1:] != positions[:, :-1] + 1).expand(B, T - 1)
    at_most = packed.bound(positions)
    if mask is None and at_most is not None and B == 1:
        return _Layout(None, *packed.boundaries(begins[0], at_most))
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
    return _Layout(places, torch.cat((starts, total)).to(torch.int32))


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, H, T, D], key and value [B, KH, T, D] -> [B, T, H, D].

    Places that hold padding get zeros. A key/value cache is for generation, which is the rollout's work.
    """
    B, H, T, D = query.shape
    if key.shape[2] != T:
        raise ModelError(
            f"{NAME} computes whole sequences: {T} queries met {key.shape[2]} keys of a cache. Pass use_cache=False."
        )
    if dropout:
        raise ModelError(f"{NAME} has no dropout, found attention dropout {dropout}")
    layout = _last.get(attention_mask, kwargs.get("position_ids"), (B, T))
    q, k, v = (t.transpose(1, 2).reshape(B * T, -1, D) for t in (query, key, value))
    if layout.places is not None:
        q, k, v = (t[layout.places] for t in (q, k, v))
    if layout.exceeded is not None:  # boundaries are missing: no result may look right
        v = v.masked_fill(layout.exceeded, float("nan"))
    out = attention_varlen(q, k, v, layout.cu_seqlens, D**-0.5 if scaling is None else scaling)
    if layout.places is not None:
        out = out.new_zeros(B * T, H, D).index_copy(0, layout.places, out)
    return out.view(B, T, H, D), None
