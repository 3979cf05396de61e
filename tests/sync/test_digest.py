"""The digest: it adds up over any tiling, and every byte changes it."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_patch.sync.digest import add, digest, formula

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32]


def _tensor(rows: int, cols: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (rows, cols * size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return raw.view(dtype)


@given(
    rows=st.integers(1, 40), cols=st.integers(1, 40), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
    data=st.data(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_adds_up_over_any_grid_of_rectangles(rows, cols, dtype, seed, data):
    whole = _tensor(rows, cols, dtype, seed)
    r_cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=3))})
    c_cuts = sorted({0, cols, *data.draw(st.lists(st.integers(0, cols), max_size=3))})
    parts = [
        digest(whole[r0:r1, c0:c1], r0, c0)
        for r0, r1 in itertools.pairwise(r_cuts)
        for c0, c1 in itertools.pairwise(c_cuts)
    ]
    assert add(*parts) == digest(whole)


@given(rows=st.integers(1, 20), cols=st.integers(1, 20), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=60, deadline=None)
def test_sees_a_single_changed_byte(rows, cols, seed, data):
    whole = _tensor(rows, cols, torch.uint8, seed)
    before = digest(whole)
    r, c = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
    whole[r, c] ^= data.draw(st.integers(1, 255))
    assert digest(whole) != before


def test_sees_rows_and_columns_that_changed_places():
    whole = _tensor(8, 8, torch.uint8, 1)
    order = torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])
    assert len({digest(whole), digest(whole[order]), digest(whole[:, order]), digest(whole.t())}) == 4


def test_sees_missing_rows_of_zero_bytes():
    whole = torch.zeros(4, 4, dtype=torch.uint8)
    assert digest(whole) != digest(whole[:3])


def test_is_the_same_for_a_view_and_its_copy():
    whole = _tensor(16, 16, torch.bfloat16, 3)
    assert digest(whole[:, ::2]) == digest(whole[:, ::2].contiguous())


def test_is_chunked_without_a_seam(monkeypatch):
    whole = _tensor(100, 33, torch.float32, 5)
    expected = digest(whole)
    monkeypatch.setattr("jetrl_patch.sync.digest._CHUNK_BYTES", 300)
    assert int(formula(whole)[0]) % (1 << 64) == expected


def test_vectors_and_empty_tensors():
    assert digest(torch.ones(5)) == digest(torch.ones(1, 5))
    assert digest(torch.empty(0, 4)) == 0
