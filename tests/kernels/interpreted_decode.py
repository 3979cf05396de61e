"""FProp of a few rows in one launch: bit-equal to the quantizer followed by the product."""

from __future__ import annotations

import pytest
import torch
import triton

from benchmarks.hopper import kernels
from benchmarks.shapes import Model
from jetrl_patch.backends import get_backend
from jetrl_patch.backends import quantize as reference
from jetrl_patch.backends.gpu import TritonBackend
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.backends.row_equality import DECODED, compare_rows
from jetrl_patch.kernels import gemm, gemm_common, quantize

from .interpreted_gemm import FORMATS
from .interpreted_quantize import data

assert triton.knobs.runtime.interpret
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SHAPES = [(1, 128, 128), (7, 200, 320), (64, 130, 257), (33, 17, 129)]  # M, N, K


def weight(N: int, K: int, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(N + K)) * K**-0.5
    q, s_blocks = reference.quantize_weight(w, scale_format)
    return q, reference.expand_weight_scale(s_blocks, N)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    nan = b.isnan()
    return a.dtype == b.dtype and torch.equal(a.isnan(), nan) and torch.equal(a[~nan].view(kind), b[~nan].view(kind))


@pytest.mark.pairs
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("kind", ["wide", "not finite"])
@pytest.mark.parametrize("columns", [32, 64, 128])
def test_one_launch_equals_two_and_the_tile_of_many_rows(shape, scale_format, kind, columns, monkeypatch):
    """Whatever the tile, and whether scales are read per row or per block."""
    M, N, K = shape
    tile = next(tile for tile in gemm_common.FEW if tile.columns == columns)
    monkeypatch.setattr(gemm, "few_tile_for", lambda N, tiles=(): tile)
    x, (q, s) = data(kind, (M, K)), weight(N, K, scale_format)
    blocks, operand = s[::128].contiguous(), quantize.quantize_rows(x, scale_format)
    for out_dtype in (torch.bfloat16, torch.float32):
        expected = many_rows(*operand, q, s, out_dtype)
        assert same(gemm.fprop(*operand, q, s, out_dtype), expected)
        assert same(gemm.fprop(*operand, q, blocks, out_dtype), expected)
        assert same(gemm.fprop_few(x, q, s, scale_format, out_dtype), expected)
        assert same(gemm.fprop_few(x, q, blocks, scale_format, out_dtype), expected)
    assert (kind == "not finite") == bool(expected.isnan().any())


def many_rows(q_MK, s_MG, w_NK, s_NG, out_dtype):
    """The rows of a training batch."""
    rows, copies = q_MK.shape[0], gemm_common.FEW_ROWS // q_MK.shape[0] + 1
    q, s = (t.view(torch.uint8).repeat(copies, 1).view(t.dtype) for t in (q_MK, s_MG))
    assert q.shape[0] > gemm_common.FEW_ROWS
    return gemm.fprop(q, s, w_NK, s_NG, out_dtype)[:rows]


def test_rows_may_have_a_stride_and_scales_any_layout():
    wide, (q, s) = data("wide", (9, 300)), weight(70, 256, "pow2")
    x = wide[::2, 8:264]
    y = gemm.fprop_few(x.contiguous(), q, s, "pow2")
    assert same(gemm.fprop_few(x, q, s, "pow2"), y) and same(gemm.fprop_few(x, q, s.t().contiguous().t(), "pow2"), y)


def test_the_backend_takes_it_for_few_rows_alone(monkeypatch):
    taken, original = [], gemm.fprop_few
    monkeypatch.setattr(gemm, "fprop_few", lambda x, *a: taken.append(x.shape[0]) or original(x, *a))
    backend, w = get_backend("triton"), Quantized(*weight(64, 256, "pow2"), "rows", "pow2")
    x = data("wide", (gemm.FEW_TOKENS + 1, 256))
    whole = backend.fprop(x, w)
    assert taken == []
    for rows in (1, 7, gemm.FEW_TOKENS):
        assert same(backend.fprop(x[:rows], w), whole[:rows])
    assert taken == [1, 7, gemm.FEW_TOKENS]
    assert same(backend.fprop(x[:3], w, splits=2), backend.fprop(x, w, splits=2)[:3])
    assert len(taken) == 3  # two ranges of K are two launches


