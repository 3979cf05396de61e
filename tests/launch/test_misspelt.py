"""A misspelt ``JETRL_*`` variable stops every way into the plugin, even if nothing else enables it."""

from __future__ import annotations

import runpy
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from jetrl_patch import session
from jetrl_patch.adapters.ray import worker
from jetrl_patch.adapters.vllm.entry import register
from jetrl_patch.cli import run
from jetrl_patch.cli.main import app
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError
from jetrl_patch.patching.identity import identity

CONFIG = Config(precision="bf16")


def load_verls_plugin() -> None:
    """verl swallows any Exception of a plugin, so this one raises another kind, with the real error as its cause."""
    try:
        runpy.run_module("jetrl_patch.adapters.verl.entry")
    except BaseException as error:
        if type(error).__name__ != "PluginFailed" or error.__cause__ is None:
            raise
        raise error.__cause__ from None


@pytest.mark.parametrize(
    "way",
    [
        lambda: session.enable(CONFIG),
        session.activate_from_env,
        register,
        lambda: worker.start(identity(), CONFIG.to_env()),
        load_verls_plugin,
    ],
    ids=["enable", "activate", "vllm", "ray", "verl"],
)
def test_a_misspelt_variable_is_an_error(way: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JETRL_PRECISON", "fp8-unified")
    with pytest.raises(ConfigError, match=r"^unknown environment variable JETRL_PRECISON\. Use JETRL_PRECISION, or another"):
        way()
    assert not session.is_active()


def test_a_plugin_that_is_switched_off_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JETRL_PRECISON", "fp8-unified")
    monkeypatch.setenv("JETRL_ENABLED", "0")
    register()
    assert not session.activate_from_env() and not session.is_active()


def test_status_does_not_say_that_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JETRL_PRECISON", "fp8-unified")
    result = CliRunner().invoke(app, ["doctor", "--status"])
    assert isinstance(result.exception, ConfigError) and "JETRL_PRECISON" in str(result.exception)


@pytest.mark.parametrize(
    ("environ", "words", "line"),
    [
        ({}, ["run", "x.py"], "no --fp8-unified, no --precision and no JETRL_PRECISION, so nothing is patched"),
        ({"JETRL_ENABLED": "0", "JETRL_PRECISION": "bf16"}, ["run", "x.py"], "JETRL_ENABLED=0, so nothing is patched"),
        ({}, ["verl"], "JETRL_PRECISION, so nothing is patched, unless verl's configuration has a jetrl section"),
        ({"RANK": "1"}, ["run", "x.py"], ""),
    ],
)
def test_a_program_that_is_not_patched_is_announced_in_one_line(
    environ: dict[str, str],
    words: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run, "as_command", lambda *_: ())
    monkeypatch.setattr(run, "prepare", lambda *_: None)
    monkeypatch.setattr(run, "run", lambda *_: None)
    run.main(words[0], words[1:])
    said = capsys.readouterr().err
    assert said.count("\n") == bool(line)
    assert said.startswith("jetrl: ") == bool(line) and said.rstrip().endswith(line)


def test_the_launcher_refuses_a_misspelt_variable_without_a_precision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JETRL_PRECISON", "fp8-unified")
    monkeypatch.setattr(run, "as_command", lambda *_: ())
    monkeypatch.setattr(run, "prepare", lambda *_: None)
    monkeypatch.setattr(run, "run", lambda *_: pytest.fail("the program ran"))
    with pytest.raises(SystemExit) as caught:
        run.main("run", ["x.py"])
    assert caught.value.code == 2 and "JETRL_PRECISON" in capsys.readouterr().err
