"""The operands of DeepGEMM for every shape of trainer and rollout, and its test double."""

from __future__ import annotations

import heapq
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jetrl_patch import backends
from jetrl_patch.backends import deep_gemm, get_backend, quantize, rowwise
from jetrl_patch.backends.deep_gemm import DeepGemmBackend, packed, pitched, row_major
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State

from . import deep_gemm_double as double
from .deep_gemm_double import DeepGemm, Refused
from .scaled_mm_double import scaled_mm
from .test_backends import by_rows
from .thresholds import SQNR_GEMM, sqnr

BF16, FP32 = torch.bfloat16, torch.float32
FACTS = json.loads((Path(__file__).parents[1] / "anchors" / "deep_gemm.json").read_text())["sources"]
#: rows of decode batches, both sides of each bound of the heuristic, and a large training batch
ROWS = (1, 7, 16, 17, 31, 32, 33, 63, 64, 65, 200, 511, 512, 2056, 16384)
#: N, K: the smallest, odd multiples of 16, partial blocks, and a wide one
WIDTHS = ((16, 16), (48, 144), (128, 128), (320, 1008), (1152, 896))


@pytest.fixture
def library(monkeypatch):
    module = DeepGemm()
    monkeypatch.setattr(deep_gemm, "find_deep_gemm", lambda: (module, "deep_gemm"))
    return module


def operands(M, N, K, scale_format="pow2"):
    g = torch.Generator().manual_seed(M + N + K)
    x = (torch.randn(M, K, generator=g) * torch.exp(torch.randn(M, 1, generator=g))).to(BF16)
    return x, quantize.quantize_weight(torch.randn(N, K, generator=g), scale_format)


@pytest.mark.parametrize(("N", "K"), WIDTHS)
def test_every_number_of_rows(library, N, K):
    ours, oracle = DeepGemmBackend(), get_backend("torch")
    for M in ROWS if N * K < 10**5 else ROWS[:-2]:
        x, w = operands(M, N, K)
        for dtype in (BF16, FP32):
            expected = oracle.fprop(x, w, dtype)
            for held in (w, by_rows(w), replace(by_rows(w), s_blocks=w.s)):
                assert torch.equal(ours.fprop(x, held, dtype), expected), (M, dtype)
    assert {kernel for kernel, *_ in library.calls} == {"1d1d", "1d2d"} and library.copies == 0


def test_a_weight_in_blocks_needs_no_scales_per_row(library):
    ours, (x_MK, w) = DeepGemmBackend(), operands(300, 320, 1008)
    x, expected = quantize.quantize_activation(x_MK, "pow2"), get_backend("torch").fprop(x_MK, replace(w))
    assert torch.equal(ours.gemm(x, w, BF16), expected) and w._s_rows is None
    with pytest.raises(ValueError, match="inputs of width 1008"):
        ours.gemm(x.columns(0, 128), w, BF16)
    with pytest.raises(ValueError, match=r"W: \[320, 1008\] needs scales of shape \[3, 8\]"):
        ours.gemm(x, replace(w, s=w.s_rows), BF16)
    x_MK, w = operands(300, 48, 1024)
    x = quantize.quantize_activation(x_MK, "pow2")
    for dtype, splits in ((FP32, 1), (BF16, 4)):
        assert torch.equal(ours.gemm(x, w, dtype, splits), ours.gemm(x, by_rows(w), dtype, splits))
    assert torch.equal(w._s_rows, quantize.expand_weight_scale(w.s, 48))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("M", [1, 32, 33, 300])
def test_partial_sums_of_tensor_parallel_ranks(library, ranks, M, monkeypatch):
    """The library adds each range of K to the same tensor: no zeros and no sum of a tensor per rank."""
    ours, oracle = DeepGemmBackend(), get_backend("torch")
    x, w = operands(M, 48, 128 * 8 * 3)
    outputs, product = [], library.fp8_gemm_nt
    monkeypatch.setattr(library, "fp8_gemm_nt", lambda *a, **k: outputs.append(a[2].data_ptr()) or product(*a, **k))
    whole = ours.fprop(x, w, splits=ranks)
    assert len(outputs) == ranks and len(set(outputs)) == 1
    assert torch.equal(whole, oracle.fprop(x, w, splits=ranks))
    K, total = 3072 // ranks, None
    for k in range(0, 3072, K):
        q, s = (t.contiguous() for t in w.columns(k, k + K))
        part = ours.fprop(x[:, k : k + K].contiguous(), Quantized(q, s, "rows", "pow2"), FP32)
        total = part if total is None else total + part
    assert torch.equal(total.to(BF16), whole)