def test_what_a_trial_refuses_is_given_up(monkeypatch):
    """From then on few rows take the tile of many."""
    backend, x = TritonBackend(), data("wide", (3, 256))
    w = Quantized(*weight(64, 256, "pow2"), "rows", "pow2")
    expected, taken = backend.fprop(x, w), []
    assert backend.give_up_few_rows() and not backend.give_up_few_rows() and backend.few() == 0
    for module, name in ((gemm, "fprop_few"), (gemm, "few_tile_for")):
        monkeypatch.setattr(module, name, lambda *a: taken.append(a))
    assert same(backend.fprop(x, w), expected) and not taken


def test_the_trial_of_rows_covers_both_ways():
    few = [rows for rows in DECODED if rows <= gemm.FEW_TOKENS]
    assert gemm.FEW_TOKENS in few and 1 in few and max(DECODED) > gemm.ROWS
    assert compare_rows(get_backend("triton"), (64, 256), "cpu", trained=140, decoded=(1, 7, gemm.FEW_TOKENS)).ok


def test_the_trial_sees_one_launch_that_rounds_otherwise(monkeypatch):
    original = gemm.fprop_few
    monkeypatch.setattr(gemm, "fprop_few", lambda x, *a: original(x * 1.01, *a))
    verdict = compare_rows(get_backend("triton"), (64, 256), "cpu", trained=140, decoded=(7,))
    assert not verdict.ok and "at M = 7 differ" in verdict.found


def test_empty_batches():
    assert gemm.fprop_few(data("wide", (0, 256)), *weight(64, 256, "pow2"), "pow2").shape == (0, 64)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda x, q, s: (x.float(), q, s, "pow2"), TypeError, "required torch.bfloat16, found torch.float32"),
        (lambda x, q, s: (x.t(), q, s, "pow2"), ValueError, "contiguous rows"),
        (lambda x, q, s: (x.repeat(22, 1), q, s, "pow2"), ValueError, "at most 64 rows, found 66"),
        (lambda x, q, s: (x[:, :128], q, s, "pow2"), ValueError, "differ in K"),
        (lambda x, q, s: (x, q.view(torch.uint8), s, "pow2"), TypeError, "W: expected"),
        (lambda x, q, s: (x, q, s[:, :1], "pow2"), ValueError, r"needs scales of shape \[64, 2\]"),
        (lambda x, q, s: (x, q, s, "pow3"), ValueError, "pow2 or fp32"),
        (lambda x, q, s: (x, q, s, "pow2", torch.float16), TypeError, "found torch.float16"),
        (lambda x, q, s: (x, q.to("meta"), s.to("meta"), "pow2"), ValueError, "several devices: cpu, meta"),
    ],
)
def test_wrong_operands(change, error, match):
    with pytest.raises(error, match=match):
        gemm.fprop_few(*change(data("wide", (3, 256)), *weight(64, 256, "pow2")))


def test_the_benchmarks_run_on_this_backend():
    """Run the calls that ``make hopper`` times on Triton."""
    tiny = Model("tiny", hidden=128, intermediate=128, heads=1, kv_heads=1, head_dim=128)
    cases = ((kernels.FPROP, 16), (kernels.LAYER, 16), (kernels.DECODE, 7))
    rows = list(kernels.linears(tiny, {"triton": get_backend("triton")}, torch.device("cpu"), cases))
    assert [row["way"] for row in rows] == ["BF16", "triton"] * 3 and not [row for row in rows if row["note"]]
