"""Part b of ``make hopper`` without a GPU: every table for tiny shapes on the CPU, the timer, the targets, the versions."""

from __future__ import annotations

import math
import sys
import types
from functools import partial

import pytest
import torch

from benchmarks.hopper import device, kernels, shape, targets
from benchmarks.hopper.device import Machine, versions
from benchmarks.hopper.kernels import TINY, measurements
from benchmarks.hopper.record import Record, Setup
from benchmarks.shapes import DECODE, MODELS, PUBLISHED, RANKS, SMALL, gemm_seconds
from jetrl_patch.backends import capability, get_backend
from jetrl_patch.backends.row_equality import Layout, Part
from jetrl_patch.exact import flash3


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


def test_copies_outgrow_the_cache():
    copies = lambda size, cache: Machine(torch.device("cpu"), device.wall_clock, {}, cache=cache).copies(size)  # noqa: E731
    assert copies(10, 0) == 1 and copies(100, 50) == 1 and copies(30, 50) == 4 and copies(1, 10**9) == 64


class Refusing(type(get_backend("torch"))):
    """A library that cannot multiply."""

    name = "refusing"

    def gemm(self, *args):
        raise RuntimeError("no kernel | for this shape")


@pytest.fixture
def machine(monkeypatch):
    multiply = lambda a, b, *scales, out_dtype, use_fast_accum: (a.float() @ b.float()).to(out_dtype)  # noqa: E731
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    return device.tiny_machine()


def table(machine, name, sizes=TINY):
    """The rows of a table. Its pieces have different names."""
    mine = [each for each in measurements(machine, sizes) if each[0] == name]
    assert len({each[1] for each in mine}) == len(mine)
    return [row for _, _, function, *arguments in mine for row in function(machine, *arguments)]


def test_every_table_on_a_cpu(machine):
    for name in device.CEILINGS:
        (row,) = machine.measure_ceiling(name)
        assert row["ceiling"] == name and row["measured"] == machine.ceilings[name] > 0 and not row["note"]
    found = {name: table(machine, name) for name in targets.TITLES}
    assert {name: len(rows) for name, rows in found.items()} == {
        "products": 4 * 3, "quantizers": 6, "layers": 4 * 3, "decode": 2 * 3, "blocks": 4, "attention": 3 * 2,
    }  # fmt: skip
    assert not [row for name in found for row in found[name] if row["note"]]
    assert all(0 < row["of the ceiling"] < math.inf for name in ("products", "attention") for row in found[name])
    assert {tuple(key for key in ("TFLOP/s", "GB/s") if key in row) for row in found["attention"]} == {("TFLOP/s",), ("GB/s",)}
    saved = {row["way"]: row["saved MiB"] for row in found["layers"] if row["linear"] == "down"}
    assert saved["bf16"] == 256 * 256 * 2 / 2**20 and saved["native"] < saved["bf16"]


def test_a_ratio_is_to_the_fastest_baseline_of_the_same_turns():
    seconds = {"exact": 4.0, "SDPA": 3.0, "FlashAttention-3": 2.0, "bf16, compiled": 1.0, "broken": math.nan}
    timer = lambda calls: {name: device.Timed(seconds[name], True, "no" if name == "broken" else "") for name in calls}  # noqa: E731
    machine = Machine(torch.device("cpu"), timer, {}, ceilings={"BF16 TFLOP/s": 2.0})
    work = lambda way: kernels.arithmetic(4e12)  # noqa: E731
    found = {row["way"]: row for row in kernels.timed_rows(machine, {}, dict.fromkeys(seconds, print), work, ("SDPA", "broken"))}
    assert found["exact"]["BF16 / this"] == 0.75 and found["exact"]["compiled BF16 / this"] == 0.25
    assert found["exact"]["TFLOP/s"] == 1.0 and found["exact"]["of the ceiling"] == 0.5 and found["broken"]["note"] == "no"


def test_a_figure_is_the_median_of_its_windows_after_the_warm_up(monkeypatch):
    """The clock: ten boosted turns, then 2 seconds a call, except in one window."""
    made = []

    def elapsed(run, times=1):
        for _ in range(times):
            run()
        made.append(times)
        return 0.5 if len(made) <= 10 else 20.0 if len(made) == 14 else 2.0 * times

    monkeypatch.setattr(device, "_elapsed", elapsed)
    monkeypatch.setattr(device, "_prepared", lambda call: device._Ready(lambda: call(0), 1, True))
    found = device.CudaTimer(seconds=10, rounds=5, warm=4)({"a": lambda turn: None})["a"]
    assert found.seconds == 2.0 and found.spread > device.UNSTEADY and "windows differ" in found.note


