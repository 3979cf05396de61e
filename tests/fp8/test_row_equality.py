"""The trial of fused and sliced weights: it passes products whose rows do not depend on N, and names the others."""

from __future__ import annotations

import functools

import pytest
import torch

from jetrl_patch.backends import deep_gemm, get_backend, row_equality
from jetrl_patch.backends.deep_gemm import DeepGemmBackend
from jetrl_patch.backends.row_equality import Layout, Part, compare_parts, compare_rows
from jetrl_patch.errors import ModelError

from .deep_gemm_double import DeepGemm, best_tile

#: (shape, layout): a fused qkv; rank 1 of 2 of it, which starts inside blocks; gate_up, whole and sliced; a range of K
LAYOUTS = {
    "qkv": ((1152, 256), Layout((Part(896, 0, 896, 0), Part(128, 0, 128, 896), Part(128, 0, 128, 1024)))),
    "qkv of rank 1": ((576, 256), Layout((Part(896, 448, 896, 0), Part(128, 64, 128, 448), Part(128, 64, 128, 512)))),
    "gate_up": ((768, 128), Layout((Part(384, 0, 384, 0), Part(384, 0, 384, 384)))),
    "gate_up of rank 1": ((384, 128), Layout((Part(384, 192, 384, 0), Part(384, 192, 384, 192)))),
    "slice in blocks": ((256, 128), Layout((Part(512, 256, 512, 0),))),
    "down of 4": ((96, 256), Layout((Part(96, 0, 96, 0),), 4)),
}
BATCHES = (1, 40)


class ByTile(DeepGemm):
    """A library whose wide tiles round differently."""

    def product(self, a, sa, b, sb, out_dtype, tile):
        y = super().product(a, sa, b, sb, out_dtype, tile)
        return y * (1 + 2**-6) if tile.block_n > 64 else y


class ByN(type(get_backend("torch"))):
    """Uses another kernel from N = 500 on, as this project's own tiles do from 8192 on."""

    name = "by-n"

    def gemm(self, x, w, out_dtype, splits=1):
        y = super().gemm(x, w, torch.float32, splits)
        return (y * (1 + 2**-6 * (len(w.q) >= 500))).to(out_dtype)


class Rounding(type(get_backend("torch"))):
    """Rounds the sum of every range of K, as an all-reduce in BF16 does."""

    name = "rounding"

    def gemm(self, x, w, out_dtype, splits=1):
        y = super().gemm(x, w, out_dtype, splits)
        return y.to(torch.bfloat16).to(out_dtype)


class Backwards(type(get_backend("torch"))):
    """Adds the ranges of K in the other order, which rounding to BF16 nearly always hides."""

    name = "backwards"

    def gemm(self, x, w, out_dtype, splits=1):
        step, gemm = x.shape[1] // splits, super().gemm
        ends = range(x.shape[1], 0, -step)
        parts = (gemm(x.columns(k - step, k), w.columns(k - step, k), torch.float32) for k in ends)
        return functools.reduce(torch.add, parts).to(out_dtype)


@pytest.fixture
def use(monkeypatch):
    def make(library):
        monkeypatch.setattr(deep_gemm, "find_deep_gemm", lambda: (library, "deep_gemm"))
        return DeepGemmBackend()

    return make


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_what_keeps_the_promise_passes(name, scale_format, use):
    shape, layout = LAYOUTS[name]
    for backend in (get_backend("torch"), get_backend("native"), use(DeepGemm())):
        verdict = compare_parts(backend, shape, layout, "cpu", scale_format, BATCHES)
        assert verdict.ok, (backend.name, verdict.found)


def test_a_slice_that_starts_inside_a_block_is_multiplied_by_rows(use):
    assert not LAYOUTS["qkv of rank 1"][1].in_blocks and not LAYOUTS["gate_up of rank 1"][1].in_blocks
    assert LAYOUTS["qkv"][1].in_blocks and LAYOUTS["slice in blocks"][1].in_blocks
    library = DeepGemm()
    compare_parts(use(library), *LAYOUTS["qkv of rank 1"], "cpu", batches=BATCHES)
    assert {(kernel, N) for kernel, _, N, _ in library.calls} == {("1d2d", 896), ("1d2d", 128), ("1d1d", 576)}


@pytest.mark.parametrize(
    ("backend", "name", "match"),
    [
        (ByN, "qkv", r"values at M = 1 differ between rows 0 to 128 of a weight \[128, 256\] and the same rows in one of \[1152"),
        (ByN, "slice in blocks", r"rows 256 to 512 of a weight \[512, 128\]"),
        (Backwards, "down of 4", r"values at M = 1 differ between rows 0 to 96 of a weight"),
        (Rounding, "down of 4", r"a weight \[96, 1024\] and the same rows in one of \[96, 256\] on 4 ranks"),
    ],
)
def test_what_depends_on_n_is_named(backend, name, match):
    verdict = compare_parts(backend(), *LAYOUTS[name], "cpu", batches=BATCHES)
    assert not verdict.ok
    with pytest.raises(AssertionError, match=match):
        raise AssertionError(verdict.found)


def test_a_tile_that_rounds_otherwise_is_found(use):
    verdict = compare_parts(use(ByTile()), *LAYOUTS["qkv"], "cpu", batches=(1, 600))
    assert not verdict.ok


class ByHeight(DeepGemm):
    """A library that rounds differently in one tile, which some batches between those of ``DECODED`` use."""

    def product(self, a, sa, b, sb, out_dtype, tile):
        y = super().product(a, sa, b, sb, out_dtype, tile)
        return y * (1 + 2**-6) if (tile.block_m, tile.block_n) == self.odd else y


