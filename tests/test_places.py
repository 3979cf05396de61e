"""Places that a command cannot read or write: one line, exit status 2, before any work; never a traceback.

A file where a folder is needed, /proc, /sys and /dev/full stand for missing permissions: these tests may run as root.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetrl_patch.cli import main as cli
from jetrl_patch.cli.parity import cli as parity
from jetrl_patch.cli.parity import run as parity_run
from jetrl_patch.config import Config
from jetrl_patch.errors import JetrlError
from jetrl_patch.measure.parity import Job
from jetrl_patch.native import machine
from tests import models

LONG = "a" * 300


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    steps = [{"step": i, "data": {"critic/score/mean": 0.5, "timing_s/step": 1.0}} for i in (1, 2, 3)]
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    (tmp_path / "file").touch()
    return path


def said(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints on stderr. Any error but a JetrlError passes through, as a traceback would."""
    monkeypatch.setattr(sys, "argv", ["jetrl", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    printed = capsys.readouterr()
    assert caught.value.code == 2, printed
    errors = without_progress(printed.err)
    assert printed.out == "" and errors.count("\n") == 1 and errors.startswith("jetrl: ")
    return errors


def without_progress(text: str) -> str:
    """The stderr of a slow command that fails, without its progress."""
    return re.sub(r"^jetrl \w+: .* elapsed\n", "", text, flags=re.M)


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("out", ["file", "file/sub", "/proc/nothing", "/sys/nothing/below", LONG])
def test_a_report_that_cannot_be_written(
    run: Path, out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import jetrl_patch.cli.report.command as command

    monkeypatch.setattr(command, "collect", lambda *_: pytest.fail("the runs were read first"))
    before = left(run.parent)
    text = said(["report", str(run), "--out", str(run.parent / out)], monkeypatch, capsys)
    assert "required a place that can be written, found" in text and "Choose another place" in text and len(text) < 400
    assert left(run.parent) == before


@pytest.mark.parametrize(("name", "target"), [("time.png", "/dev/full"), ("learning.png", ""), ("report.html", "")])
def test_a_report_on_a_full_disk_or_over_a_folder(
    run: Path, name: str, target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run.parent / "out"
    out.mkdir()
    if target:
        (out / name).symlink_to(target)
    else:
        (out / name).mkdir()
    text = said(["report", str(run), "--out", str(out)], monkeypatch, capsys)
    assert ("No space left" if target else "Is a directory (") in text


@pytest.mark.parametrize("text", ["/proc/self/mem", LONG, f"name={LONG}"])
def test_a_run_that_cannot_be_read(
    run: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = said(["report", text, "--out", str(run.parent / "out")], monkeypatch, capsys)
    assert "required a place that can be read, found" in found and len(found) < 400


def test_a_folder_whose_metrics_cannot_be_read(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run.parent / "folder"
    folder.mkdir()
    (folder / "metrics.jsonl").symlink_to("/proc/self/mem")
    assert "Input/output error" in said(["report", str(folder), "--out", str(run.parent / "o")], monkeypatch, capsys)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(models.save(tmp_path_factory.mktemp("places") / "model", "qwen3", steps=0))


@pytest.mark.parametrize("out", ["file/sub", "/proc/nothing", "/sys/nothing/below", LONG])
def test_an_export_that_cannot_be_written(
    model: Path, run: Path, out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import jetrl_patch.cli.export as command

    monkeypatch.setattr(command, "export", lambda *_, **__: pytest.fail("the export began first"))
    text = said(["export", str(model), str(run.parent / out)], monkeypatch, capsys)
    assert "required a place that can be written, found" in text


def test_an_export_of_what_cannot_be_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "that can be read" in said(["export", LONG, str(tmp_path / "out")], monkeypatch, capsys)
    (tmp_path / "config.json").symlink_to("/proc/self/mem")
    assert "Input/output error" in said(["export", str(tmp_path), str(tmp_path / "out")], monkeypatch, capsys)
    assert left(tmp_path) == {"config.json"}


#: a process in which importing torch does what its parameter says
FINDER = (
    "import importlib.abc, importlib.util, sys\n"
    "class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name != 'torch': return None\n"
    "        {}\n"
    "        return importlib.util.spec_from_loader(name, self, origin='x')\n"
    "    def exec_module(self, module): raise OSError('libcudart.so.13: cannot open\\nshared object file')\n"
    "sys.meta_path.insert(0, Finder())\n"
)
HIDE, BREAK = FINDER.format("raise ModuleNotFoundError(name)"), FINDER.format("pass")


#: the start of a process, and the message about torch
WITHOUT = {
    HIDE: "torch is not installed",
    BREAK: "torch cannot be imported (OSError: libcudart.so.13: cannot open shared object file)",
}


@pytest.mark.parametrize(("start", "found"), WITHOUT.items(), ids=["missing", "broken"])
@pytest.mark.parametrize("command", ["export", "parity"])
def test_without_a_torch_that_works(command: str, start: str, found: str, tmp_path: Path) -> None:
    words = {"export": ["export", "model", str(tmp_path / "out")], "parity": ["parity", "--model", "model"]}[command]
    code = f"{start}from jetrl_patch.cli.main import main\nsys.argv = ['jetrl', *{words!r}]\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 2
    errors = without_progress(done.stderr)
    assert errors.count("\n") == 1 and f"jetrl {command}: required torch, found that {found}" in errors


@pytest.mark.parametrize("command", [[], ["--", "python", "-m", "verl.trainer.main_ppo"]], ids=["alone", "verl"])
@pytest.mark.parametrize(("start", "found"), WITHOUT.items(), ids=["missing", "broken"])
def test_doctor_without_a_torch_that_works(command: list[str], start: str, found: str) -> None:
    code = f"{start}from jetrl_patch.cli.main import main\nsys.argv = ['jetrl', 'doctor', '--json', *{command!r}]\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert any(check["state"] == "problem" and found in check["finding"] for check in checks.values())
    assert checks["patches"]["state"] == "skipped"


@pytest.mark.parametrize("file", ["nowhere/x.json", "file/x.json", ".", "/proc/x.json", "/sys/x.json"])
def test_parity_finds_out_before_it_measures_that_it_cannot_write(
    model: Path, run: Path, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity, "run_mode", lambda *_: pytest.fail("it measured first"))
    before = left(run.parent)
    text = said(["parity", "--model", str(model), "--json", str(run.parent / file)], monkeypatch, capsys)
    assert "required a place that can be written, found" in text
    assert left(run.parent) == before


def test_parity_leaves_a_file_that_is_there_as_it_is(model: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise JetrlError("measured")

    monkeypatch.setattr(parity, "run_mode", fail)
    before = run.read_text()
    with pytest.raises(JetrlError, match="measured"):
        parity.main(["--model", str(model), "--json", str(run)])
    assert run.read_text() == before


def test_a_tensor_parallel_size_that_divides_no_heads(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity, "run_mode", lambda *_: pytest.fail("it measured first"))
    text = said(["parity", "--model", str(model), "--precision", "bf16", "--tp", "3"], monkeypatch, capsys)
    assert "required a size that divides its" in text and "found 3. Use one of 1, 2" in text


def test_a_tensor_parallel_size_that_cuts_a_block(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity, "run_mode", lambda *_: pytest.fail("it measured first"))
    text = said(["parity", "--model", str(model), "--precision", "fp8-unified", "--tp", "4"], monkeypatch, capsys)
    assert "tensor parallel size 4 cuts a block of 128" in text


def test_an_error_of_a_framework_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def child(command: list[str], **_: object) -> object:
        trace = "Traceback (most recent call last):\n  File ...\nValueError: one\ntwo"
        Path(command[-1]).write_bytes(pickle.dumps(("ValueError: one\ntwo", trace)))
        return SimpleNamespace(returncode=0, stdout=b"")

    monkeypatch.setattr(parity_run.subprocess, "run", child)
    job = Job(model="m", config=Config(precision="bf16"))
    with pytest.raises(JetrlError) as caught:
        parity_run.run_mode(job)
    assert str(caught.value) == "measuring bf16 failed: ValueError: one two. Run again with --verbose for the traceback."
    with pytest.raises(JetrlError, match="Traceback"):
        parity_run.run_mode(job, verbose=True)


def test_a_broken_torch_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_installed", lambda _: True)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert machine.check_torch() == machine.check_cuda() == machine.check_compiler()
    assert machine.check_torch()[1].startswith("torch cannot be imported (ModuleNotFoundError: ")
