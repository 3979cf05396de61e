"""Buckets: what is packed is unpacked unchanged and in order, and no bucket exceeds its size without need."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_patch.errors import SyncError
from jetrl_patch.sync.send import Bucket, pack, unpack

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8)


def tensors(sizes: list[tuple[int, int]], seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, (rows, columns) in enumerate(sizes):
        noise = torch.randint(0, 256, (rows, columns * 4), generator=generator, dtype=torch.uint8)
        made.append((f"t{i}", noise.view(DTYPES[i % len(DTYPES)])))
    return made


def copied(bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """A bucket is valid until the next one is requested."""
    return unpack(bucket.flat.clone(), bucket.entries)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=12),
    limit=st.integers(1, 600),
    seed=st.integers(0, 2**16),
)
def test_what_goes_in_comes_out(sizes, limit, seed):
    sent = tensors(sizes, seed)
    arrived, largest = [], max((t.nbytes for _, t in sent), default=0)
    for bucket in pack(iter(sent), CPU, limit):
        assert bucket.entries and bucket.flat.numel() <= max(limit, largest) + 16 * len(bucket.entries)
        arrived += copied(bucket)
    assert [name for name, _ in arrived] == [name for name, _ in sent]
    for (_, a), (_, b) in zip(arrived, sent, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def test_few_buckets_for_many_tensors_and_one_for_a_large_one():
    small = [(f"s{i}", torch.zeros(10)) for i in range(100)]
    assert len(list(pack(iter(small), CPU, 1 << 20))) == 1
    mixed = [("a", torch.zeros(4)), ("large", torch.zeros(1000)), ("b", torch.zeros(4))]
    assert [[e[0] for e in bucket.entries] for bucket in pack(iter(mixed), CPU, 64)] == [["a"], ["large"], ["b"]]
    assert list(pack(iter([]), CPU)) == []


def test_a_transposed_tensor_travels_by_its_values():
    weight = torch.arange(6.0).view(2, 3).t()
    ((_, found),) = copied(next(pack(iter([("w", weight)]), CPU)))
    assert torch.equal(found, weight)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (("w", "float99", [2], 0), "unknown dtype 'float99'"),
        (("w", "rand", [2], 0), "unknown dtype 'rand'"),
        (("w", "float32", [9], 0), "bytes 0:36, but 16 bytes arrived"),
        (("w", "float32", [1], -4), "bytes -4:0"),
    ],
)
def test_a_broken_description_is_named(entry, says):
    with pytest.raises(SyncError, match=says):
        unpack(torch.zeros(16, dtype=torch.uint8), [entry])


def test_a_bucket_stays_valid_while_the_next_one_is_filled():
    sent = tensors([(3, 5)] * 9, 1)
    stream, arrived, travels = pack(iter(sent), CPU, 160), [], None
    for bucket in stream:
        if travels is not None:  # filled, and still as it was
            arrived += copied(travels)
        travels = bucket
    arrived += copied(travels)
    assert [name for name, _ in arrived] == [name for name, _ in sent]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for (_, a), (_, b) in zip(arrived, sent, strict=True))


def test_two_buffers_hold_the_limit_between_them():
    sent = [(f"t{i}", torch.zeros(100, dtype=torch.uint8)) for i in range(50)]
    found = [bucket.flat.untyped_storage() for bucket in pack(iter(sent), CPU, 1024)]
    stores = {storage.data_ptr(): storage.nbytes() for storage in found}
    assert len(stores) == 2 and sum(stores.values()) <= 1024 + 2 * 16


def test_a_large_tensor_is_copied_and_its_memory_is_not_kept():
    large = torch.arange(1000, dtype=torch.uint8)
    stream = pack(iter([("large", large), ("b", torch.zeros(4))]), CPU, 64)
    first = next(stream)
    large.zero_()  # as when a framework frees or reuses a gathered weight
    assert torch.equal(first.flat, torch.arange(1000, dtype=torch.uint8))
    assert next(stream).flat.untyped_storage().nbytes() <= 64