@pytest.mark.parametrize(("N", "K"), [(16, 16), (32, 144), (320, 1008), (128, 16)])
@pytest.mark.parametrize("M", [1, 33, 300])
def test_gradients(library, M, N, K):
    ours, oracle = DeepGemmBackend(), get_backend("torch")
    x_MK, w = operands(M, N, K)
    g = torch.randn(M, N, generator=torch.Generator().manual_seed(1)).to(BF16)
    x = ours.quantize_activation(x_MK, "pow2")
    for dtype in (BF16, FP32):
        found = ours.gradients(g, x, w, (dtype, dtype))
        expected = oracle.gradients(g, x, w, (FP32, FP32))
        for mine, theirs in zip(found, expected):
            assert mine.dtype == dtype and mine.shape == theirs.shape and sqnr(mine, theirs) > SQNR_GEMM
    assert library.copies == 0


def transposed(M, N, K):
    """WGrad's operands, as the quantizers hand them over."""
    g = torch.Generator().manual_seed(0)
    ours = DeepGemmBackend()
    return *(ours.quantize_transposed(torch.randn(M, width, generator=g).to(BF16), "pow2") for width in (N, K)), ours


@pytest.mark.parametrize(("N", "K"), [(16, 48), (48, 16), (320, 1008)])
def test_a_main_gradient_is_added_to_in_the_product(library, N, K, monkeypatch):
    g, x, ours = transposed(300, N, K)
    handed, product = [], library.fp8_gemm_nt
    monkeypatch.setattr(library, "fp8_gemm_nt", lambda *a, c, **k: handed.append((c, a[2])) or product(*a, c=c, **k))
    kinds = {"whole": torch.randn(N, K), "turned": torch.randn(K, N).t(), "shifted": torch.randn(N * K + 1)[1:].view(N, K)}
    for kind, main in kinds.items():
        expected = main + ours.wgrad_product(g, x, FP32)
        handed.clear()
        ours.add_wgrad_product(g, x, main)
        assert torch.equal(main, expected)
        direct = kind == "whole" and N > deep_gemm.FEW  # fewer rows are padded for its tile
        assert len(handed) == 1 and (handed[0][0] is handed[0][1] is main) == direct


def test_a_weight_gradient_compiles_nothing_for_another_number_of_tokens(library):
    for tokens in (300, 1024, 1100, 4000):
        g, x, ours = transposed(tokens, 320, 1008)
        ours.wgrad_product(g, x, FP32)
        ours.add_wgrad_product(g, x, torch.zeros(320, 1008))
    assert len(library.calls) == 8 and len({kernel[:3] for kernel in library.compiled}) == 1
    assert {kernel[:3] for kernel in library.compiled} == {("1d1d", 320, 1008)}
    assert len(library.compiled) <= 2  # the tile follows from the sizes, too


def test_a_weight_gradient_in_bf16_is_rounded_in_the_product(library, monkeypatch):
    monkeypatch.setattr(deep_gemm, "check_cublaslt", lambda: (True, "CUDA 12.9"))
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    g, x, ours = transposed(300, 48, 144)
    found = ours.wgrad_product(g, x, BF16)
    assert not library.calls and found.dtype == BF16
    assert torch.equal(found, ours.wgrad_product(g, x, FP32).to(BF16)) and len(library.calls) == 1
    g, x = (replace(t, q=t.q[:, :0], s=t.s[:0]) for t in (g, x))
    assert not ours.wgrad_product(g, x, BF16).any()  # no tokens


@pytest.mark.parametrize("M", [1, 40])
def test_rows_whose_scales_make_no_blocks(library, M):
    """A slice that starts inside a block, and scales per channel: no block scale exists, the sum is the same."""
    x, w = operands(M, 384, 256)
    part = w.rows(slice(64, 352))
    assert torch.equal(DeepGemmBackend().fprop(x, part), get_backend("torch").fprop(x, part))
    w = rowwise.quantize_fp8_rows(torch.randn(48, 256), "fp32")
    found, expected = (b.fprop(x, w) for b in (DeepGemmBackend(), get_backend("torch")))
    assert torch.equal(found, expected)


