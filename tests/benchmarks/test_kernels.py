"""The shapes that are measured, and the kernels' part of ``make hopper`` without a GPU: its rows, its timer, its targets."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from benchmarks.hopper import kernels
from benchmarks.hopper.kernels import DECODE, FPROP, LAYER, TINY, linears
from benchmarks.hopper.plan import Setup
from benchmarks.shapes import MODELS, PUBLISHED, RANKS, SMALL, gemm_seconds
from jetrl_patch.backends import capability, get_backend
from jetrl_patch.backends.row_equality import Layout, Part

CPU = torch.device("cpu")


def test_shapes():
    qwen, _, llama = MODELS
    assert qwen.linears == (("qkv", 4608, 3584), ("o", 3584, 3584), ("gate_up", 37888, 3584), ("down", 3584, 18944))
    assert llama.linears[0] == ("qkv", 6144, 4096) and llama.linears[3] == ("down", 4096, 14336)
    assert all(N % 128 == K % 128 == 0 for model in MODELS for _, N, K in model.linears)


def test_layouts_of_a_tensor_parallel_rank():
    """As the trial before serving sees them in vLLM's layers. The tile of Triton's product depends on N."""
    tile_for = pytest.importorskip("jetrl_patch.kernels.gemm_common").tile_for
    found = {ranks: {linear.name: (linear, layout) for linear, layout in MODELS[1].layouts(ranks)} for ranks in RANKS}
    assert set(found[1]) == {"qkv", "gate_up"} and all(len(found[ranks]) == 4 for ranks in RANKS[1:])
    linear, layout = found[4]["qkv"]
    parts = (4096, 3072, 4096, 0), (1024, 768, 1024, 1024), (1024, 768, 1024, 1280)
    assert linear == ("qkv", 1536, 4096) and layout.parts == parts
    assert found[8]["down"] == (("down", 4096, 1536), Layout((Part(4096, 0, 4096, 0),), 8))
    assert not list(MODELS[0].layouts(8)) and not list(SMALL.layouts(2))  # they would cut a block
    mixed = {
        (model.name, ranks)
        for model in (SMALL, *MODELS) for ranks in RANKS for linear, layout in model.layouts(ranks)
        if any(tile_for(part.rows) != tile_for(linear.N) for part in layout.parts)
    }  # fmt: skip
    assert (SMALL.name, 1) in mixed and {(m.name, 4) for m in MODELS[1:]} < mixed


def test_a_product_takes_what_its_arithmetic_or_its_bytes_take():
    # 1 TFLOP/s and 1 GB/s: 2 * 2 * 4 * 8 operations take 1.28e-10 s, 2 * 8 + 4 * 8 + 2 * 2 * 4 bytes take 6.4e-8 s
    assert gemm_seconds(2, 4, 8, True, 1.0, 1.0) == pytest.approx(64e-9)
    assert gemm_seconds(2, 4, 8, False, 1.0, 1.0) == pytest.approx(112e-9)
    assert gemm_seconds(1000, 1000, 1000, True, 1.0, 1e6) == pytest.approx(2e-3)
    one = [gemm_seconds(1, 4608, 3584, fp8, PUBLISHED.bf16, PUBLISHED.bandwidth) for fp8 in (False, True)]
    assert one[0] / one[1] == pytest.approx(2, rel=0.01)  # only the weight's bytes count


class Refusing(type(get_backend("torch"))):
    """A library that cannot multiply."""

    def gemm(self, *args):
        raise RuntimeError("no kernel for this shape")


def test_a_shape_that_a_library_refuses_is_a_row():
    backends = {"torch": Refusing(), "native": get_backend("native")}
    rows = {row["way"]: row for row in linears(TINY, backends, CPU, [(FPROP, 16)])}
    assert rows["torch"]["note"] == "RuntimeError: no kernel for this shape" and math.isnan(rows["torch"]["us"])
    assert rows["native"]["us"] > 0 and not rows["native"]["note"]


def test_a_layer_quantizes_its_input_in_every_step(monkeypatch):
    backend, done = get_backend("torch"), []
    original = type(backend).quantize_activation
    monkeypatch.setattr(type(backend), "quantize_activation", lambda *args: done.append(1) or original(*args))
    list(linears(TINY, {"torch": backend}, CPU, [(LAYER, 16)]))
    assert len(done) == 4 * 2 * 2  # per layer, of four: two steps, an input and an output gradient


@pytest.mark.parametrize(
    ("what", "M", "speed", "verdict"),
    [
        (FPROP, 16384, 1.7, "met"), (FPROP, 16384, 1.5, "MISSED"), (LAYER, 16384, 1.42, "met"), (LAYER, 16384, 1.4, "MISSED"),
        (DECODE, 64, 1.6, "met"), (DECODE, 64, 1.4, "MISSED"), (DECODE, 8, 1.0, ""), (FPROP, 16384, math.nan, "MISSED"),
    ],
)  # fmt: skip
def test_a_target_is_about_the_backend_that_auto_picks(monkeypatch, what, M, speed, verdict):
    """Nothing is computed: operands of this size have no memory, and the times are given."""
    times = {"BF16": (speed, ""), "triton": (1.0, ""), "torch": (9.0, "")}
    monkeypatch.setattr(kernels, "timed", lambda calls, device: {way: times[way] for way in calls})
    backend = get_backend("torch")
    monkeypatch.setattr(kernels, "swap_linears", lambda *args, **settings: None)
    monkeypatch.setattr(type(backend), "quantize_activation", lambda *args: None)
    rows = {row["way"]: row for row in linears(TINY, {"torch": backend, "triton": backend}, CPU, [(what, M)])}
    assert rows["triton"]["verdict"] == verdict and rows["BF16"]["verdict"] == rows["torch"]["verdict"] == ""
    assert math.isnan(speed) or rows["triton"]["BF16 / this"] == speed


@pytest.fixture
def gpu(monkeypatch):
    """A device named "cuda" whose calls are timed by Triton's functions: 2 ms with a graph, 3 ms without."""
    testing = pytest.importorskip("triton.testing")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(testing, "do_bench_cudagraph", lambda call, return_mode: call() or 2.0)
    monkeypatch.setattr(testing, "do_bench", lambda call, return_mode: 3.0)
    return monkeypatch


