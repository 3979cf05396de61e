"""The tokens that each token was drawn from, if others were left out: by top-k, top-p or min-p, or because they were banned.

A log-prob under such a distribution is the log-softmax over these tokens alone. The rollout records them: after an update, the
trainer's logits would select others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl_patch.errors import AuditError, explain

#: value of a logit that is left out: its exp is 0 as for −inf, and 0 · logit in an entropy is 0 instead of NaN
BANNED = -1e30


@dataclass(frozen=True)
class Support:
    """The supports of several tokens, one after another.

    Attributes:
        counts: int64 [rows], how many ids each token has; 0 for a token that was drawn from the whole vocabulary.
        ids: int64 [sum of counts]: of each token, the ids that it was drawn from, or ``~id`` of those that were left out if these
            are fewer.
    """

    counts: Tensor
    ids: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Support:
        """The supports of tokens, from a list of ``ids`` for each; an empty list is the whole vocabulary."""
        counts = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return cls(counts, torch.tensor([token for row in rows for token in row], dtype=torch.int64))

    @classmethod
    def unpack(cls, pair: Sequence[Any]) -> Support:
        """What ``pack`` made of it."""
        counts, ids = (torch.from_numpy(part).long() for part in pair)
        return cls(counts, ids)

    def pack(self) -> tuple[Any, Any]:
        """Sizes and token ids as NumPy's int32, for a framework that sends samples between processes."""
        return self.counts.int().numpy(), self.ids.int().numpy()

    def part(self, start: int, stop: int) -> Support:
        """The supports of the tokens from ``start`` to ``stop``. The host waits for those of a device."""
        counts = self.counts[start:stop]
        first = int(self.counts[:start].sum())
        return Support(counts, self.ids[first : first + int(counts.sum())])

    def take(self, rows: Tensor) -> Support:
        """The supports of the tokens ``rows``, int64 [any], in that order; −1 stands for the whole vocabulary."""
        counts = torch.where(rows < 0, 0, self.counts[rows.clamp(min=0)])
        before = (self.counts.cumsum(0) - self.counts)[rows.clamp(min=0)] - (counts.cumsum(0) - counts)
        place = before.repeat_interleave(counts)
        return Support(counts, self.ids[place + torch.arange(len(place), device=place.device)])

    def to(self, device: torch.device | str) -> Support:
        """The same on another device."""
        return Support(self.counts.to(device), self.ids.to(device))

    def require(self, tokens: Tensor, where: str) -> Support:
        """Return self. Raises AuditError if a token [rows] is not in its own support: the record is that of other tokens."""
        if tokens.shape != self.counts.shape:
            found = f"{len(self.counts)} for {len(tokens)} tokens"
        else:
            hit = torch.zeros_like(self.counts).index_add_(0, self._rows, (self._tokens == tokens[self._rows]).long())
            missing = int(((self.counts > 0) & (hit != (~self._bans).long())).sum())
            if not missing:
                return self
            found = f"{missing} of {len(tokens)} tokens that are not in theirs"
        fix = "let the engine alone edit its outputs, or sample with top_p=1, top_k=0 and min_p=0"
        raise AuditError(explain(f"the sampling supports of {where}", required="one for each token", found=found, fix=fix))

    def edit(self, logits: Tensor, part: slice) -> Tensor:
        """Leave the other tokens out of FP32 logits [rows of ``part``, V]: an ``exact.logprob.Edit``. No host waits for it."""
        counts, rows = self.counts[part], self._rows
        first = part.start or 0
        height, width = logits.shape
        inside = (rows >= first) & (rows < first + height)
        place = torch.where(inside, (rows - first) * width + self._tokens, height * width)  # others: a place behind the last
        named = torch.zeros(height * width + 1, dtype=torch.bool, device=logits.device).index_fill_(0, place, True)
        outside = (named[:-1].view(height, width) == self._bans[part].unsqueeze(1)) & (counts > 0).unsqueeze(1)
        return logits.masked_fill(outside, BANNED)

    @functools.cached_property
    def _rows(self) -> Tensor:
        """The row [sum of counts] of each id."""
        every = torch.arange(len(self.counts), device=self.counts.device)
        return every.repeat_interleave(self.counts, output_size=len(self.ids))

    @functools.cached_property
    def _tokens(self) -> Tensor:
        """The token [sum of counts] of each id."""
        return torch.where(self.ids < 0, ~self.ids, self.ids)

    @functools.cached_property
    def _bans(self) -> Tensor:
        """Whether the ids of a token [rows] are those that were left out."""
        return torch.zeros_like(self.counts, dtype=torch.bool).index_fill_(0, self._rows[self.ids < 0], True)


def placed(pieces: Iterable[tuple[int, Support]], rows: int) -> Support:
    """The supports of ``rows`` tokens, from pieces and the row at which each begins, in order. The other rows have none."""
    counts, ids = torch.zeros(rows, dtype=torch.int64), [torch.zeros(0, dtype=torch.int64)]
    for start, piece in pieces:
        counts[start : start + len(piece.counts)] = piece.counts
        ids.append(piece.ids)
    return Support(counts, torch.cat(ids))


# ---- The same as two rectangular tensors, one row per sample, as training frameworks shuffle, split and send them

def to_batch(samples: Sequence[Support], width: int) -> tuple[Tensor, Tensor]:
    """Pack the supports of samples of at most ``width`` tokens: sizes int32 [B, width] and ids int32 [B, most ids], then 0."""
    longest = max((len(sample.ids) for sample in samples), default=0)
    sizes = torch.zeros(len(samples), width, dtype=torch.int32)
    ids = torch.zeros(len(samples), longest, dtype=torch.int32)
    for row, sample in enumerate(samples):
        sizes[row, : len(sample.counts)] = sample.counts
        ids[row, : len(sample.ids)] = sample.ids
    return sizes, ids


def of_batch(sizes: Tensor, ids: Tensor, skipped: int = 0) -> Support:
    """The supports of all tokens of such a batch, row by row, each row after ``skipped`` tokens without one."""
    held = torch.arange(ids.shape[1], device=ids.device) < sizes.sum(1, keepdim=True)
    padded = torch.nn.functional.pad(sizes, (skipped, 0))
    return Support(padded.reshape(-1).long(), ids[held].long())
