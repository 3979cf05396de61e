"""The Triton digest in the interpreter, bit for bit against the formula."""

from __future__ import annotations

import pytest
import torch
import triton

from jetrl_patch.kernels.digest import ROWS, TILES, digest
from jetrl_patch.sync.digest import formula

assert triton.knobs.runtime.interpret
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about integers that wrap around

SHAPES = [(1, 1), (ROWS * TILES + 1, 257)]


def _matrix(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    raw = torch.randint(0, 256, (rows, cols * dtype.itemsize), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_formula(shape, dtype):
    matrix = _matrix(*shape, dtype)
    assert torch.equal(digest(matrix, 1 << 20, 12345), formula(matrix, 1 << 20, 12345))


def test_a_view_is_read_in_place():
    whole = _matrix(70, 300, torch.bfloat16)
    part = whole[3:67, 10:291]
    assert torch.equal(digest(part, 3, 10), formula(part, 3, 10))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_tells_whether_values_are_finite(bad):
    weight = torch.randn(66, 300).to(torch.bfloat16)
    assert digest(weight, 0, 0)[1] == 0
    assert digest(weight.float(), 0, 0)[1] == 0
    weight[65, 299] = bad
    assert digest(weight, 0, 0)[1] == digest(weight.float(), 0, 0)[1] == 1


def test_a_single_flipped_bit_is_seen():
    weight = _matrix(20, 40, torch.uint8)
    before = digest(weight, 0, 0)
    for bit in range(8):
        weight[19, 39] ^= 1 << bit
        assert not torch.equal(digest(weight, 0, 0), before)
        weight[19, 39] ^= 1 << bit


def test_every_call_has_a_slot_of_its_own():
    weight = _matrix(2, 2, torch.uint8)
    found = [digest(weight, 0, 0) for _ in range(3)]
    assert len({value.data_ptr() for value in found}) == len(found)
    assert all(torch.equal(value, found[0]) for value in found)
