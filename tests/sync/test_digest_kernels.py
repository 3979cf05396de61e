"""The digest's kernels give the definition's value, bit for bit, and tell whether a BF16 or FP32 tensor holds NaN or Inf."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from jetrl_patch.native import build, ops
from jetrl_patch.sync import digest as module
from jetrl_patch.sync.digest import digest, formula, read, start

MASK = (1 << 64) - 1
DTYPES = [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.int64]
#: around the kernel's steps of 16 bytes and blocks of 2,048
EDGES = [1, 15, 16, 17, 2047, 2048, 2049, 4096, 4099]


def _bytes(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (rows, cols), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def _hash(index: int, salt: int) -> int:
    z = (index + 0x9E3779B97F4A7C15 * salt) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31) | 1


def _defined(data: torch.Tensor, row0: int = 0, col0: int = 0) -> int:
    """The definition in Python's integers, for bytes [rows, cols]."""
    cols = [_hash(col0 + c, 2) for c in range(data.shape[1])]
    sums = [sum(h * (b + 1) for h, b in zip(cols, row, strict=True)) for row in data.tolist()]
    return sum(_hash(row0 + r, 1) * total for r, total in enumerate(sums)) & MASK


def _formula(matrix: torch.Tensor, row0: int = 0, col0: int = 0) -> tuple[int, bool]:
    value, special = formula(matrix, row0, col0).tolist()
    return value & MASK, bool(special)


def test_the_formula_is_the_definition():
    data = _bytes(9, 301)
    assert digest(data) == _formula(data)[0] == _defined(data)
    assert digest(data, 70000, 123456) == _formula(data, 70000, 123456)[0] == _defined(data, 70000, 123456)


def test_known_values():
    """The protocol's values: an engine of another version must find the same."""
    assert digest(torch.arange(256, dtype=torch.uint8).view(2, 128)) == 0x16E78FD00A097800
    assert digest(torch.ones(3, 5, dtype=torch.bfloat16), 7, 11) == 0xC1358ADF8CEDFC1B


@given(
    rows=st.integers(1, 9), cols=st.one_of(st.integers(1, 700), st.sampled_from(EDGES)), dtype=st.sampled_from(DTYPES),
    row0=st.integers(0, 1 << 40), col0=st.integers(0, 1 << 40), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_the_kernel_is_the_formula(rows, cols, dtype, row0, col0, seed):
    matrix = _bytes(rows, cols * dtype.itemsize, seed).view(dtype)
    assert ops.digest(matrix, row0, col0) == _formula(matrix, row0, col0)


@given(
    rows=st.integers(2, 9), cols=st.integers(2, 70), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
    data=st.data(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_views_need_no_copy_and_change_nothing(rows, cols, dtype, seed, data):
    whole = _bytes(rows, cols * dtype.itemsize, seed).view(dtype)
    r, c = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
    views = [whole[r:], whole[:, c:], whole[::2, : c + 1], whole[:, ::2], whole.t(), whole[:, c]]
    views.append(whole[r : r + 1].expand(3, cols))
    for view in views:
        assert digest(view, 3, 5) == _formula(view.reshape(1, -1) if view.dim() == 1 else view, 3, 5)[0]


@pytest.mark.parametrize("cols", EDGES)
def test_sums_do_not_overflow(cols):
    for value in (0, 255):
        data = torch.full((3, cols), value, dtype=torch.uint8)
        assert ops.digest(data, 0, 0) == _formula(data)


def test_the_number_of_threads_changes_nothing():
    data, before = _bytes(1001, 4099), torch.get_num_threads()
    found = set()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.add(digest(data))
    finally:
        torch.set_num_threads(before)
    assert found == {_formula(data)[0]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (1, 1023), (2, 1024), (2, 2048)])
def test_tells_whether_values_are_finite(bad, place, dtype):
    weight = torch.randn(3, 2049).to(dtype)
    weight[0, 5] = torch.finfo(dtype).max
    assert start(weight) == _formula(weight) and not start(weight)[1]
    weight[place] = bad
    assert start(weight) == _formula(weight) and start(weight)[1]


@pytest.mark.parametrize("flags", [["-O3"], ["-O3", "-mavx2"], ["-O1", "-fopenmp"]], ids=" ".join)
def test_other_builds_give_the_same_value(flags, tmp_path):
    """The portable loop, as on a processor without AVX2, and other compiler settings."""
    if "-mavx2" in flags and "avx2" not in build.supported():
        pytest.skip("no AVX2")
    source = next(path for path in build.SOURCES if path.name == "digest.c")
    subprocess.run([build.compiler(), *flags, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "d.so")], check=True)
    function = ctypes.CDLL(str(tmp_path / "d.so")).jetrl_digest
    for cols in EDGES:
        data, out = _bytes(5, cols, cols), (ctypes.c_uint64 * 2)()
        long = ctypes.c_int64
        function(ctypes.c_void_p(data.data_ptr()), long(cols), long(5), long(cols), long(7), long(9), 0, out, 2)
        assert (out[0], bool(out[1])) == _formula(data, 7, 9)


def test_without_a_compiler_the_formula_serves(monkeypatch):
    weight = _bytes(40, 66).view(torch.bfloat16)
    expected = start(weight, 2, 3)
    monkeypatch.setattr(module, "_native", lambda: False)
    monkeypatch.setattr(ops, "digest", None)
    assert start(weight, 2, 3) == expected


class _Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::nonzero")
        return func(*args, **(kwargs or {}))


def test_a_device_is_read_once(monkeypatch):
    """What stays on a device is stacked and read together."""
    weights = [_bytes(4, 64, seed).view(torch.bfloat16) for seed in range(5)]
    expected = [start(weight) for weight in weights]
    with _Reads() as reads:
        pending = [formula(weight) for weight in weights]
    assert reads.count == 0
    stacked = []
    original = torch.stack
    monkeypatch.setattr(torch, "stack", lambda parts: stacked.append(len(parts)) or original(parts))
    assert read([expected[0], *pending[1:]]) == expected
    assert stacked == [4]
    assert read([]) == []
