"""The code of changes: base + changes == the new tensor, byte for byte, and no malformed record is applied unnoticed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_patch.errors import SyncError
from jetrl_patch.sync import delta

SIZES = [1, 15, 16, 17, 255, 256, 1000, 4096, 4097, 70001]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(delta, "_CHUNK", 4096)


def pair(size, share, seed=0):
    """Two byte tensors, of which this share differs."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    other = torch.rand(size, generator=generator) < share
    return old, torch.where(other, old ^ 0x5A, old), int(other.sum())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.2, 0.6, 1.0])
def test_base_and_changes_make_the_new_bytes(size, share):
    old, new, differing = pair(size, share)
    record, changed = delta.encode(old, new)
    assert changed == differing
    if record is None:
        assert share > 0.4 or size < 64
        return
    assert len(record) < size and len(record) % 16 == 0
    found = old.clone()
    delta.apply(found, record)
    assert torch.equal(found, new)


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 9000), places=st.lists(st.integers(0, 8999), max_size=40))
def test_any_places(size, places):
    old, *_ = pair(size, 0)
    new = old.clone()
    for place in places:
        new[place % size] ^= 0xFF
    record, changed = delta.encode(old, new)
    assert changed == int((old != new).sum())
    if record is not None:
        found = old.clone()
        delta.apply(found, record)
        assert torch.equal(found, new)


@pytest.mark.parametrize("gap", [254, 255, 256, 510, 65534, 65535, 65536, 131070])
def test_gaps_at_the_edges_of_a_symbol(gap, monkeypatch):
    monkeypatch.setattr(delta, "_CHUNK", 1 << 24)
    old = torch.zeros(300_000, dtype=torch.uint8)
    new = old.clone()
    new[[0, gap, 2 * gap]] = 1
    record, changed = delta.encode(old, new)
    delta.apply(old, record)
    assert changed == 3 and torch.equal(old, new)


@pytest.mark.parametrize(("share", "most"), [(0.01, 2.2), (0.0001, 3.4)])
def test_what_a_changed_byte_costs(share, most, monkeypatch):
    monkeypatch.setattr(delta, "_CHUNK", 1 << 24)
    old, new, differing = pair(1 << 20, share)
    record, _ = delta.encode(old, new)
    assert differing < len(record) < most * differing


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("shape", [(300,), (40, 33), (8, 16, 9)])
def test_every_dtype_and_shape_that_is_sent(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    old = torch.randn(shape, generator=generator).to(dtype)
    new = old.clone()
    new.view(-1)[::37] = torch.tensor(3.0).to(dtype)
    record, _ = delta.encode(old, new)
    unaligned = torch.empty(len(record) + 3, dtype=torch.uint8)[3:].copy_(record)  # as it may lie in a bucket
    delta.apply(old, unaligned)
    assert old.dtype is dtype and torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def test_nothing_and_everything():
    empty = torch.empty(0, dtype=torch.bfloat16)
    assert delta.encode(empty, empty) == (None, 0)
    old = torch.zeros(1000, dtype=torch.uint8)
    assert len(delta.encode(old, old.clone())[0]) == 16
    assert delta.encode(old, old + 1) == (None, 1000)


def broken(record, change):
    record = record.clone()
    head = record[:16].view(torch.int32)
    if change == "short":
        return record[:-16]
    if change == "long":
        return torch.cat([record, record[:16]])
    if change == "no head":
        return record[:8]
    fewer = int(head[0]) - 1
    place, value = {"changes": (0, 10_000), "negative": (0, -1), "fewer": (0, fewer), "symbols": (1, 5), "width": (2, 3)}[change]
    head[place] = value
    return record


@pytest.mark.parametrize("change", ["short", "long", "no head", "changes", "negative", "fewer", "symbols", "width"])
def test_a_malformed_record_is_refused(change):
    old, new, _ = pair(4000, 0.05)
    record, _ = delta.encode(old, new)
    with pytest.raises(SyncError, match="the changes of a weight are malformed"):
        delta.apply(old.clone(), broken(record, change))


def test_a_position_outside_the_tensor_is_refused():
    old, new, _ = pair(4000, 0.05)
    record, _ = delta.encode(old, new)
    with pytest.raises(SyncError, match="outside the tensor"):
        delta.apply(old[:2000].clone(), record)
