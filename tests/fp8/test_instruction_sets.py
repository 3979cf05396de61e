"""Every instruction set of the CPU kernels gives the same bits: over edge shapes, all codes, NaN and subnormals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl_patch.kernels.formats import FP8, groups
from jetrl_patch.native import build, ops

BF16 = torch.bfloat16
SETS = build.supported()
#: M, N, K: every number of rows of a register tile, and widths that end inside a vector, a tile and a group
SHAPES = [(1, 33, 17), (2, 64, 128), (3, 31, 129), (4, 70, 384), (5, 32, 256), (6, 1, 1), (7, 96, 200), (8, 65, 255)]
SHAPES += [(9, 33, 131), (31, 130, 300), (257, 40, 130)]


@contextlib.contextmanager
def compiled_for(name: str) -> Iterator[None]:
    """Use the kernels of one set for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "library", lambda: build.load(name))
        yield


def same(compute: Callable[[], Any]) -> None:
    """Require the same bits of every set. NaN are alike, whatever their bits."""
    found = {}
    for name in SETS:
        with compiled_for(name):
            result = compute()
        found[name] = result if isinstance(result, tuple) else (result,)
    first = found[SETS[0]]
    for name, results in found.items():
        for one, other in zip(first, results, strict=True):
            assert bits(one) == bits(other), name


