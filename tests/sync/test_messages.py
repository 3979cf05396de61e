"""A manifest, a commit or a bucket's index arrives whole, or raises one SyncError."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_patch.errors import AuditError, SyncError
from jetrl_patch.sync import protocol
from jetrl_patch.sync.protocol import MANIFEST, Manifest, decode_json, encode_json
from jetrl_patch.sync.send import unpack
from tests.sync.fake_engine import LAYERS, SHAPES, TERMS

WHOLE = Manifest(terms=TERMS, layers=LAYERS, tensors={name: (shape, "bfloat16") for name, shape in SHAPES.items()})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in pairs for found in ((*path, key), *places(inner, (*path, key)))]


TEXT = json.loads(WHOLE.encode().numpy().tobytes())


@settings(deadline=None, max_examples=300)
@given(path=st.sampled_from(places(TEXT)), value=JSON)
def test_a_manifest_with_anything_changed(path: tuple[Any, ...], value: Any) -> None:
    data = copy.deepcopy(TEXT)
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    try:
        read = Manifest.decode(encode_json(data))
    except SyncError:
        return
    assert Manifest.decode(read.encode()) == read
    read.expected()


def test_a_manifest_says_how_experts_are_split_only_if_they_are() -> None:
    assert "experts" not in TEXT and Manifest.decode(encode_json(TEXT)).terms == TERMS
    split = dataclasses.replace(WHOLE, terms=dataclasses.replace(TERMS, experts="2 ranges of columns"))
    assert Manifest.decode(split.encode()) == split


def test_a_scale_is_expected_for_each_block_that_a_weight_begins() -> None:
    """Also where the last block has one row, of many."""
    mx, rows = (dataclasses.replace(TERMS, **change) for change in ({"scale_format": "mxfp8"}, {"granularity": "channel"}))
    assert TERMS.scale_shape((200 * 128 + 1, 300 * 128 + 1)) == (201, 301)
    assert mx.scale_shape((5, 300 * 32 + 1)) == (5, 301) and rows.scale_shape((5, 7)) == (5, 1)


def test_of_many_layers_that_differ_three_are_named() -> None:
    with pytest.raises(AuditError, match=r"only in the trainer: a, b, c and 2 more; only in the rollout: none\."):
        protocol.require_same_terms(TERMS, TERMS, set("abcde"), set())


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(text: bytes) -> None:
    tensor = torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)
    with pytest.raises(SyncError):
        Manifest.decode(tensor)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tensors": [*TEXT["tensors"], TEXT["tensors"][0]]}, "announced twice"),
        ({"tensors": TEXT["tensors"][1:]}, f"no matrix is announced as {LAYERS[0]}.weight"),
        ({"tensors": [["w", [-1, 2], "bfloat16"]], "fp8_layers": []}, r"\[-1, 2\] is not a shape"),
        ({"tensors": [["w", [1.5], "bfloat16"]], "fp8_layers": []}, "is not a shape"),
        ({"tensors": [[TEXT["tensors"][0][0], [256], "bfloat16"]], "fp8_layers": [LAYERS[0]]}, "no matrix"),
        ({"guarded_layers": ["elsewhere"]}, "no matrix is announced as elsewhere.weight"),
    ],
)
def test_what_contradicts_itself_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(SyncError, match=says):
        Manifest.decode(encode_json({**TEXT, **change}))


def test_a_message_is_bounded_in_size_and_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = torch.frombuffer(bytearray(b"[" * 200_000), dtype=torch.uint8)
    with pytest.raises(SyncError, match="is not valid JSON"):
        decode_json(deep, MANIFEST)
    with pytest.raises(SyncError, match="required at most"):
        decode_json(torch.zeros(4), MANIFEST)
    monkeypatch.setattr(protocol, "MOST_BYTES", 100)
    with pytest.raises(SyncError, match="required at most 100 bytes"):
        decode_json(torch.zeros(101, dtype=torch.uint8), MANIFEST)


@settings(deadline=None, max_examples=300)
@given(
    dtype=st.sampled_from(("float32", "uint8", "bfloat16", "float8_e4m3fn", "nn", "bits")),
    shape=st.lists(st.integers(-4, 9), max_size=3),
    start=st.integers(-3, 40),
)
def test_an_index_reads_inside_its_bucket_or_fails(dtype: str, shape: list[int], start: int) -> None:
    flat = torch.arange(64, dtype=torch.uint8)
    try:
        ((_, found),) = unpack(flat, [("w", dtype, shape, start)])
    except SyncError:
        return
    assert list(found.shape) == shape
    assert not found.nbytes or found.data_ptr() == flat.data_ptr() + start
    assert start + found.nbytes <= 64
