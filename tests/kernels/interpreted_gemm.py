"""The Triton GEMMs in the interpreter, against the FP64 reference and against themselves in other batches."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from jetrl_patch.backends import quantize
from jetrl_patch.backends.quantize import block_scales as in_torch
from jetrl_patch.kernels import gemm_common
from jetrl_patch.kernels.gemm import fprop
from jetrl_patch.kernels.gemm_backward import dgrad, transposed, wgrad
from jetrl_patch.kernels.gemm_common import block_scales

from ..fp8 import oracle
from ..fp8.thresholds import KERNEL_EQUALS_ORACLE, SQNR_GEMM, SQNR_KERNEL_FP32, sqnr

assert triton.knobs.runtime.interpret


SHAPES = [(1, 128, 128), (5, 64, 320), (33, 320, 1000), (130, 200, 257), (200, 17, 129)]  # M, N, K
FORMATS = ["pow2", "fp32"]


def operands(M, N, K, scale_format="pow2"):
    g = torch.Generator().manual_seed(M + N + K)
    x = torch.randn(M, K, generator=g) * torch.exp(torch.randn(M, 1, generator=g))
    w = torch.randn(N, K, generator=g) * K**-0.5
    q_NK, s_blocks = quantize.quantize_weight(w, scale_format)
    q_MK, s_MG = quantize.quantize_activation(x.to(torch.bfloat16), scale_format)
    return q_MK, s_MG, q_NK, quantize.expand_weight_scale(s_blocks, N)


@pytest.mark.pairs
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("wide", [False, True])
def test_fprop_against_the_oracle(shape, scale_format, wide, monkeypatch):
    monkeypatch.setattr(gemm_common, "WIDE_FROM", 1 if wide else 10**9)
    args = operands(*shape, scale_format)
    y = fprop(*args)
    assert y.shape == shape[:2] and y.dtype == torch.bfloat16
    assert (y == quantize.fprop(*args, torch.bfloat16)).float().mean() >= KERNEL_EQUALS_ORACLE
    unrounded = fprop(*args, torch.float32)
    assert sqnr(unrounded, quantize.fprop(*args, torch.float32)) > SQNR_KERNEL_FP32
    assert torch.equal(unrounded.to(torch.bfloat16), y)  # one rounding, to the nearest


@pytest.mark.pairs
@pytest.mark.parametrize("shape", [*SHAPES, (9, 130, 512)])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("wide", [False, True])
def test_one_scale_per_block_gives_the_same_bits(shape, scale_format, wide, monkeypatch):
    monkeypatch.setattr(gemm_common, "WIDE_FROM", 1 if wide else 10**9)
    *args, rows = operands(*shape, scale_format)
    blocks = rows[::128]
    for splits in (1, 2) if shape[2] == 512 else (1,):
        for out_dtype in (torch.bfloat16, torch.float32):
            expected = fprop(*args, rows, out_dtype, splits)
            for s_blocks in (blocks.contiguous(), blocks.t().contiguous().t()):
                assert torch.equal(fprop(*args, s_blocks, out_dtype, splits), expected)
    with pytest.raises(ValueError, match="needs scales of shape"):
        fprop(*args, torch.ones(rows.shape[0] + 1, rows.shape[1]))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_a_row_depends_on_itself_alone(out_dtype, monkeypatch):
    x, s, w, rows = operands(300, 130, 500, "fp32")
    whole = fprop(x, s, w, rows, out_dtype)
    monkeypatch.setattr(gemm_common, "FILLED", 4)  # two rows of wide tiles from 129 rows on
    for size in (1, 7, 64, 130, 256):
        for start in (0, 1, 130, 300 - size):
            if start + size <= 300:
                part = slice(start, start + size)
                assert torch.equal(fprop(x[part], s[part], w, rows, out_dtype), whole[part])


def test_a_tile_follows_the_width_and_whether_rows_are_few(monkeypatch):
    """One tile up to 64 rows, one above, and the wide one once it fills the GPU. Split sums have one."""
    seen = []
    kernel = type("Kernel", (), {"__getitem__": lambda self, grid: lambda *a, **k: seen.append((k["ROWS"], k["COLUMNS"]))})
    monkeypatch.setattr("jetrl_patch.kernels.gemm.fprop_kernel", kernel())
    for M in (1, 7, 64, 65, 256, 119 * 128, 119 * 128 + 1):
        for splits in (1, 2):
            q, s = torch.zeros(M, 256, dtype=torch.float8_e4m3fn), torch.ones(M, 2)
            fprop(q, s, q.new_zeros(64, 256), torch.ones(64, 2), splits=splits)
    whole, split = seen[::2], seen[1::2]
    assert set(whole[:3]) == {(64, 32)} and set(whole[3:-1]) == set(split) == {(128, 64)}  # at least 64 rows: FP8 wgmma
    assert whole[-1] == (128, 128)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("scale_format", FORMATS)
def test_splits_equal_what_tensor_parallel_ranks_add(ranks, scale_format):
    width = max(1024, 256 * ranks)  # at least two blocks a rank, or there would be one order
    x, s, w, rows = operands(9, 130, width, scale_format)
    K, G = width // ranks, width // 128 // ranks
    total = None
    for r in range(ranks):
        k, g = slice(r * K, (r + 1) * K), slice(r * G, (r + 1) * G)
        part = fprop(x[:, k].contiguous(), s[:, g].contiguous(), w[:, k].contiguous(), rows[:, g].contiguous(), torch.float32)
        total = part if total is None else total + part
    y = fprop(x, s, w, rows, splits=ranks)
    assert torch.equal(fprop(x, s, w, rows, torch.float32, ranks), total)  # BF16 would hide another order
    assert torch.equal(y, total.to(torch.bfloat16))
    assert not torch.equal(fprop(x, s, w, rows, torch.float32), total)  # the order of addition does show
    assert (y == quantize.fprop(x, s, w, rows, torch.bfloat16, ranks)).float().mean() >= KERNEL_EQUALS_ORACLE


def test_scales_are_per_row_whatever_slice_of_the_weight_this_is():
    x, s, w, rows = operands(5, 300, 260)
    whole = fprop(x, s, w, rows)
    assert torch.equal(fprop(x, s, w[40:250], rows[40:250]), whole[:, 40:250])


def test_layouts_change_nothing():
    x, s, w, rows = operands(33, 140, 500)
    y = fprop(x, s, w, rows)
    assert torch.equal(fprop(x, s.t().contiguous().t(), w, rows.t().contiguous().t()), y)
    shifted = torch.zeros(33 * 500 + 1, dtype=torch.uint8)[1:].view(torch.float8_e4m3fn).view(33, 500)
    shifted.view(torch.uint8).copy_(x.view(torch.uint8))  # rows that TMA cannot read in place
    assert shifted.data_ptr() % 16 and torch.equal(fprop(shifted, s, w, rows), y)


@pytest.mark.parametrize("width", [128, 129])
@pytest.mark.parametrize("shift", [0, 1, 16])
def test_descriptors_start_at_16_bytes(width, shift):
    q = torch.arange(3 * width + shift, dtype=torch.uint8)[shift:].view(torch.float8_e4m3fn).view(3, width)
    made = gemm_common.descriptor(q, 64)
    assert made.base.data_ptr() % 16 == 0 and made.strides[0] % 16 == 0 and made.shape == [3, width]
    assert torch.equal(made.base.view(torch.uint8), q.view(torch.uint8))
    assert (made.base.data_ptr() == q.data_ptr()) == (width == 128 and shift % 16 == 0)  # copied only where it must be


@triton.jit
def place_kernel(out, rows, columns, HEIGHT: tl.constexpr):
    tile = tl.program_id(0)
    row, column = gemm_common.place(tile, rows, columns, HEIGHT)
    tl.store(out + tile, row * 1000 + column)


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (8, 3), (11, 3), (16, 1), (7, 7)])
def test_every_tile_is_computed_once(rows, columns):
    out = torch.zeros(rows * columns, dtype=torch.int32)
    place_kernel[(rows * columns,)](out, rows, columns, HEIGHT=8)
    assert sorted(out.tolist()) == [row * 1000 + column for row in range(rows) for column in range(columns)]


def test_not_a_number_stays_visible_in_its_row():
    x, s, w, rows = operands(20, 70, 256)
    s[3, 1] = float("nan")
    y = fprop(x, s, w, rows)
    assert y[3].isnan().all() and y.isnan().sum() == 70


@triton.jit
def round_kernel(x, y, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, gemm_common.converted(tl.load(x + at, mask=at < n), y), mask=at < n)


def test_the_rounding_is_that_of_torch():
    bits = torch.randint(-(2**31), 2**31, (60_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    halfway = (bits & ~0xFFFF) | 0x8000
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3.4e38, -3.4e38, 1e-45])
    x = torch.cat((bits.view(torch.float32), halfway.view(torch.float32), special))
    y = torch.empty(len(x), dtype=torch.bfloat16)
    round_kernel[(-(-len(x) // 4096),)](x, y, len(x), SIZE=4096)
    assert torch.equal(y.isnan(), x.isnan())
    keep = ~x.isnan()
    assert torch.equal(y[keep].view(torch.int16), x[keep].to(torch.bfloat16).view(torch.int16))


@pytest.mark.pairs
@pytest.mark.parametrize("shape", [(1, 128, 128), (33, 320, 1000), (260, 130, 257)])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_against_the_oracle(shape, scale_format, dtype):
    M, N, K = shape
    least = SQNR_GEMM if dtype == torch.bfloat16 else SQNR_KERNEL_FP32
    gen = torch.Generator().manual_seed(5)
    g, x = ((torch.randn(M, width, generator=gen) * size).to(torch.bfloat16) for width, size in ((N, 1e-6), (K, 1.0)))
    q_NK, s_blocks = quantize.quantize_weight(torch.randn(N, K, generator=gen), scale_format)
    q_MN, s_MG = quantize.quantize_activation(g, scale_format)
    dx = dgrad(q_MN, s_MG, q_NK, s_blocks, dtype)
    assert dx.dtype == dtype and sqnr(dx, oracle.dgrad(q_MN, s_MG, q_NK, s_blocks)) > least
    (qg, sg), (qx, sx) = (quantize.quantize_tokens(t, scale_format) for t in (g, x))
    args = (qg.t().contiguous(), sg, qx.t().contiguous(), sx)
    dw = wgrad(*args, dtype)
    assert dw.dtype == dtype and sqnr(dw, oracle.wgrad(qg, sg, qx, sx)) > least


@pytest.mark.parametrize("shape", [(1, 1), (128, 256), (130, 257), (300, 40)])
def test_the_weight_is_transposed_for_dgrad(shape):
    w = torch.randint(0, 127, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8).view(torch.float8_e4m3fn)
    found = transposed(w)
    assert torch.equal(found.view(torch.uint8), w.view(torch.uint8).t()) and found.stride(0) % 16 == 0


def test_wgrad_adds_to_a_main_gradient():
    gen = torch.Generator().manual_seed(0)
    g, x = (torch.randn(200, width, generator=gen).to(torch.bfloat16) for width in (130, 70))
    (qg, sg), (qx, sx) = (quantize.quantize_tokens(t, "pow2") for t in (g, x))
    args = (qg.t().contiguous(), sg, qx.t().contiguous(), sx)
    main = torch.randn(130, 70, generator=gen)
    expected = main + wgrad(*args, torch.float32)
    assert wgrad(*args, add_to=main) is main and torch.equal(main, expected)


@pytest.mark.parametrize(("N", "G"), [(40, 1), (256, 3), (300, 33), (384, 70)])
def test_block_scales_of_rows(N, G):
    s = torch.rand(-(-N // 128), G)
    rows = quantize.expand_weight_scale(s, N)
    assert torch.equal(block_scales(rows), s) and torch.equal(block_scales(rows.t().contiguous().t()), s)
    rows[N - 1, 0] += 1  # a block whose rows differ is detected
    rows[0, G - 1] = float("nan")
    found = block_scales(rows)
    assert torch.equal(found.isnan(), in_torch(rows).isnan()) and found.isnan().sum() == 2 - (N == 40)
    assert torch.equal(found.nan_to_num(), in_torch(rows).nan_to_num())


def test_empty_batches():
    x, s, w, rows = operands(3, 64, 256)
    assert fprop(x[:0], s[:0], w, rows).shape == (0, 64)
    _, s_blocks = quantize.quantize_weight(torch.ones(64, 256), "pow2")
    assert dgrad(w.new_zeros(0, 64), s.new_zeros(0, 1), w, s_blocks).shape == (0, 256)
    empty = w.new_zeros(64, 0), s.new_zeros(0, 64), w.new_zeros(32, 0), s.new_zeros(0, 32)
    assert torch.equal(wgrad(*empty), torch.zeros(64, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda a: (a[0].float(), *a[1:]), TypeError, "X: expected torch.float8_e4m3fn"),
        (lambda a: (a[0], a[1].double(), *a[2:]), TypeError, "X: .* found .* torch.float64"),
        (lambda a: (*a[:2], a[2].view(torch.uint8), a[3]), TypeError, "W: expected"),
        (lambda a: (a[0], a[1][:, :1], *a[2:]), ValueError, r"X: \[3, 256\] needs scales of shape \[3, 2\]"),
        (lambda a: (*a[:3], a[3][:3]), ValueError, r"W: \[64, 256\] needs scales of shape \[64, 2\]"),
        (lambda a: (*a[:2], a[2][:, :128], a[3]), ValueError, "differ in K"),
        (lambda a: (*a, torch.float16), TypeError, "found torch.float16"),
        (lambda a: (*a, torch.bfloat16, 4), ValueError, "without cutting a block"),
        (lambda a: (*a, torch.bfloat16, 0), ValueError, "without cutting a block"),
        (lambda a: (*a[:3], a[3].to("meta")), ValueError, "operands are on several devices: cpu, meta"),
        (lambda a: (*a[:2], a[2].to("meta"), a[3].to("meta")), ValueError, "several devices: cpu, meta"),
    ],
)
def test_wrong_operands_of_fprop(change, error, match):
    with pytest.raises(error, match=match):
        fprop(*change(operands(3, 64, 256)))


def test_wrong_operands_of_the_gradients():
    x, s, w, _ = operands(3, 64, 256)
    blocks = torch.ones(1, 2)
    g, sg = w.new_zeros(3, 64), torch.ones(3, 1)
    with pytest.raises(ValueError, match="differ in N"):
        dgrad(x, s, w, blocks)
    with pytest.raises(ValueError, match=r"W: .* needs scales of shape \[1, 2\], found \[64, 2\]"):
        dgrad(g, sg, w, torch.ones(64, 2))
    with pytest.raises(TypeError, match=r"found torch\.float16"):
        dgrad(g, sg, w, blocks, torch.float16)
    with pytest.raises(ValueError, match="number of tokens"):
        wgrad(g, torch.ones(1, 3), x, torch.ones(2, 3))
    ok = w.new_zeros(4, 256), torch.ones(2, 4), w.new_zeros(8, 256), torch.ones(2, 8)
    for wrong in (torch.zeros(4, 8).bfloat16(), torch.zeros(8, 4), torch.zeros(8, 4).t()):
        with pytest.raises(ValueError, match="a main gradient must be"):
            wgrad(*ok, add_to=wrong)
