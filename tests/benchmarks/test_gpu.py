"""``make bench-gpu`` without a GPU: its message, the computed floors, and every part on tiny shapes on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import block, floors, launches, parts, report, targets
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.shapes import MODELS, Model
from benchmarks.gpu.timing import Budget, Timed, copies
from jetrl_patch.fp8.backends import get_backend

ROOT = Path(__file__).resolve().parents[2]
TINY = (Model("tiny", hidden=128, intermediate=256, heads=2, kv_heads=1, head_dim=64),)


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    page = tmp_path / "page.md"
    command = [sys.executable, "-m", "benchmarks.gpu", "--write", str(page)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and run.stdout == "" and not page.exists()
    assert run.stderr.startswith("make bench-gpu needs a Hopper GPU") and run.stderr.count("\n") == 1
    assert "sees no CUDA device" in run.stderr


@pytest.mark.parametrize("arguments", [["--part", "nothing"], ["--seconds", "0"]])
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        gpu.main(arguments)
    assert stop.value.code == 2 and arguments[1] in capsys.readouterr().err


def test_shapes():
    qwen, _, llama = MODELS
    assert qwen.linears == (("qkv", 4608, 3584), ("o", 3584, 3584), ("gate_up", 37888, 3584), ("down", 3584, 18944))
    assert llama.linears[0] == ("qkv", 6144, 4096) and llama.linears[3] == ("down", 4096, 14336)
    assert all(N % 128 == K % 128 == 0 for model in MODELS for _, N, K in model.linears)


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


def test_a_budget_ends():
    now = [0.0]
    budget = Budget(5, lambda: now[0])
    assert not budget.spent
    now[0] = 5.0
    assert budget.spent


def wall_clock(calls):
    """The interface of ``CudaTimer`` on a CPU."""
    found = {}
    for name, call in calls.items():
        try:
            start = time.perf_counter()
            call(0), call(1)
            found[name] = Timed((time.perf_counter() - start) / 2, True)
        except Exception as error:
            found[name] = Timed(math.nan, False, str(error))
    return found


class Refusing(type(get_backend("torch"))):
    """A library that cannot multiply."""

    name = "refusing"

    def gemm(self, *args):
        raise RuntimeError("no kernel | for this shape")


@pytest.fixture
def machine(monkeypatch):
    multiply = lambda a, b, *scales, out_dtype, use_fast_accum: (a.float() @ b.float()).to(out_dtype)  # noqa: E731
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    both = {name: get_backend(name) for name in ("torch", "native")}
    return Machine(torch.device("cpu"), wall_clock, both, {"te": "not installed"}, cache=1000, side=64)


@pytest.fixture
def tiny(monkeypatch):
    runs = {
        "rows": lambda m: parts.rows(m, TINY, 300),
        "products": lambda m: parts.products(m, TINY, (1, 16)),
        "gradients": lambda m: parts.gradients(m, TINY, (16,)),
        "quantizers": lambda m: parts.quantizers(m, ((16, 128),)),
        "layers": lambda m: parts.layers(m, TINY, (256,)),
        "decode": lambda m: launches.decode(m, TINY, (1, 16)),
        "blocks": lambda m: block.blocks(m, TINY, 256),
        "profile": lambda m: block.profiles(m, TINY, 256),
    }
    assert runs.keys() == gpu.PARTS.keys()
    for name, run in runs.items():
        title, _, share = gpu.PARTS[name]
        monkeypatch.setitem(gpu.PARTS, name, (title, run, share))


def test_every_part_on_a_cpu(machine, tiny, tmp_path):
    with Console(file=(tmp_path / "screen").open("w"), width=200) as console:
        tables = gpu.measure(machine, list(gpu.PARTS), 1000, console)
    count = {name: len(rows) for name, (_, rows, _) in tables.items()}
    assert count == {
        "targets": 2 + 2 + 3 * 5, "ceilings": 3, "rows": 8, "products": 4 * 2 * 3, "gradients": 4 * 2 * 3, "quantizers": 6,
        "layers": 4 * 3, "decode": 2 * 3, "blocks": 3, "profile": 3 * (block.TOP + 1), "floors": 3,
    }  # fmt: skip
    for way in ("bf16", "torch", "native"):
        assert sum(row["share"] for row in tables["profile"][1] if row["backend"] == way) == pytest.approx(1)
    assert all(row["verdict"] == "may serve" for row in tables["rows"][1])
    for name in ("products", "gradients", "layers", "decode", "blocks"):
        for row in tables[name][1]:
            assert row["BF16 / this"] > 0 and (row["backend"] != "bf16" or row["BF16 / this"] == 1)
    layers = [row for row in tables["layers"][1] if row["linear"] == "down"]
    saved = {row["backend"]: row["saved MiB"] for row in layers}
    assert saved["bf16"] == 256 * 256 * 2 / 2**20 and saved["native"] < saved["bf16"]
    page = tmp_path / "deep" / "page.md"
    report.write(page, "Title", {"versions": {"torch": "1"}, "command": "c", "seconds": 1.0, "missing": machine.missing}, tables)
    text, figures = page.read_text(), json.loads(page.with_suffix(".json").read_text())
    assert text.startswith("# Title\n\ntorch 1. Command: `c`") and "Not measured: te: not installed" in text
    for name, (title, rows, _) in tables.items():
        assert f"## {title}\n" in text and figures["parts"][name]["rows"] == rows
    widths = {line.count("|") for line in text.split("## FProp")[1].split("##")[0].splitlines() if line.startswith("|")}
    assert widths == {10 + 1}


def test_a_layer_quantizes_its_input_in_every_step(machine, monkeypatch):
    backend, done = get_backend("torch"), []
    original = type(backend).quantize_activation
    monkeypatch.setattr(type(backend), "quantize_activation", lambda *args: done.append(1) or original(*args))
    machine.backends = {"torch": backend}
    list(parts.layers(machine, TINY, (16,)))
    # per layer, of four: two timed steps (input, output gradient), and the forward pass whose saved bytes are counted
    assert len(done) == 4 * (2 * 2 + 1)


def test_a_shape_that_a_library_refuses_is_a_row(machine, tiny):
    machine.backends["refusing"] = Refusing()
    machine.ceilings = {"BF16 TFLOP/s": 1.0, "FP8 TFLOP/s": 1.0, "copy GB/s": 1.0}
    refused = [row for row in gpu.PARTS["products"][1](machine) if row["backend"] == "refusing"]
    assert len(refused) == 8 and all(row["note"] == "no kernel | for this shape" for row in refused)
    line = report.markdown("t", refused).splitlines()[4]
    assert "–" in line and "no kernel / for this shape" in line
    verdicts = [row for row in gpu.PARTS["rows"][1](machine) if row["backend"] == "refusing"]
    assert all(row["verdict"] == "may not serve" and "no kernel" in row["found"] for row in verdicts)


def test_a_part_that_fails_or_runs_out_of_time_is_told(machine, tiny, monkeypatch, tmp_path):
    def failing(machine):
        yield {"a": 1}
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setitem(gpu.PARTS, "gradients", ("Gradients", failing, 0.5))
    with Console(file=(tmp_path / "screen").open("w")) as console:
        tables = gpu.measure(machine, ["products", "gradients"], 1e-9, console)
        assert len(tables["products"][1]) == 1 and tables["products"][2] == "Time ran out after 1 rows."
        tables = gpu.measure(machine, ["gradients"], 100, console)
    assert tables["gradients"][2] == "This part failed after 1 rows: RuntimeError: out of memory"
    assert "out of memory" in report.markdown("Gradients", [], tables["gradients"][2])


def measured(ours="deep_gemm", speed=2.0, **changes):
    """Tables as a run would produce them, with FP8 ``speed`` times as fast as BF16; never written to disk."""
    heads: list = [{"model": model.name, "linear": linear.name, "M": 16384} for model in MODELS for linear in model.linears]
    both = [("bf16", speed), (ours, 1.0), ("triton", 1.0)]
    rows = {
        "rows": [{"backend": ours, "verdict": "may serve", "found": "rows equal"}],
        "products": [{**head, "backend": name, "us": us} for head in heads for name, us in both],
        "layers": [
            {**head, "backend": name, "ms": ms, "saved MiB": 2.0 if name == "bf16" else 1.0}
            for head in heads
            for name, ms in both
        ],
        "decode": [{"model": m.name, "M": 64, "backend": name, "us per block": us} for m in MODELS for name, us in both],
        "quantizers": [
            {"backend": ours, "quantizer": "activation 1x128", "M, K": "16384, 3584", "of the copy": 0.9},
            {"backend": ours, "quantizer": parts.TWO_LAYOUTS, "M, K": "16384, 3584", "of the copy": 0.95},
            {"backend": ours, "quantizer": "activation 1x128", "M, K": "64, 3584", "of the copy": 0.1},
        ],
    }
    return {name: ("", changes.get(name, table), "") for name, table in rows.items()}


def verdicts(tables):
    return {row["target"]: row["verdict"] for row in targets.targets(tables)}


def test_targets_that_are_met():
    found = verdicts(measured())
    assert len(found) == 1 + 2 + 3 * 5 and set(found.values()) == {"met"}
    assert targets.missed(targets.targets(measured())) == ""


def test_targets_that_are_missed_are_marked_with_room_for_the_reason(tmp_path):
    found = verdicts(measured(speed=1.45))
    wrong = {name for name, verdict in found.items() if verdict == "MISSED"}
    assert {name.split(",")[0] for name in wrong} == {"FProp", "decoding"} and len(wrong) == 6
    page = tmp_path / "page.md"
    record = {"versions": {}, "command": "c", "seconds": 1.0, "missing": {}}
    report.write(page, "T", record, {"targets": ("Targets", targets.targets(measured(speed=1.45)), "")})
    text = page.read_text()
    assert text.count("MISSED") == 6 and text.count("not explained yet") == 6 and "## Missed" in text


@pytest.mark.parametrize(
    ("part", "change", "target", "verdict"),
    [
        ("rows", lambda rows: [{**rows[0], "verdict": "may not serve", "found": "3 differ"}], "rows do not", "MISSED"),
        ("rows", lambda rows: [], "rows do not", "not measured"),
        ("products", lambda rows: rows[3:], "FProp, Qwen2.5-7B", "not measured"),  # one linear is missing
        ("layers", lambda rows: [{**r, "ms": math.nan} for r in rows], "linears forward", "not measured"),
        ("layers", lambda rows: [{**r, "saved MiB": 1.5} for r in rows], "saved", "MISSED"),
        ("layers", lambda rows: [{**r, "saved MiB": ""} for r in rows], "saved", "not measured"),
        ("decode", lambda rows: [{**r, "M": 8} for r in rows], "decoding", "not measured"),
        ("quantizers", lambda rows: [{**r, "of the copy": 0.84} for r in rows], "quantizers at", "MISSED"),
        ("quantizers", lambda rows: [{**r, "of the copy": 0.9} for r in rows], "both layouts", "MISSED"),
        ("quantizers", lambda rows: rows[2:], "quantizers at", "not measured"),
    ],
)
def test_each_target_sees_its_figure(part, change, target, verdict):
    tables = measured()
    found = verdicts(measured(**{part: change(tables[part][1])}))
    assert {v for name, v in found.items() if name.startswith(target)} == {verdict}


def test_a_slower_choice_than_the_best_backend_is_a_miss():
    tables = measured()
    rows = [{**row, "us": 0.9} if row["backend"] == "triton" else row for row in tables["products"][1]]
    found = verdicts(measured(products=rows))
    assert {v for name, v in found.items() if "the best backend" in name} == {"MISSED"}
    refused = [{"backend": "deep_gemm", "verdict": "may not serve", "found": "x"}]
    assert targets.serving({"rows": refused, "products": rows}) == "triton"


def test_parts_get_a_page_of_their_own():
    assert gpu.page_of(None) == gpu.page_of([]) == gpu.PAGE
    assert gpu.page_of(["profile"]).name == "h200-profile.md" and gpu.page_of(["rows", "rows"]).name == "h200-rows.md"


def test_one_launch_and_two_are_both_measured():
    machine = Machine(torch.device("cpu"), wall_clock, {"triton": get_backend("triton")})
    assert [b.few() for b in (*launches.one_launch(machine).values(), *launches.two_launches(machine).values())] == [64, 0]
    assert 0 < get_backend("triton").few() < 64
    machine.backends = {"native": get_backend("native")}
    assert launches.one_launch(machine) == launches.two_launches(machine) == {}


def test_the_shares_of_time_leave_room():
    assert sum(share for _, _, share in gpu.PARTS.values()) == pytest.approx(1)
    assert gpu.SECONDS <= 7 * 60


def test_the_page_says_whether_it_was_measured():
    """Before the first run the page has no figures; after it, a JSON file holds the same figures."""
    page = ROOT / "docs" / "benchmarks" / "h200.md"
    if page.with_suffix(".json").exists():
        assert "Command: `python -m benchmarks.gpu" in page.read_text()
    else:
        text = page.read_text()
        assert "Not measured yet" in text and "make bench-gpu" in text and "TFLOP" not in text
