"""The progress of long commands: in a log and on a terminal, and for every long command."""

from __future__ import annotations

import errno
import io
import json
import re
import threading
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from jetrl_patch import progress
from jetrl_patch.cli import export as checkpoint
from jetrl_patch.cli.main import app
from jetrl_patch.cli.report.command import watch
from jetrl_patch.progress import Display
from tests import models

#: commands that can take more than ten seconds and show progress; tests/parity/test_progress.py tests the first
LONG = {"parity", "export", "doctor", "report"}
#: the user's own programs, whose output is theirs
PROGRAMS = {"run", "verl", "openrlhf", "trl"}


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorded:
    """A ``Progress`` that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, str] | int] = []

    def stage(self, name: str, total: int = 0, unit: str = "") -> None:
        self.calls.append((name, total, unit))

    def done(self, count: int) -> None:
        self.calls.append(count)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(text: str) -> list[str]:
    """The lines of a log, which have no control characters."""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    return text.splitlines()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for every stage, however short it is."""
    monkeypatch.setattr(progress, "SOON", 0.0)


def test_a_log_gets_a_line_for_each_stage_and_every_ten_seconds() -> None:
    clock, log = Clock(), io.StringIO()
    with Display("parity", log, clock=clock) as shown:
        shown.part = "bf16, 1 of 2"
        shown.stage("loading the engine")
        assert log.getvalue() == ""  # it may be quick
        for _ in range(13):
            clock.now += 1
            shown._show()
        shown.stage("scoring", 1200, "batches")
        for count in range(1, 45):
            shown.done(count)
            clock.now += 0.25
            shown._show()
        shown.part = ""
        shown.stage("loading the trainer's model")
        shown.stage("checking")
        clock.now += 0.25
    clock.now += 100
    with shown:  # goes on with the same clock, and not with the stage of before
        clock.now += 100
        shown._show()
        shown.stage("writing")
    assert plain(log.getvalue()) == [
        "jetrl parity: loading the engine (bf16, 1 of 2), 0:00:01 elapsed",
        "jetrl parity: loading the engine (bf16, 1 of 2), 0:00:11 elapsed",
        "jetrl parity: scoring (bf16, 1 of 2): 0 of 1,200 batches, 0:00:13 elapsed",
        "jetrl parity: scoring (bf16, 1 of 2): 40 of 1,200 batches, 0:00:23 elapsed",
        "jetrl parity: loading the trainer's model, 0:00:24 elapsed",
        "jetrl parity: writing, 0:03:44 elapsed",
    ]