def test_empty_batches(library):
    x, w = operands(0, 64, 256)
    ours = DeepGemmBackend()
    for dtype in (BF16, FP32):
        assert ours.fprop(x, w, dtype).shape == (0, 64)
    dw = ours.wgrad(x.new_zeros(0, 64), ours.quantize_activation(x, "pow2"), FP32)
    assert torch.equal(dw, torch.zeros(64, 256)) and not library.calls


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 1), (3, 5), (8, 1), (8, 5)])
def test_layouts_of_scales(shape):
    wide = torch.rand(shape[0] + 1, shape[1] + 1)
    for s in (wide[1:, 1:], wide[1:, 1:].contiguous(), wide[:-1, :-1].t().contiguous().t()):
        columns, rows = pitched(s), row_major(s)
        assert columns.stride() == (1, -(-shape[0] // 4) * 4) and columns.data_ptr() % 16 == 0
        assert rows.stride() == (shape[1], 1) and torch.equal(columns, s) and torch.equal(rows, s)
        assert pitched(columns) is columns
    column = torch.rand(4, 4).t()[1:]  # four rows' pitch for three rows, at an address that TMA cannot take
    assert column.stride() == (1, 4) and pitched(column).data_ptr() % 16 == 0


def test_matrices_are_copied_only_where_they_must_be():
    q = torch.zeros(4, 256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert packed(q) is q and packed(q[2:]).data_ptr() == q[2:].data_ptr()
    for other in (q[:, :128], torch.zeros(257, dtype=torch.uint8)[1:].view(torch.float8_e4m3fn).view(2, 128)):
        assert packed(other).stride() == (128, 1) and packed(other).data_ptr() % 16 == 0


def call(library, change, M=64, N=48, K=256, recipe=deep_gemm.ROWS):
    x, w = operands(M, N, K)
    (a, sa), q, rows, blocks = quantize.quantize_activation(x, "pow2"), w.q, w.s_rows, w.s
    fp32 = recipe == deep_gemm.ROWS
    d = torch.zeros(M, N, dtype=FP32 if fp32 else BF16)
    given = {"a": a, "sa": sa, "b": q, "sb": rows if fp32 else blocks, "d": d, "c": d if fp32 else None, "recipe": recipe}
    given |= change(given)
    library.fp8_gemm_nt((given["a"], given["sa"]), (given["b"], given["sb"]), given["d"], given["c"], given["recipe"])
    return given["d"]


REFUSED = [
    (deep_gemm.ROWS, lambda g: {"a": torch.cat((g["a"], g["a"]), 1)[:, :256]}, "wrong memory"),
    (deep_gemm.ROWS, lambda g: {"b": torch.cat((g["b"], g["b"]), 1)[:, :256]}, "wrong memory"),
    (deep_gemm.ROWS, lambda g: {"c": None}, "adds to an FP32"),
    (deep_gemm.ROWS, lambda g: {"d": g["d"].to(BF16), "c": g["d"].to(BF16)}, "c is FP32"),
    (deep_gemm.ROWS, lambda g: {"sb": g["sb"][:1]}, "one FP32 scale per row"),
    (deep_gemm.ROWS, lambda g: {"sa": g["sa"].double()}, "one FP32 scale per row"),
    (deep_gemm.ROWS, lambda g: {"recipe": (1, 128, 128)}, "one FP32 scale per block"),
    (deep_gemm.ROWS, lambda g: {"recipe": (1, 1, 32)}, "Unknown SF"),
    (deep_gemm.ROWS, lambda g: {"a": g["a"].to(BF16)}, "e4m3"),
    (deep_gemm.ROWS, lambda g: {"a": g["a"].view(torch.uint8).t().contiguous().t().view(torch.float8_e4m3fn)}, "K-major"),
    (deep_gemm.BLOCKS, lambda g: {"c": g["d"].float()}, "c is FP32"),
    (deep_gemm.BLOCKS, lambda g: {"d": g["d"].float()}, "writes BF16"),
    (deep_gemm.BLOCKS, lambda g: {"d": g["d"].t().contiguous().t()}, "N-major"),
    (deep_gemm.BLOCKS, lambda g: {"d": torch.zeros(64, 52, dtype=BF16)[:, :48]}, "row pitch"),
    (deep_gemm.BLOCKS, lambda g: {"d": torch.zeros(64 * 48 + 1, dtype=BF16)[1:].view(64, 48)}, "address"),
    (deep_gemm.BLOCKS, lambda g: {"sb": torch.ones(1, 3)[:, ::2]}, "contiguous"),
    (deep_gemm.BLOCKS, lambda g: {"sa": torch.ones(2, 65).reshape(-1)[1:129].view(2, 64).t()}, "scales' address"),
]


@pytest.mark.parametrize(("recipe", "change", "match"), REFUSED)
def test_the_double_refuses(recipe, change, match):
    library = DeepGemm()
    assert call(library, lambda g: {}, recipe=recipe).abs().sum() > 0  # without the change it computes
    with pytest.raises(Refused, match=match):
        call(library, change, recipe=recipe)


def test_the_double_adds_and_counts():
    library = DeepGemm()
    c = torch.full((64, 48), 2.0)
    found = call(library, lambda g: {"c": c})
    assert torch.equal(found, call(library, lambda g: {}) + c) and torch.equal(c, torch.full((64, 48), 2.0))
    assert library.copies == 4 and ("transpose", 2) in library.compiled and len(library.calls) == 2
    library.fp8_gemm_nt((torch.zeros(0, 16).to(torch.float8_e4m3fn), None), (torch.zeros(16, 16).to(torch.float8_e4m3fn), None),
                        torch.zeros(0, 16))  # fmt: skip
    assert len(library.calls) == 2


@pytest.mark.parametrize("M", [1, 16, 32])
def test_few_rows_may_meet_a_tile_that_does_not_compile(M):
    tiles = [double.best_tile("1d1d", M, N, K) for N in range(16, 8192, 336) for K in (128, 1024, 18944)]
    assert any(tile.block_m < 64 for tile in tiles)
    N = next(N for N in range(16, 8192, 16) if double.best_tile("1d1d", M, N, 1024).block_m < 64)
    with pytest.raises(Refused, match="NVCC compilation failed"):
        call(DeepGemm(), lambda g: {}, M=M, N=N, K=1024)


@pytest.mark.parametrize("revision", FACTS)
def test_the_double_has_the_library_s_numbers(revision):
    facts = FACTS[revision]
    assert facts["arguments"][:5] == ["a", "b", "d", "c", "recipe"]
    assert facts["a kernel is a folder renamed into the cache"]
    assert facts["shared memory"] == double.SHARED and facts["wgmma m"] == deep_gemm.TILE
    assert max(map(int, facts["block_m up to m"])) == deep_gemm.FEW
    assert facts["TMA bytes"] == deep_gemm.ALIGN == 4 * deep_gemm.PITCH
    assert facts["row pitch"] == {"1d1d": "k", "1d2d": "stride"} and facts["c and FP32"] == {"1d1d": True, "1d2d": False}
    assert facts["tiles below wgmma"] == {"1d1d": False, "1d2d": True}
    for kernel in ("1d1d", "1d2d"):
        tiles = double._candidates(kernel, 1, 4096, 4096, double.SMS)
        small, bf16 = map(int, facts["block_m up to m"].values()), [facts["block_m for BF16"]] * (kernel == "1d2d")
        assert {tile.block_m for tile in tiles} == {*facts["block_m"], *small, *bf16}
        assert max(tile.block_n for tile in tiles) <= facts["block_n ends"][kernel]
    for bound in map(int, facts["block_m up to m"]):
        assert bound in {tile.block_m for tile in double._candidates("1d2d", bound, 64, 64, double.SMS)}
        assert bound not in {tile.block_m for tile in double._candidates("1d2d", bound + 1, 64, 64, double.SMS)}


@pytest.mark.parametrize(("N", "K"), [(48, 256), (896, 4864), (4608, 3584), (37888, 3584)])
@pytest.mark.parametrize("most", [1, 31, 600, 2100])
def test_the_rows_to_compile_for_meet_every_tile(library, N, K, most):
    rows = DeepGemmBackend().compiled_rows(most)
    assert len(rows) == len({*rows}) and min(rows) >= 1 and max(rows) == most
    for kernel, least in (("1d1d", deep_gemm.TILE), ("1d2d", 1)):
        tiles = {double.best_tile(kernel, max(M, least), N, K) for M in rows}
        assert tiles == {double.best_tile(kernel, max(M, least), N, K) for M in range(1, most + 1)}


# ---- Compile before the first use ----------------------------------------------------------------

def shared(orders):
    """Compilations of the slowest rank, if each makes its products in its own order and a finished kernel serves all."""
    built, done = {}, [(0, rank) for rank in range(len(orders))]
    heapq.heapify(done)
    left, end = [iter(order) for order in orders], 0
    while done:
        now, rank = heapq.heappop(done)
        kernel = next((kernel for kernel in left[rank] if built.get(kernel, now + 1) > now), None)
        end = max(end, now)
        if kernel is not None:
            built[kernel] = min(built.get(kernel, now + 1), now + 1)
            heapq.heappush(done, (now + 1, rank))
    return end


def test_ranks_share_the_kernels_of_a_model(library):
    """An engine of Qwen2.5-7B: its four shapes, as ``compare_rows`` and ``warm_up`` go through them."""
    random.seed(0)
    shapes, ours = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)), DeepGemmBackend()

    def order():
        random.seed(0)  # every rank's framework
        return [(N, K, double.best_tile("1d2d", M, N, K)) for N, K in shapes for M in ours.compiled_rows(8192)]

    orders = [order() for _ in range(8)]
    every = len({*orders[0]})
    assert every == shared(orders[:1]) == shared([sorted(orders[0])] * 8) == 59
    assert shared(orders) < every / 2


@pytest.fixture
def trained(library, monkeypatch):
    """A trainer's step over ``tokens`` through a layer [N, K]."""
    monkeypatch.setitem(backends._LOADED, "deep_gemm", ours := DeepGemmBackend())
    ours.rounds = True
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    layer = Fp8Linear(256, 384, bias=False, dtype=BF16)

    def step(tokens, splits=1):
        layer.fp8 = Fp8State("pow2", "deep_gemm", splits)
        x = torch.randn(tokens, 256, dtype=BF16, requires_grad=True)
        layer(x).sum().backward()

    return step


@pytest.mark.parametrize(("splits", "kernel"), [(1, "1d2d"), (2, "1d1d")])
def test_a_trainer_compiles_in_its_first_step_alone(library, trained, splits, kernel):
    trained(600, splits)
    compiled = set(library.compiled)
    assert {fixed[:3] for fixed in compiled} == {(kernel, 384, 256 // splits), ("1d2d", 256, 384)}
    calls, batches = len(library.calls), (*range(128, 1024, 56), 1024)
    for tokens in batches:
        trained(tokens, splits)
    assert library.compiled == compiled
    assert len(library.calls) - calls == len(batches) * (splits + 1)  # forward and dX alone
    trained(1025, splits)
    assert {M for _, M, *_ in library.calls} >= {2048, 1025}


@pytest.mark.parametrize(("N", "K"), [(512, 3584), (3584, 18944)])
def test_long_batches_need_few_products_to_meet_every_tile(library, monkeypatch, N, K):
    ours, rows = DeepGemmBackend(), []
    monkeypatch.setattr(ours, "_blocks", lambda a, sa, b, sb: rows.append(a.shape[0]))
    ours._ahead(20000, N, K, True, torch.device("meta"))
    assert len(rows) == 225 and min(rows) == 4096 and max(rows) == 32768
    tiles = {double.best_tile("1d2d", M, N, K) for M in rows}
    assert tiles == {double.best_tile("1d2d", M, N, K) for M in range(4096, 32768, 61)}


def test_kernels_that_cannot_be_compiled_ahead_are_compiled_when_used(library, trained, monkeypatch, caplog):
    product = library.fp8_gemm_nt

    def small(a, b, d, **options):
        if len(d) > 600:
            raise torch.OutOfMemoryError("CUDA out of memory")
        product(a, b, d, **options)

    monkeypatch.setattr(library, "fp8_gemm_nt", small)
    trained(600)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        f"FP8 kernels for {shape} are compiled when first used: CUDA out of memory" for shape in ([384, 256], [256, 384])
    ]
    trained(600)
    assert len(caplog.records) == 2 and [M for _, M, *_ in library.calls][-2:] == [600, 600]