def test_what_a_library_refuses_is_told_by_the_timer(monkeypatch):
    monkeypatch.setattr(device, "_prepared", lambda call: "RuntimeError: no")
    found = device.CudaTimer()({"a": lambda turn: None})["a"]
    assert math.isnan(found.seconds) and found.note == "RuntimeError: no"


def test_a_layer_quantizes_its_input_in_every_step(machine, monkeypatch):
    backend, done = get_backend("torch"), []
    original = type(backend).quantize_activation
    monkeypatch.setattr(type(backend), "quantize_activation", lambda *args: done.append(1) or original(*args))
    machine.backends = {"torch": backend}
    table(machine, "layers", TINY._replace(train=(16,), decode=(1,)))
    # per layer, of four: two timed steps (input, output gradient), and the forward pass whose saved bytes are counted
    assert len(done) == 4 * (2 * 2 + 1)


def test_a_shape_that_a_library_refuses_is_a_row(machine):
    machine.backends["refusing"] = Refusing()
    refused = [row for row in table(machine, "products") if row["way"] == "refusing"]
    assert len(refused) == 4 and all("no kernel | for this shape" in row["note"] for row in refused)


def measured(ours="deep_gemm", speed=2.0, **changes):
    """Tables as a run would produce them, with FP8 ``speed`` times as fast as BF16; never written to disk."""
    heads = [{"linear": linear.name, "M": 16384} for linear in MODELS[1].linears]
    both = [("bf16", speed), (ours, 1.0), ("triton", 1.0)]
    rows = {
        "blocks": [
            {"M": 16384, "way": name, "us": us} for name, us in (("bf16, compiled", speed), (ours + ", fused", 1.0))
        ],
        "products": [{**head, "way": name, "us": us} for head in heads for name, us in both],
        "layers": [
            {**head, "way": name, "us": us, "saved MiB": 2.0 if name == "bf16" else 1.0} for head in heads for name, us in both
        ],
        "decode": [{"M": 64, "way": name, "us": us} for name, us in both],
        "quantizers": [
            {"way": ours, "quantizer": name, "M, K": f"{M}, {K}", "of the copy": 0.1 if M < 16384 else share}
            for M, K in targets.QUANTIZED
            for name, share in {**dict.fromkeys(targets.QUANTIZERS, 0.9), targets.TWO_LAYOUTS: 0.95}.items()
        ],
    }  # fmt: skip
    return rows | changes


def verdicts(rows):
    return {row["target"]: row["verdict"] for row in targets.targets(rows)}


def test_targets_that_are_met():
    found = verdicts(measured())
    assert len(found) == 2 + 6 and set(found.values()) == {"met"}


def test_targets_that_are_missed():
    rows = targets.targets(measured(speed=1.45))
    wrong = {row["target"] for row in rows if row["verdict"] == "MISSED"}
    assert {name.split(",")[0] for name in wrong} == {"FProp", "decoding"} and len(wrong) == 2


@pytest.mark.parametrize(
    ("part", "change", "target", "verdict"),
    [
        ("quantizers", lambda rows: rows[:-4], "quantizers at", "not measured"),
        ("quantizers", lambda rows: [{**rows[-4], "of the copy": 0.5}], "quantizers at", "MISSED"),
        ("quantizers", lambda rows: rows[:-1], "both layouts", "not measured"),
        ("quantizers", lambda rows: [{**r, "of the copy": 0.84} for r in rows], "quantizers at", "MISSED"),
        ("quantizers", lambda rows: [{**r, "of the copy": 0.9} for r in rows], "both layouts", "MISSED"),
        ("blocks", lambda rows: [{**r, "us": 1.0 if "fused" in r["way"] else 0.9} for r in rows], "a block", "MISSED"),
        ("blocks", lambda rows: [r for r in rows if "fused" in r["way"]], "a block", "not measured"),
        ("products", lambda rows: rows[3:], "FProp", "not measured"),  # one linear is missing
        ("layers", lambda rows: [{**r, "us": math.nan} for r in rows], "linears forward", "not measured"),
        ("layers", lambda rows: [{**r, "saved MiB": 1.5} for r in rows], "saved", "MISSED"),
        ("layers", lambda rows: [{**r, "saved MiB": ""} for r in rows], "saved", "not measured"),
        ("decode", lambda rows: [{**r, "M": 8} for r in rows], "decoding", "not measured"),
    ],
)
def test_each_target_sees_its_figure(part, change, target, verdict):
    found = verdicts(measured(**{part: change(measured()[part])}))
    assert {v for name, v in found.items() if name.startswith(target)} == {verdict}