def test_the_second_turn_counts(gpu):
    told = []
    found = kernels.timed({name: partial(told.append, name) for name in "ab"}, torch.device("cuda"))
    assert found == {"a": (2e-3, ""), "b": (2e-3, "")} and told == ["a", "a", "b", "b"] * 2


def test_what_cannot_be_captured_is_timed_with_its_launches(gpu):
    gpu.setattr("triton.testing.do_bench_cudagraph", lambda *args, **settings: 1 / 0)
    assert kernels.timed({"a": int}, torch.device("cuda")) == {"a": (3e-3, "launching included")}


def test_a_broken_device_is_no_row(gpu):
    """After an illegal access nothing else can run: the error ends the process."""

    def refuses():
        raise RuntimeError("this shape")

    ((seconds, note),) = kernels.timed({"a": refuses}, torch.device("cuda")).values()
    assert math.isnan(seconds) and note == "RuntimeError: this shape"
    gpu.setattr(torch.cuda, "synchronize", partial(pytest.fail, "an illegal memory access", pytrace=False))
    with pytest.raises(pytest.fail.Exception, match="illegal"):
        kernels.timed({"a": refuses}, torch.device("cuda"))


def test_backends_that_are_missing_are_named(monkeypatch, tmp_path):
    asked = []
    checks = {"deep_gemm": lambda: asked.append("deep_gemm") or (False, "no nvcc"), "triton": lambda: (False, "no triton")}
    monkeypatch.setattr(capability, "CHECKS", checks)
    monkeypatch.setattr(kernels, "linears", lambda model, backends, device, cases: [])
    assert kernels.measure("linears", Setup(False, tmp_path, "triton")) == [{"unavailable": "triton", "why": "no triton"}]
    assert not asked
    assert len(kernels.measure("linears", Setup(False, tmp_path))) == 2