def bits(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point() and value.dtype != FP8:
        value = torch.where(value.isnan(), torch.full_like(value, float("nan")), value)
    return value.contiguous().view(torch.uint8).numpy().tobytes()


def random(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * torch.exp2(torch.randn(shape[0], 1, generator=g) * 4)).to(BF16)


def codes(rows: int, width: int, seed: int, nan: bool = False) -> Tensor:
    """All e4m3 codes, subnormal and saturated ones too; NaN only in some rows."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 256, (rows, width), generator=g, dtype=torch.uint8)
    clean = torch.where((q & 0x7F) == 0x7F, q & 0xFE, q)
    if nan:
        clean[rows // 2 :] = q[rows // 2 :]
        clean[-1, -1] = 0x7F
    return clean.view(FP8)


def scales(rows: int, width: int, seed: int) -> Tensor:
    return torch.rand(rows, groups(width), generator=torch.Generator().manual_seed(seed)) + 0.1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, torch.float32])
def test_fp8_products(shape: tuple[int, int, int], nan: bool, out_dtype: torch.dtype) -> None:
    M, N, K = shape
    q, s, w, sw = codes(M, K, 1, nan), scales(M, K, 2), codes(N, K, 3, nan), scales(N, K, 4)
    splits = (1, 2) if K % 256 == 0 else (1,)

    def compute() -> tuple[Tensor, ...]:
        packed = ops.pack(w)
        assert (packed is None) == nan
        plain = tuple(ops.fp8_gemm(q, s, w, sw, out_dtype, n) for n in splits)
        return plain + tuple(ops.fp8_gemm(q, s, w, sw, out_dtype, n, packed) for n in splits)

    same(compute)
    found = compute()
    assert [bits(y) for y in found[: len(splits)]] == [bits(y) for y in found[len(splits) :]]


@pytest.mark.parametrize("shape", [*SHAPES, (12, 40, 96)])
def test_mxfp8_products(shape: tuple[int, int, int]) -> None:
    M, N, K = shape
    x, w = (ops.quantize(random(rows, K, seed=seed), "rows", True, 32) for rows, seed in ((M, 0), (N, 1)))

    def compute() -> tuple[Tensor, ...]:
        kinds = [(dtype, packed) for dtype in (BF16, torch.float32) for packed in (None, ops.pack(w[0]))]
        results = [ops.fp8_gemm(*x, *w, dtype, 1, packed, 32) for dtype, packed in kinds]
        return (*results, ops.fp8_gemm(*x, *w, torch.float32, 3, None, 32) if K == 96 else results[0])

    same(compute)
    found = compute()
    assert bits(found[0]) == bits(found[1]) and bits(found[2]) == bits(found[3])


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_products(shape: tuple[int, int, int]) -> None:
    M, N, K = shape
    x, w = random(M, K), random(N, K, seed=1)
    x[0, -1], w[-1, 0] = 1e-39, float("nan")
    same(lambda: (ops.bf16_gemm(x, w, BF16), ops.bf16_gemm(x, w, torch.float32)))


def test_a_process_without_subnormals() -> None:
    """torch.set_flush_denormal changes no code: none becomes a subnormal FP32 on the way."""
    q, s, w, sw = codes(3, 200, 1), scales(3, 200, 2), codes(40, 200, 3) , scales(40, 200, 4)
    expected = {name: bits(product(name, q, s, w, sw)) for name in SETS}
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormals")
    try:
        assert {name: bits(product(name, q, s, w, sw)) for name in SETS} == expected
    finally:
        torch.set_flush_denormal(False)


def product(name: str, *operands: Tensor) -> Tensor:
    with compiled_for(name):
        return ops.fp8_gemm(*operands, torch.float32)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 127), (130, 257), (64, 1024)])
@pytest.mark.parametrize("pow2", [True, False])
def test_quantizers(rows: int, width: int, pow2: bool) -> None:
    x = random(rows, width)
    x.view(-1)[:: max(1, x.numel() // 7)] = torch.tensor(3e38, dtype=BF16)
    x[0, 0] = 0.0
    for special in (None, float("nan"), 1e-39):
        if special is not None:
            x[-1, -1] = special
        for layout in ("rows", "tokens", "blocks"):
            same(lambda layout=layout: ops.quantize(x, layout, pow2))
        for layout in ("rows", "tokens"):
            same(lambda layout=layout: ops.quantize(x, layout, True, 32))


def test_every_bf16_value_is_quantized_alike() -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16).view(-1, 128)
    same(lambda: (*ops.quantize(x, "rows", True), *ops.quantize(x, "rows", False)))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_dequantize(dtype: torch.dtype) -> None:
    q, s = codes(130, 257, 1, nan=True), scales(130, 257, 2)
    same(lambda: ops.dequantize(q, s, 1, 128, dtype))


def test_fingerprints_and_digests() -> None:
    w = random(67, 1003)
    same(lambda: (ops.fingerprint(w), *ops.digest(w, 5, 7), *ops.digest(w.view(torch.uint8), 0, 0)))


@pytest.mark.parametrize("width", [1, 15, 17, 64, 1003])
def test_rows_of_norms_and_activations(width: int) -> None:
    x, up, weight = random(9, width), random(9, width, seed=1), random(width, 1, seed=2)[:, 0]
    x[0, 0], x[1, -1] = float("nan"), 3e38
    same(lambda: ops.rms_norm(x, weight, 1e-6))
    same(lambda: ops.silu_mul(x, up))


def test_the_activation_of_every_bf16_value() -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16).view(64, -1)
    same(lambda: ops.silu_mul(x, torch.ones_like(x)))


def test_routes_and_rotations() -> None:
    logits = torch.randn(33, 24, generator=torch.Generator().manual_seed(0))
    same(lambda: ops.route(logits, 4, True))
    same(lambda: ops.route(logits, 4, True, (torch.zeros(24), 4, 2, 1.5)))
    x, table = random(9 * 3, 64).view(9, 3, 64), random(50, 32, seed=1)
    same(lambda: ops.rotary(x, table, table, torch.arange(9) * 5))


@pytest.mark.parametrize("width", [20, 64, 80, 128])
def test_attention(width: int) -> None:
    lengths = torch.tensor([1, 17, 40], dtype=torch.int32)
    starts = torch.tensor([0, 1, 6, 46], dtype=torch.int32)
    q = random(46 * 6, width).view(46, 6, width)
    k, v = (random(96 * 2, width, seed=seed).view(6, 16, 2, width) for seed in (1, 2))
    table = torch.tensor([[0, 0, 0], [3, 1, 0], [2, 4, 5]], dtype=torch.int32)
    same(lambda: ops.attention(q, k, v, table, lengths, starts, width**-0.5, want_lse=True))
