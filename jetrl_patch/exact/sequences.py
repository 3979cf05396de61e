"""The sequences of a padded or packed batch: where its tokens are, and where each sequence begins."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl_patch.patching.attached import Attached

# ---- A bound on the number of sequences in a packed batch, which the framework knows on the host
# Attention needs the boundaries of the sequences, which follow from the positions on the device. With a bound on their number,
# the boundaries fit in a tensor of fixed size, so the host need not wait for the device to count them.

_SEQUENCES: Attached[int] = Attached("_jetrl_sequences", "of a batch, transformers passes attention functions only its tensors")


def mark(positions: Tensor, at_most: int) -> None:
    """Set the bound of the batch with these positions. A copy of the tensor has no bound, so its sequences are counted."""
    _SEQUENCES.set(positions, at_most)


def bound(positions: Tensor | None) -> int | None:
    """The bound for a batch with these positions, or None."""
    return _SEQUENCES.get(positions)


class Boundaries(NamedTuple):
    """cu_seqlens int32 [at_most + 1], whose last sequences may be empty, and whether the bound was too small (bool [])."""

    cu_seqlens: Tensor
    exceeded: Tensor


def boundaries(begins: Tensor, at_most: int) -> Boundaries:
    """The boundaries of the sequences that begin where ``begins`` [T] is true, without waiting for the device."""
    T = begins.shape[0]
    places = torch.where(begins, torch.arange(T, device=begins.device), T)
    starts = places.sort().values[:at_most]
    cu = torch.nn.functional.pad(starts, (0, 1), value=T).to(torch.int32)
    return Boundaries(cu, begins.sum() > at_most)


# ---- The sequences --------------------------------------------------------------------------------

class Sequences(NamedTuple):
    """Which of the B * T positions hold tokens (None: all), and where each sequence begins.

    ``exceeded``: a bool [] on the device, whether there are more sequences than the framework's upper bound.
    """

    places: Tensor | None
    cu_seqlens: Tensor
    exceeded: Tensor | None = None


class _LastSequences:
    """Keeps the last batch's: all layers of a forward pass see the same mask and positions."""

    def __init__(self) -> None:
        self._of: list[weakref.ref[Tensor] | None] = []  # mask and positions
        self._shape = (0, 0)
        self._found: Sequences | None = None

    def get(self, mask: Tensor | None, positions: Tensor | None, shape: tuple[int, int]) -> Sequences:
        given = (mask, positions)
        if self._found is None or shape != self._shape or not all(map(_is_same, self._of, given)):
            self._of, self._shape = [None if t is None else weakref.ref(t) for t in given], shape
            self._found = find_sequences(mask, positions, shape)
        return self._found


def _is_same(held: weakref.ref[Tensor] | None, tensor: Tensor | None) -> bool:
    return held is tensor if held is None or tensor is None else held() is tensor


#: the sequences of a batch with this mask and these positions: see ``find_sequences``
batch_sequences = _LastSequences().get


def find_sequences(mask: Tensor | None, positions: Tensor | None, shape: tuple[int, int]) -> Sequences:
    """Find the sequences of a padded or packed batch: the places of its tokens when flattened, and cu_seqlens int32 [R + 1].

    If an upper bound on the number of sequences is set (``mark``), the host does not wait for the device.

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
    at_most = bound(positions)
    if mask is None and at_most is not None and B == 1:
        return Sequences(None, *boundaries(begins[0], at_most))
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
    return Sequences(places, torch.cat((starts, total)).to(torch.int32))