def test_a_slower_choice_than_the_best_backend_is_a_miss():
    rows = [{**row, "us": 0.9} if row["way"] == "triton" else row for row in measured()["products"]]
    found = verdicts(measured(products=rows))
    assert {v for name, v in found.items() if "the best backend" in name} == {"MISSED"}


def test_what_the_targets_need_is_measured_first(monkeypatch, tmp_path):
    """A command that runs out of time has measured the targets. Nothing is allocated before a piece is measured."""
    monkeypatch.setattr(kernels, "this_machine", lambda deep_gemm: device.tiny_machine())
    monkeypatch.setattr(Machine, "random", lambda *_: pytest.fail("allocated"))
    found = list(kernels.pieces(Setup(False, tmp_path, Record("kernels"))))
    assert len({piece.name for piece in found}) == len(found)
    needed = {targets.TITLES[name] for name in ("products", "layers", "decode", "quantizers", "blocks")}
    first = found[3 : 3 + 1 + 4 + 4 + 1 + 2]
    assert {piece.table for piece in first} == needed
    ends = ("16384", ", 64", "16384, 4096")
    assert all(piece.name.endswith(ends) for piece in first if piece.name != "blocks")
    assert len([piece for piece in found if piece.name.startswith("decode")]) == len(DECODE)


def test_a_broken_device_is_no_row(monkeypatch):
    """After an illegal access nothing else can run: the error ends the process."""

    def refuses(turn):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert "illegal" in device._prepared(refuses)  # the device still works: a row
    monkeypatch.setattr(device, "is_broken", lambda: True)
    with pytest.raises(RuntimeError, match="illegal"):
        device._prepared(refuses)


@pytest.mark.parametrize("fails", [False, True])
def test_a_device_is_broken_if_it_does_not_answer(monkeypatch, fails):
    def synchronize():
        if fails:
            raise RuntimeError("CUDA error")

    assert not device.is_broken()  # no device was used
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert device.is_broken() == fails


def test_log_probs_are_those_that_verl_takes(monkeypatch):
    functional = pytest.importorskip("verl.utils.torch_functional")
    logits, labels = torch.randn(9, 50).bfloat16(), torch.arange(9)
    name, formula = shape.verl_log_probs()
    assert torch.equal(formula(logits, labels), functional.logprobs_from_logits(logits, labels)) and "row by row" in name
    asked = []

    def cross_entropy_loss(logits, labels, inplace_backward):
        asked.append(inplace_backward)
        return -shape.plain_log_probs(logits, labels), None

    stand_in = types.SimpleNamespace(cross_entropy_loss=cross_entropy_loss)
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(ops=None))
    monkeypatch.setitem(sys.modules, "flash_attn.ops.triton.cross_entropy", stand_in)
    monkeypatch.setattr(functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", True)
    monkeypatch.setattr(functional, "cross_entropy_loss", cross_entropy_loss, raising=False)
    name, formula = shape.verl_log_probs()
    assert torch.equal(formula(logits, labels), functional.logprobs_from_logits(logits, labels)) and asked == [True, True]
    assert "flash-attn's" in name


def test_what_is_missing_is_named(monkeypatch):
    properties = types.SimpleNamespace(L2_cache_size=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(capability, "CHECKS", {"deep_gemm": partial(pytest.fail, "asked")})
    monkeypatch.setattr(flash3, "find", lambda: (None, "no vllm"))
    missing = device.this_machine(deep_gemm=False).missing
    assert missing == {"FlashAttention-3": "no vllm", "deep_gemm": "left out by --without-deep-gemm"}
    monkeypatch.setattr(capability, "CHECKS", {})
    monkeypatch.setattr(flash3, "find", lambda: (object(), ""))
    assert device.this_machine().missing == {}


def test_the_versions_of_a_record_tell_the_code(monkeypatch):
    before = versions()
    assert {"torch", "code", "commit"} <= set(before) and before["code"] == versions()["code"]
    monkeypatch.setattr(device, "CODE", ("jetrl_patch",))
    assert versions()["code"] != before["code"]
