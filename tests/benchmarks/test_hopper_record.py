"""The records of ``make hopper``: what is measured once and kept, in which order, and the pages of it."""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from benchmarks.hopper import __main__ as hopper
from benchmarks.hopper import plan, record
from benchmarks.hopper.plan import Setup, Step, find

from . import pieces_that_end

ROOT = Path(__file__).resolve().parents[2]


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
