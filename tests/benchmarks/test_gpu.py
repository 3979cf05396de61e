"""The kernels' benchmark without a GPU: the computed floors, every table on tiny shapes on the CPU, timing and targets."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch

from benchmarks.gpu import device, floors, launches, logprobs, parts, tables, targets, timing
from benchmarks.gpu.machine import Machine, this_machine, versions
from benchmarks.gpu.shapes import MODELS, RANKS, SMALL
from benchmarks.gpu.tables import TINY, wall_clock
from benchmarks.gpu.timing import copies
from jetrl_patch.backends import capability, get_backend
from jetrl_patch.backends.row_equality import Layout, Part
from jetrl_patch.exact import flash3


def test_shapes():
    qwen, _, llama = MODELS
    assert qwen.linears == (("qkv", 4608, 3584), ("o", 3584, 3584), ("gate_up", 37888, 3584), ("down", 3584, 18944))
    assert llama.linears[0] == ("qkv", 6144, 4096) and llama.linears[3] == ("down", 4096, 14336)
    assert all(N % 128 == K % 128 == 0 for model in MODELS for _, N, K in model.linears)


def test_layouts_of_a_tensor_parallel_rank():
    """As the trial before serving finds them in vLLM's layers. The tile of Triton's product follows N."""
    tile_for = pytest.importorskip("jetrl_patch.kernels.gemm_common").tile_for
    found = {ranks: {linear.name: (linear, layout) for linear, layout in MODELS[1].layouts(ranks)} for ranks in RANKS}
    assert set(found[1]) == {"qkv", "gate_up"} and all(len(found[ranks]) == 4 for ranks in RANKS[1:])
    linear, layout = found[4]["qkv"]
    parts = (4096, 3072, 4096, 0), (1024, 768, 1024, 1024), (1024, 768, 1024, 1280)
    assert linear == ("qkv", 1536, 4096) and layout.parts == parts
    assert found[8]["down"] == (("down", 4096, 1536), Layout((Part(4096, 0, 4096, 0),), 8))
    assert not list(MODELS[0].layouts(8)) and not list(SMALL.layouts(2))  # a block would be cut
    mixed = {
        (model.name, ranks)
        for model in (SMALL, *MODELS) for ranks in RANKS for linear, layout in model.layouts(ranks)
        if any(tile_for(part.rows) != tile_for(linear.N) for part in layout.parts)
    }  # fmt: skip
    assert (SMALL.name, 1) in mixed and {(m.name, 4) for m in MODELS[1:]} < mixed


@pytest.mark.parametrize(
    ("model", "bf16", "datasheet", "published"), [(0, 29.0, 11.6, 19.9), (1, 24.0, 9.6, 16.4), (2, 27.1, 10.8, 18.6)]
)
def test_floors_of_a_training_step(model, bf16, datasheet, published):
    ms = lambda fp8, peaks: round(floors.training_ms(MODELS[model], 16384, fp8, peaks), 1)  # noqa: E731
    assert ms(False, floors.H200) == bf16
    assert ms(True, floors.H200) == datasheet
    assert ms(True, floors.PUBLISHED) == pytest.approx(published, abs=0.051)


def test_floors_by_hand():
    # 1 TFLOP/s and 1 GB/s: 2 * 2 * 4 * 8 operations take 1.28e-10 s, 2 * 8 + 4 * 8 + 2 * 2 * 4 bytes take 6.4e-8 s
    assert floors.gemm_seconds(2, 4, 8, True, 1.0, 1.0) == pytest.approx(64e-9)
    assert floors.gemm_seconds(2, 4, 8, False, 1.0, 1.0) == pytest.approx(112e-9)
    assert floors.gemm_seconds(1000, 1000, 1000, True, 1.0, 1e6) == pytest.approx(2e-3)
    assert 1.9 < floors.decode_speedup(MODELS[0], 1, floors.PUBLISHED) <= 2.0  # only the weight's bytes count
    separate, one, fused = (floors.quantization_ms(MODELS[0], 16384, way, floors.H200) for way in floors.WAYS)
    assert separate > one > fused > 0
    tiny = sum(5 * 16 * K + 6 * 16 * N + 3 * N * K for _, N, K in TINY[0].linears)
    peaks = floors.H200._replace(bandwidth=1.0)
    assert floors.quantization_ms(TINY[0], 16, "separate", peaks) == pytest.approx(tiny / 1e6)
    assert [row["model"] for row in floors.floors()] == [model.name for model in MODELS]


def test_copies_outgrow_the_cache():
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
    return tables.tiny_machine()


def measured_by(pieces):
    """The rows of all pieces, whose names differ."""
    pieces = list(pieces)
    assert len({piece.name for piece in pieces}) == len(pieces)
    return [row for piece in pieces for row in piece.rows()]


def test_every_table_on_a_cpu(machine):
    machine.ceilings = dict.fromkeys(("BF16 TFLOP/s", "FP8 TFLOP/s", "copy GB/s"), 1.0)
    found = {name: measured_by(table.tiny(machine)) for name, table in tables.TABLES.items()}
    assert {name: len(rows) for name, rows in found.items() if name != "profile"} == {
        "rows": 8, "fused": 4, "products": 4 * 2 * 3, "gradients": 4 * 2 * 3, "quantizers": 6, "layers": 4 * 3, "decode": 2 * 3,
        "blocks": 4, "attention": 3 * 2, "head": 2 + 2 + 2 + 4,
    }  # fmt: skip
    for way in ("bf16", "torch", "native"):
        assert sum(row["share"] for row in found["profile"] if row["backend"] == way) == pytest.approx(1)
    assert all(row["verdict"] == "may serve" for name in ("rows", "fused") for row in found[name])
    assert not [row for name in found if name not in ("rows", "fused", "profile") for row in found[name] if row["note"]]
    saved = {row["backend"]: row["saved MiB"] for row in found["layers"] if row["linear"] == "down"}
    assert saved["bf16"] == 256 * 256 * 2 / 2**20 and saved["native"] < saved["bf16"]


def test_a_figure_is_the_median_of_its_windows_after_the_warm_up(monkeypatch):
    """The clock is a boost of ten turns, then 2 seconds a call, but for one window."""
    made = []

    def elapsed(run, times=1):
        for _ in range(times):
            run()
        made.append(times)
        return 0.5 if len(made) <= 10 else 20.0 if len(made) == 14 else 2.0 * times

    monkeypatch.setattr(timing, "_elapsed", elapsed)
    monkeypatch.setattr(timing, "_prepared", lambda call: timing._Ready(lambda: call(0), 1, True))
    found = timing.CudaTimer(seconds=10, rounds=5, warm=4)({"a": lambda turn: None})["a"]
    assert found.seconds == 2.0 and found.spread > timing.UNSTEADY and "windows differ" in found.note


def test_what_a_library_refuses_is_told_by_the_timer(monkeypatch):
    monkeypatch.setattr(timing, "_prepared", lambda call: "RuntimeError: no")
    found = timing.CudaTimer()({"a": lambda turn: None})["a"]
    assert math.isnan(found.seconds) and found.note == "RuntimeError: no"


def test_a_layer_quantizes_its_input_in_every_step(machine, monkeypatch):
    backend, done = get_backend("torch"), []
    original = type(backend).quantize_activation
    monkeypatch.setattr(type(backend), "quantize_activation", lambda *args: done.append(1) or original(*args))
    machine.backends = {"torch": backend}
    measured_by(parts.layers(machine, TINY, (16,)))
    # per layer, of four: two timed steps (input, output gradient), and the forward pass whose saved bytes are counted
    assert len(done) == 4 * (2 * 2 + 1)


def test_a_shape_that_a_library_refuses_is_a_row(machine):
    machine.backends["refusing"] = Refusing()
    machine.ceilings = {"BF16 TFLOP/s": 1.0, "FP8 TFLOP/s": 1.0, "copy GB/s": 1.0}
    refused = [row for row in measured_by(tables.TABLES["products"].tiny(machine)) if row["backend"] == "refusing"]
    assert len(refused) == 8 and all("no kernel | for this shape" in row["note"] for row in refused)
    verdicts = [row for row in measured_by(tables.TABLES["rows"].tiny(machine)) if row["backend"] == "refusing"]
    assert all(row["verdict"] == "may not serve" and "no kernel" in row["found"] for row in verdicts)


def measured(ours="deep_gemm", speed=2.0, **changes):
    """Tables as a run would produce them, with FP8 ``speed`` times as fast as BF16; never written to disk."""
    heads: list = [{"model": model.name, "linear": linear.name, "M": 16384} for model in MODELS for linear in model.linears]
    both = [("bf16", speed), (ours, 1.0), ("triton", 1.0)]
    rows = {
        "rows": [
            {"backend": ours, "model": MODELS[0].name, "linear": linear.name, "verdict": "may serve", "found": "rows equal"}
            for linear in MODELS[0].linears
        ],
        "fused": [
            {"backend": ours, "model": m.name, "TP": ranks, "linear": linear.name, "verdict": "may serve", "found": "rows equal"}
            for m in (SMALL, *MODELS) for ranks in RANKS for linear, _ in m.layouts(ranks)
        ],
        "blocks": [
            {"model": m.name, "M": 16384, "backend": name, "ms": ms}
            for m in MODELS for name, ms in (("bf16, compiled", speed), (ours + ", fused", 1.0))
        ],
        "products": [{**head, "backend": name, "us": us} for head in heads for name, us in both],
        "layers": [
            {**head, "backend": name, "ms": ms, "saved MiB": 2.0 if name == "bf16" else 1.0}
            for head in heads
            for name, ms in both
        ],
        "decode": [{"model": m.name, "M": 64, "backend": name, "us per block": us} for m in MODELS for name, us in both],
        "quantizers": [
            {"backend": ours, "quantizer": name, "M, K": f"{M}, {K}", "of the copy": 0.1 if M < 16384 else share}
            for M, K in parts.QUANTIZED
            for name, share in {**dict.fromkeys(parts.QUANTIZERS, 0.9), parts.TWO_LAYOUTS: 0.95}.items()
        ],
    }
    return rows | changes


def verdicts(rows):
    return {row["target"]: row["verdict"] for row in targets.targets(rows)}


def test_targets_that_are_met():
    found = verdicts(measured())
    assert len(found) == 2 + 2 + 3 * 6 and set(found.values()) == {"met"}


def test_targets_that_are_missed():
    rows = targets.targets(measured(speed=1.45))
    wrong = {row["target"] for row in rows if row["verdict"] == "MISSED"}
    assert {name.split(",")[0] for name in wrong} == {"FProp", "decoding"} and len(wrong) == 6


@pytest.mark.parametrize(
    ("part", "change", "target", "verdict"),
    [
        ("rows", lambda rows: [{**rows[0], "verdict": "may not serve", "found": "x"}], "rows do not depend on the b", "MISSED"),
        ("rows", lambda rows: [], "rows do not depend on the b", "not measured"),
        ("rows", lambda rows: rows[1:], "rows do not depend on the b", "not measured"),
        ("rows", lambda rows: [{**rows[0], "verdict": "may not serve"}], "rows do not depend on the b", "MISSED"),
        ("fused", lambda rows: [{**rows[0], "verdict": "may not serve"}], "rows do not depend on what", "MISSED"),
        ("fused", lambda rows: rows[1:], "rows do not depend on what", "not measured"),
        ("quantizers", lambda rows: rows[:-4], "quantizers at", "not measured"),
        ("quantizers", lambda rows: [{**rows[-4], "of the copy": 0.5}], "quantizers at", "MISSED"),
        ("quantizers", lambda rows: rows[:-1], "both layouts", "not measured"),
        ("blocks", lambda rows: [{**r, "ms": 1.0 if "fused" in r["backend"] else 0.9} for r in rows], "a block", "MISSED"),
        ("blocks", lambda rows: [r for r in rows if "fused" in r["backend"]], "a block", "not measured"),
        ("products", lambda rows: rows[3:], "FProp, Qwen2.5-7B", "not measured"),  # one linear is missing
        ("layers", lambda rows: [{**r, "ms": math.nan} for r in rows], "linears forward", "not measured"),
        ("layers", lambda rows: [{**r, "saved MiB": 1.5} for r in rows], "saved", "MISSED"),
        ("layers", lambda rows: [{**r, "saved MiB": ""} for r in rows], "saved", "not measured"),
        ("decode", lambda rows: [{**r, "M": 8} for r in rows], "decoding", "not measured"),
        ("quantizers", lambda rows: [{**r, "of the copy": 0.84} for r in rows], "quantizers at", "MISSED"),
        ("quantizers", lambda rows: [{**r, "of the copy": 0.9} for r in rows], "both layouts", "MISSED"),
    ],
)
def test_each_target_sees_its_figure(part, change, target, verdict):
    found = verdicts(measured(**{part: change(measured()[part])}))
    assert {v for name, v in found.items() if name.startswith(target)} == {verdict}


def test_a_slower_choice_than_the_best_backend_is_a_miss():
    rows = [{**row, "us": 0.9} if row["backend"] == "triton" else row for row in measured()["products"]]
    found = verdicts(measured(products=rows))
    assert {v for name, v in found.items() if "the best backend" in name} == {"MISSED"}
    refused = [{"backend": "deep_gemm", "verdict": "may not serve", "found": "x"}]
    assert all(targets.serving({name: refused, "products": rows}) == "triton" for name in ("rows", "fused"))


def test_one_launch_and_two_are_both_measured():
    machine = Machine(torch.device("cpu"), wall_clock, {"triton": get_backend("triton")})
    assert [b.few() for b in (*launches.one_launch(machine).values(), *launches.two_launches(machine).values())] == [64, 0]
    assert 0 < get_backend("triton").few() < 64
    machine.backends = {"native": get_backend("native")}
    assert launches.one_launch(machine) == launches.two_launches(machine) == {}


def test_what_the_targets_need_is_measured_first():
    """A table that runs out of time has the rows of the targets."""
    machine = tables.tiny_machine()
    for name, needed in (("products", "16384"), ("layers", "16384"), ("gradients", "16384"), ("decode", "64")):
        sizes = [piece.name.rpartition(", ")[2] for piece in tables.TABLES[name].run(machine)]
        assert sizes[: sizes.count(needed)] == [needed] * sizes.count(needed) and sizes.count(needed) >= len(MODELS), name


@pytest.mark.parametrize("table", tables.TABLES)
def test_no_table_allocates_before_a_piece_is_measured(table, monkeypatch):
    """Pieces that were measured before are passed over without their operands."""
    machine = tables.tiny_machine()
    monkeypatch.setattr(Machine, "random", lambda *_: pytest.fail("allocated"))
    names = [piece.name for piece in tables.TABLES[table].run(machine)]
    assert len(set(names)) == len(names) > 0


def test_a_broken_device_is_no_row(monkeypatch):
    """After an illegal access nothing else would run: the error goes on to the end of the process."""

    def refuses(turn):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert "illegal" in timing._prepared(refuses)  # the device answers: a row
    monkeypatch.setattr(timing, "is_broken", lambda: True)
    with pytest.raises(RuntimeError, match="illegal"):
        timing._prepared(refuses)


@pytest.mark.parametrize("fails", [False, True])
def test_a_device_is_broken_if_it_does_not_answer(monkeypatch, fails):
    def synchronize():
        if fails:
            raise RuntimeError("CUDA error")

    assert not device.is_broken()  # no device was used
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert device.is_broken() == fails


@pytest.mark.parametrize("uuid", ["GPU-1234", "1234"])
def test_the_sampled_device_is_the_one_that_is_used(monkeypatch, uuid):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=uuid))
    assert device.smi_name() == "GPU-1234"


def test_log_probs_are_those_that_verl_takes(monkeypatch):
    functional = pytest.importorskip("verl.utils.torch_functional")
    logits, labels = torch.randn(9, 50).bfloat16(), torch.arange(9)
    found = logprobs.of_verl()
    assert torch.equal(found.run(logits, labels), functional.logprobs_from_logits(logits, labels)) and "row by row" in found.name
    asked = []

    def cross_entropy_loss(logits, labels, inplace_backward):
        asked.append(inplace_backward)
        return -logprobs.plain(logits, labels), None

    stand_in = types.SimpleNamespace(cross_entropy_loss=cross_entropy_loss)
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(ops=None))
    monkeypatch.setitem(sys.modules, "flash_attn.ops.triton.cross_entropy", stand_in)
    monkeypatch.setattr(functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", True)
    monkeypatch.setattr(functional, "cross_entropy_loss", cross_entropy_loss, raising=False)
    found = logprobs.of_verl()
    assert torch.equal(found.run(logits, labels), functional.logprobs_from_logits(logits, labels)) and asked == [True, True]
    assert "flash-attn's" in found.name


def test_what_is_missing_names_flash_attention_3(monkeypatch):
    properties = types.SimpleNamespace(L2_cache_size=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(capability, "CHECKS", {})
    monkeypatch.setattr(flash3, "find", lambda: (None, "no vllm"))
    assert this_machine().missing == {"FlashAttention-3": "no vllm"}
    monkeypatch.setattr(flash3, "find", lambda: (object(), ""))
    assert this_machine().missing == {}


def test_the_versions_of_a_record_tell_the_code(monkeypatch):
    before = versions()
    assert {"torch", "code", "commit"} <= set(before) and before["code"] == versions()["code"]
    monkeypatch.setattr("benchmarks.gpu.machine.CODE", ("jetrl_patch",))
    assert versions()["code"] != before["code"]