def test_lines_are_written_while_the_work_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a single call of a framework that takes minutes."""
    monkeypatch.setattr(progress, "STILL", 0.3)
    third = threading.Event()

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            if self.getvalue().count("\n") >= 2:
                third.set()
            return super().write(text)

    log = Log()
    with Display("export", log) as shown:
        shown.stage("merging the shards")
        assert third.wait(30)
    assert {line.split(",")[0] for line in plain(log.getvalue())} == {"jetrl export: merging the shards"}


def test_the_first_line_comes_within_two_seconds_and_lines_of_a_stage_ten_seconds_apart() -> None:
    assert progress.SOON <= 1.0 and progress.STILL == 10.0


def test_a_terminal_gets_a_live_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    with Display("export", terminal) as shown:
        shown.stage("writing", 1200, "tensors")
        shown.done(1100)
    lines = terminal.getvalue()
    assert "writing" in lines and "1,100 of 1,200 tensors" in lines and "jetrl export" not in lines
    assert lines.endswith("\x1b[2K")


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_no_live_line_where_it_cannot_be_or_is_not_wanted(term: str, monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in the logs of many CI systems
    for stream, live in ((Terminal(), term == "dumb"), (io.StringIO(), True)):
        with Display("parity", stream, live=live) as shown:
            shown.stage("checking")
        assert plain(stream.getvalue()) == ["jetrl parity: checking, 0:00:00 elapsed"]


def test_a_log_on_a_full_disk_does_not_end_the_work(at_once: None) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with Display("parity", Full()) as shown:
        shown.stage("checking")


def test_every_command_is_known_to_be_long_or_quick() -> None:
    """A new command belongs in one of these sets; a long one is tested below."""
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert names == LONG | PROGRAMS | {"status"}


def stages(text: str, command: str) -> list[str]:
    """The stages of a log, in their order; every line of it must be one of progress."""
    found = []
    for line in plain(text):
        match = re.fullmatch(rf"jetrl {command}: (.*), \d:\d\d:\d\d elapsed", line)
        assert match, line
        found.append(match[1])
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(models.save(tmp_path_factory.mktemp("progress") / "model", "qwen3", steps=0))


def test_an_export(model: Path, tmp_path: Path, at_once: None) -> None:
    done = CliRunner().invoke(app, ["export", str(model), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    found = stages(done.stderr, "export")
    assert found == ["loading torch", "checking the checkpoint", "writing: 0 of 36 tensors", "verifying: 0 of 36 tensors"]
    assert plain(done.stdout) == [f"{tmp_path / 'out'}: 36 tensors, {done.stdout.split()[3]} MB, 1 shard(s), verified"]


def test_an_export_counts_every_tensor_twice(model: Path, tmp_path: Path) -> None:
    seen = Recorded()
    checkpoint.export(model, tmp_path / "out", "fp8", progress=seen)
    assert seen.calls[1:] == [("writing", 36, "tensors"), *range(37), ("verifying", 36, "tensors"), *range(37)]


def test_shards_of_verl_are_merged_first(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    """verl's own merger takes minutes for a large model, in one call."""
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "fsdp_config.json").write_text("{}")

    class Merger:
        @staticmethod
        def merge(source: Path, target: Path) -> None:
            for file in model.iterdir():
                (target / file.name).write_bytes(file.read_bytes())

    monkeypatch.setattr(checkpoint.registry, "merger", Merger)
    done = CliRunner().invoke(app, ["export", str(tmp_path / "step"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert stages(done.stderr, "export")[1:3] == ["merging the shards", "checking the checkpoint"]


def test_the_doctor(at_once: None) -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert json.loads(done.stdout)["checks"]
    expected = ["checking the installation", "reading the settings", "checking the machine", "checking the patches"]
    assert stages(done.stderr, "doctor") == expected


def test_the_doctor_with_a_command(model: Path, at_once: None) -> None:
    words = ["python", "-m", "verl.trainer.main_ppo", f"actor_rollout_ref.model.path={model}"]
    done = CliRunner().invoke(app, ["doctor", "--json", "--", *words])
    assert json.loads(done.stdout)["checks"]
    assert stages(done.stderr, "doctor")[-1] == "checking the command"


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    steps = [{"step": step, "data": {"critic/score/mean": 0.5, "timing_s/step": 1.0}} for step in (1, 2, 3)]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return [str(file) for file in files]


def test_a_report(runs: list[str], tmp_path: Path, at_once: None) -> None:
    done = CliRunner().invoke(app, ["report", *runs, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert stages(done.stderr, "report") == ["reading: 0 of 2 runs", "writing the page", "drawing the pictures"]
    assert "elapsed" not in done.stdout


def test_a_report_that_is_watched(runs: list[str], tmp_path: Path, at_once: None) -> None:
    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    console, warnings = (Console(file=io.StringIO(), width=200) for _ in range(2))
    watch(runs, tmp_path / "out", "title", 10, console, warnings, sleep)
    assert isinstance(warnings.file, io.StringIO) and isinstance(console.file, io.StringIO)
    look = ["reading: 0 of 2 runs", "writing the page"]
    assert stages(warnings.file.getvalue(), "report") == [*look, *look, "drawing the pictures"]
    assert "elapsed" not in console.file.getvalue()