def test_every_kernel_that_serves_is_tried(use):
    shape, trained, most = (512, 256), 2200, 2056
    tiles = lambda batches: {best_tile("1d2d", M, *shape)[:2] for M in batches}  # noqa: E731
    between = tiles(range(1, most + 1)) - tiles((*row_equality.DECODED, trained))
    assert between
    for odd in between:
        library = ByHeight()
        library.odd = odd
        backend = use(library)
        whole = Layout((Part(512, 0, 512, 0),))
        assert compare_rows(backend, shape, "cpu", "pow2", trained, layout=whole).ok
        verdict = compare_rows(backend, shape, "cpu", "pow2", trained, layout=whole, most=most)
        assert not verdict.ok and "differ from those at M = 2200" in verdict.found
        assert {kernel for kernel, *_ in library.calls} == {"1d2d"}  # what this rollout never calls is not compiled


def test_a_longer_batch_of_the_trainer_is_tried(use):
    shape, layout = LAYOUTS["gate_up"]
    library = ByHeight()
    library.odd = best_tile("1d2d", 2200, 384, 128)[:2]
    assert library.odd not in {best_tile("1d2d", M, N, 128)[:2] for M in BATCHES for N in (384, 768)}
    assert compare_parts(use(library), shape, layout, "cpu", batches=BATCHES).ok
    verdict = compare_parts(use(library), shape, layout, "cpu", batches=BATCHES, longer=(2200,))
    assert not verdict.ok and "a weight [384, 128] differ between M = 40 and M = 2200" in verdict.found


@pytest.mark.parametrize(("name", "kernels"), [("down of 4", {"1d1d"}), ("qkv of rank 1", {"1d1d"}), ("qkv", {"1d2d"})])
def test_a_layer_is_tried_with_the_product_that_it_serves(name, kernels, use):
    shape, layout = LAYOUTS[name]
    library = DeepGemm()
    assert compare_rows(use(library), shape, "cpu", "pow2", 70, (1, 7), layout).ok
    assert {kernel for kernel, *_ in library.calls} == kernels


class ByFew(type(get_backend("torch"))):
    """A tile of few rows that rounds differently and is not essential."""

    name, few = "by-few", 64

    def gemm(self, x, w, out_dtype, splits=1):
        y = super().gemm(x, w, torch.float32, splits)
        return (y * (1 + 2**-6 * (len(x.q) <= self.few))).to(out_dtype)

    def give_up_few_rows(self):
        had, self.few = self.few > 0, 0
        return had


def test_kernels_of_few_rows_are_given_up_before_the_backend_is(monkeypatch, caplog):
    monkeypatch.setattr(row_equality, "_PROVEN", set())
    monkeypatch.setattr(row_equality, "LONG", (70, 80))
    compare, parts = row_equality.compare_rows, row_equality.compare_parts
    monkeypatch.setattr(row_equality, "TRAINED", 66)
    monkeypatch.setattr(row_equality, "compare_rows", lambda b, shape, device, *a: compare(b, shape, "cpu", *a))
    monkeypatch.setattr(row_equality, "compare_parts", lambda b, s, layout, d, f, *a: parts(b, s, layout, "cpu", f, (1, 40), ()))
    backend, device = ByFew(), torch.device("meta")  # in place of a GPU
    assert row_equality.require_row_equality(backend, *LAYOUTS["qkv"][:1], device, "pow2", LAYOUTS["qkv"][1])
    assert backend.few == 0 and "decodes with the kernels of long batches" in caplog.text
    with pytest.raises(ModelError, match="'by-n' in a rollout"):  # has none to give up
        row_equality.require_row_equality(ByN(), *LAYOUTS["qkv"][:1], device, "pow2", LAYOUTS["qkv"][1])


@pytest.mark.parametrize(("most", "trained"), [(300, row_equality.LONG[1]), (32768, 32768)])
def test_the_largest_batch_of_an_engine_is_tried(monkeypatch, most, trained):
    asked = []
    monkeypatch.setattr(row_equality, "_PROVEN", set())
    monkeypatch.setattr(row_equality, "compare_rows", lambda *a: asked.append(a[4]) or row_equality.Verdict(True, "equal"))
    row_equality.require_row_equality(ByN(), (128, 128), torch.device("meta"), "pow2", None, most)
    assert asked == [trained]


def test_an_engine_refuses_to_start(monkeypatch):
    device, asked = torch.device("meta"), []  # in place of a GPU: only a CPU is exempt
    monkeypatch.setattr(row_equality, "_PROVEN", set())
    monkeypatch.setattr(row_equality, "compare_rows", lambda *a: row_equality.Verdict(True, "equal"))
    monkeypatch.setattr(row_equality, "compare_parts", lambda *a: asked.append(a) or row_equality.Verdict(False, "3 differ"))
    shape, layout = LAYOUTS["qkv"]
    row_equality.require_row_equality(ByN(), shape, device)
    row_equality.require_row_equality(ByN(), shape, device, "pow2", Layout((Part(1152, 0, 1152, 0),)))
    assert not asked  # the trainer's weight as it is
    with pytest.raises(ModelError, match=r"'by-n' in a rollout.*\[1152, 256\].*3 differ.*JETRL_BACKEND=triton"):
        row_equality.require_row_equality(ByN(), shape, device, "pow2", layout)
    monkeypatch.setattr(ByN, "name", "triton")
    with pytest.raises(ModelError, match='"fp8-rollout" with a correction'):
        row_equality.require_row_equality(ByN(), shape, device, "pow2", layout)
    monkeypatch.setattr(row_equality, "compare_parts", lambda *a: asked.append(a) or row_equality.Verdict(True, "equal"))
    asked.clear()
    for _ in range(2):
        row_equality.require_row_equality(ByN(), shape, device, "pow2", layout)
    assert len(asked) == 1
