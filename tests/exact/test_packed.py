"""Packed batches with a known number of sequences: the same attention without a device sync."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import masking_utils

import jetrl_patch
from jetrl_patch.exact import dispatch
from jetrl_patch.exact.hf_attention import exact_attention
from jetrl_patch.exact.sequences import bound, find_sequences, mark

from ..waits import NothingIsReadBack


def positions_of(*lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


def run(positions, **layout):
    """Output and gradients of one layer for a packed row."""
    T = positions.shape[1]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, T, 64, generator=generator).to(torch.bfloat16).requires_grad_() for h in (4, 2, 2))
    out, _ = exact_attention(nn.Module(), q, k, v, None, position_ids=positions)
    out.backward(torch.randn(out.shape, generator=generator).to(torch.bfloat16))
    return out.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("lengths", [(5, 1, 30, 2), (40,), (1,) * 9], ids=str)
@pytest.mark.parametrize("spare", [0, 1, 50])
def test_a_bound_changes_no_bit(monkeypatch, backend, lengths, spare):
    monkeypatch.setitem(dispatch._chosen, "cpu", backend)
    expected = run(positions_of(*lengths))
    marked = positions_of(*lengths)
    mark(marked, len(lengths) + spare)
    assert find_sequences(None, marked, (1, marked.shape[1])).exceeded is not None
    for ours, theirs in zip(run(marked), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_the_host_counts_nothing():
    marked = positions_of(5, 9, 3)
    mark(marked, 4)
    with NothingIsReadBack():
        sequences = find_sequences(None, marked, (1, 17))
    assert sequences.cu_seqlens.tolist() == [0, 5, 14, 17, 17] and not sequences.exceeded
    with pytest.raises(AssertionError, match="waits for the device"), NothingIsReadBack():
        find_sequences(None, positions_of(5, 9, 3), (1, 17))


def test_a_bound_that_is_too_small_leaves_no_number():
    marked = positions_of(5, 9, 3)
    mark(marked, 2)
    assert run(marked)[0].isnan().all()


def test_a_bound_belongs_to_its_batch():
    marked = positions_of(3, 4)
    mark(marked, 2)
    assert bound(marked) == 2 and bound(marked.clone()) is None and bound(None) is None
    mask = torch.ones(1, 7)
    assert find_sequences(mask, marked, (1, 7)).exceeded is None  # a padded batch is counted


@pytest.mark.parametrize("lengths", [(5, 9, 3), (17,)], ids=str)
def test_transformers_does_not_ask_either(lengths):
    """Its own search looks at the device; with a bound the numbers are the same, also for a row of one sequence."""
    positions, marked = positions_of(*lengths), positions_of(*lengths)
    mark(marked, 4)
    with pytest.raises(AssertionError, match="waits for the device"), NothingIsReadBack():
        masking_utils.find_packed_sequence_indices(positions)
    jetrl_patch.enable(precision="fp8-unified")
    with NothingIsReadBack():
        found = masking_utils.find_packed_sequence_indices(marked)
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    assert torch.equal(found, numbers[None])
    theirs = masking_utils.find_packed_sequence_indices(positions)
    assert theirs is None if len(lengths) == 1 else torch.equal(theirs, found)
