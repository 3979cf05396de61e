"""``make hopper`` without a GPU: its plan, its checks, what it keeps and goes on with, its pages, and the dry run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from benchmarks.hopper import __main__ as hopper
from benchmarks.hopper import clocks, needs, page, parity, part, tests
from benchmarks.hopper.cells import Cell, Setup
from benchmarks.hopper.plan import LIMIT, PARTS, find
from benchmarks.hopper.record import Found, Record, load
from jetrl_patch import support
from jetrl_patch.fp8.backends import capability

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.hopper", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})


def test_the_plan_needs_the_standard_library_alone():
    code = "import sys; from benchmarks.hopper.__main__ import main; assert not main(['--plan']) and 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [line[0] for line in run.stdout.splitlines()[1:8]] == list("abcdefg") and "estimated" in run.stdout


def test_a_command_ends_before_nine_minutes():
    assert LIMIT + 3 * hopper.GRACE < 9 * 60


def test_parts_have_letters_and_names(capsys):
    assert [p.letter for p in find(["g", "tests", "a"])] == ["a", "g"] and len(find([])) == len(PARTS)
    assert hopper.main(["--part", "z"]) == 2 and "no part is called 'z'" in capsys.readouterr().err


def test_without_a_gpu_it_says_so_before_anything_starts(tmp_path):
    run = start("--part", "b", "--out", str(tmp_path / "out"), CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 1 and run.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
    assert "required an NVIDIA GPU with FP8 of compute capability 9.0" in run.stderr and "sees no CUDA device" in run.stderr


@pytest.fixture
def machine(monkeypatch):
    """A machine on which everything is there."""
    import torch

    monkeypatch.setattr(needs.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(capability, "check_hopper", lambda: (True, "H200"))
    monkeypatch.setattr(capability, "deep_gemm_installed", lambda: True)
    monkeypatch.setattr(capability, "check_deep_gemm", lambda: (True, ""))
    monkeypatch.setattr(support, "check_framework", lambda name: (True, "1"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (130 * needs.GIB, 140 * needs.GIB))
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=99 * needs.GIB))
    return monkeypatch


def test_a_machine_that_can(machine, tmp_path):
    assert needs.problem(PARTS, tmp_path) == ""


@pytest.mark.parametrize(
    ("where", "name", "what", "says"),
    [
        (needs.importlib.util, "find_spec", lambda name: None if name == "vllm" else name, "part c (parity): required the packa"),
        (capability, "check_hopper", lambda: (False, "this has 8.0"), "compute capability 9.0 (H100, H200), found: this has 8.0"),
        (support, "check_framework", lambda name: (name != "vllm", "vllm 0.1"), "required a supported vllm, found vllm 0.1"),
        (capability, "check_deep_gemm", lambda: (False, "no nvcc"), "found no nvcc. Install it, or add --without-deep-gemm"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_line(machine, tmp_path, where, name, what, says):
    machine.setattr(where, name, what)
    found = needs.problem(PARTS, tmp_path)
    assert says in found and "\n" not in found


def test_too_little_memory_and_disk(machine, tmp_path):
    machine.setattr(capability, "check_deep_gemm", lambda: (False, "no nvcc"))
    machine.setattr("torch.cuda.mem_get_info", lambda: (30 * needs.GIB, 80 * needs.GIB))
    assert needs.problem(find(["a"]), tmp_path, deep_gemm=False) == ""
    found = needs.problem(PARTS, tmp_path, deep_gemm=False)
    assert "part b (kernels): required 48 GiB of free GPU memory, found 30 of 80 GiB" in found
    machine.setattr("torch.cuda.mem_get_info", lambda: (80 * needs.GIB, 80 * needs.GIB))
    machine.setattr(needs.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=2 * needs.GIB))
    assert "part d (rollout): required 20 GiB of disk" in needs.problem(PARTS, tmp_path, deep_gemm=False)


def test_cells_run_once_and_the_next_command_goes_on(tmp_path):
    now, done = [0.0], []

    def rows(name):
        done.append(name)
        now[0] += 60
        yield {"a": name}

    cells = {name: Cell("T", lambda name=name: rows(name), 100) for name in "xyz"}
    file = tmp_path / "kernels.json"
    clock = lambda: now[0]  # noqa: E731
    assert part.run(cells, load(file, "kernels"), file, "one", 200, clock) == part.LEFT
    assert load(file, "kernels").left == ["z"] and done == ["x", "y"]
    assert part.run(cells, load(file, "kernels"), file, "two", 200, clock) == part.DONE
    record = load(file, "kernels")
    assert done == ["x", "y", "z"] and record.state == "done" and record.cells["z"].command == "two"
    assert part.run(cells, record, file, "three", 200, clock) == part.DONE and len(done) == 3


def test_a_cell_that_fails_keeps_its_rows_and_runs_again_when_asked(tmp_path):
    def rows():
        yield {"a": 1}
        raise RuntimeError("out of memory")

    file = tmp_path / "kernels.json"
    assert part.run({"x": Cell("T", rows, 1)}, load(file, "kernels"), file, "c") == part.FAILED
    record = load(file, "kernels")
    assert record.cells["x"].rows == [{"a": 1}] and "after 1 rows: RuntimeError: out of memory" in record.cells["x"].error
    assert record.state == "done, 1 failed" and "out of memory" in page.page(find(["b"])[0], record)
    hopper.forget(file, find(["b"])[0])
    assert load(file, "kernels").left == ["x"]


def test_time_that_runs_out_within_a_cell_is_told():
    ticks = iter(range(100))
    found = part.measure("x", Cell("T", lambda: iter([{"a": 1}] * 9), 2), "c", lambda: next(ticks))
    assert found.note == "Time ran out after 2 rows." and len(found.rows) == 2


def test_a_part_that_does_not_end_is_ended_and_its_cell_is_not_begun_again(tmp_path, monkeypatch):
    (kernels,) = find(["b"])
    file, begun = tmp_path / "kernels.json", []
    Record("kernels", planned=["x", "y"], running="x").save(file)
    original = subprocess.Popen

    def sleeping(words, **settings):
        begun.append(words)
        return original([sys.executable, "-c", "import time; time.sleep(60)"], **settings)

    monkeypatch.setattr("examples.common.processes.subprocess.Popen", sleeping)
    before = time.monotonic()
    assert not hopper._run(kernels, tmp_path, tmp_path, "c", True, False, limit=1)
    assert time.monotonic() - before < 30 and begun
    record = load(file, "kernels")
    assert "did not end within 1 s" in record.cells["x"].error and record.left == ["y"]


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "tests.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a record"):
        load(tmp_path / "tests.json", "tests")
    Record("sync").save(tmp_path / "tests.json")
    with pytest.raises(ValueError, match="'sync', not of 'tests'"):
        load(tmp_path / "tests.json", "tests")


def test_the_pages_are_those_of_the_records(tmp_path):
    pages = ROOT / "docs" / "benchmarks" / "hopper"
    for file in pages.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
        assert not json.loads(file.read_text())["dry"]
    page.write(tmp_path)
    assert {f.name: f.read_text() for f in tmp_path.glob("*.md")} == {f.name: f.read_text() for f in pages.glob("*.md")}


def test_a_page_says_what_was_not_measured():
    (first, *_) = PARTS
    assert "**Not measured:**" in page.page(first, Record("tests"))
    record = Record("tests", dry=True, planned=["x", "y"], cells={"x": Found("Files", [{"failed": 0, "skipped": 0, "a": "1|2"}])})
    text = page.page(first, record)
    assert "A dry run" in text and "not run yet: y" in text and "| 0 | 0 | 1/2 |" in text and "not measured" in text


def test_samples_of_the_clocks():
    assert clocks.summary("1980, 690.5, 60\n1600, 700.5, 62\n[N/A], 1, 2\n19") == {
        "SM MHz": 1790.0, "W": 695.5, "°C": 61.0, "lowest SM MHz": 1600.0,
    }  # fmt: skip
    assert clocks.summary("") == {}


@pytest.mark.parametrize(("deep_gemm", "backend"), [(True, "auto"), (False, "triton")])
def test_without_deep_gemm_no_engine_takes_it(tmp_path, monkeypatch, deep_gemm, backend):
    found = []
    monkeypatch.setattr(parity, "long_model", lambda folder: folder)
    monkeypatch.setattr(parity, "run_mode", lambda job: found.append(job.config.backend) or {})
    for cell in parity.cells(Setup(False, tmp_path, Record("parity"), deep_gemm)).values():
        with pytest.raises(KeyError):  # the run has no result
            list(cell.run())
    assert set(found[:-1]) == {backend} and found[-1] == "auto"  # the last is without the plugin


@pytest.mark.parametrize(
    ("cells", "verdict"),
    [
        ({"exact, 1": 1.0, "exact, 2": 1.0, "linear": 0.4}, "met"),
        ({"exact, 1": 1.0}, "not measured"),
        ({"exact, 1": 0.99}, "MISSED"),
    ],
)
def test_parity_promises_every_token(cells, verdict):
    rows = {name: [{"bit-equal": share}] for name, share in cells.items()}
    (table,) = parity.derive(rows, ["exact, 1", "exact, 2", "linear"])
    assert table.rows[0]["verdict"] == verdict


@pytest.mark.parametrize(
    ("failed", "skipped", "planned", "verdict"),
    [(0, 0, ["x"], "met"), (1, 0, ["x", "y"], "MISSED"), (0, 1, ["x"], "not measured"), (0, 0, ["x", "y"], "not measured")],
)
def test_tests_that_did_not_run_are_no_success(failed, skipped, planned, verdict):
    (table,) = tests.derive({"x": [{"failed": failed, "skipped": skipped}]}, planned)
    assert table.rows[0]["verdict"] == verdict


@pytest.mark.e2e
def test_the_dry_run(tmp_path):
    """Every part runs its own code on this CPU; only the trainer of part g is a stand-in."""
    run = start("--dry", "--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch"))
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    for each in PARTS:
        record = load(tmp_path / "out" / f"{each.name}.json", each.name)
        assert record.dry and record.state == "done" and all(found.rows for found in record.cells.values()), each.name
        assert "A dry run on a CPU" in (tmp_path / "out" / f"{each.name}.md").read_text()
    assert load(tmp_path / "out" / "parity.json", "parity").rows()["exact, CUDA graphs, 2"][0]["bit-equal"] == 1.0
