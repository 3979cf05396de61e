"""``jetrl doctor``: frameworks that are missing, or of a version that is not supported."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from jetrl_patch import session as runtime
from jetrl_patch.config import Config
from jetrl_patch.errors import VersionError
from jetrl_patch.patching import guards
from tests.doctor.asked import doctor, named, openrlhf, verl, without


@pytest.mark.parametrize("name", ["torch", "vllm", "verl", "openrlhf", "transformers", "ray"])
def test_a_version_out_of_range(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = guards.installed_version
    monkeypatch.setattr(guards, "installed_version", lambda asked: "0.0.1" if asked == name else real(asked))
    found = doctor(status=1)
    check = named(found, name)
    assert check["state"] == "problem" and "found 0.0.1" in check["finding"]
    assert check["to_do"].startswith(f"Install {name}>=")
    assert found["verdict"] == "a run would NOT start: 1 problem"
    assert named(found, "patches")["state"] == "skipped" and not found["patches"]


def test_a_version_out_of_range_stops_other_frameworks_too(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    real = guards.installed_version
    monkeypatch.setattr(guards, "installed_version", lambda asked: "0.0.1" if asked == "openrlhf" else real(asked))
    found = doctor("--", *verl(model), status=1)  # enable() refuses this too
    assert named(found, "openrlhf")["state"] == "problem"
    assert named(found, "openrlhf")["finding"].endswith("this stops the plugin, although the command runs verl")
    with pytest.raises(VersionError, match="openrlhf"):
        runtime.preview(Config())


@pytest.mark.parametrize("name", ["torch", "vllm"])
def test_a_missing_part_of_every_run(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    without(monkeypatch, name)
    check = named(doctor(status=1), name)
    assert check["state"] == "problem" and "found no installation" in check["finding"]


@pytest.mark.parametrize("name", ["verl", "openrlhf"])
def test_a_missing_framework_stops_its_own_runs_only(monkeypatch: pytest.MonkeyPatch, model: Path, name: str) -> None:
    without(monkeypatch, name)
    commands = {"verl": verl(model, "+jetrl=unified"), "openrlhf": openrlhf(model)}
    found = doctor("--", *commands.pop(name), status=1)
    assert named(found, name)["state"] == "problem" and "found no installation" in named(found, name)["finding"]
    for rest in ([], next(iter(commands.values()))):
        check = named(doctor("--", *rest, status=0), name)
        assert (check["state"], check["to_do"]) == ("skipped", "")
        assert check["finding"] == f"not installed; only runs of {name} need it"


def test_no_framework_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "verl", "openrlhf", "deepspeed")
    found = doctor(status=1)
    for name in ("verl", "openrlhf", "trl"):
        check = named(found, name)
        assert check["state"] == "problem"
        assert check["to_do"] == "install the framework that you train with: openrlhf or trl or verl"
    assert named(found, "deepspeed")["state"] == "skipped"


def test_openrlhf_without_deepspeed(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    without(monkeypatch, "deepspeed")
    found = named(doctor("--", *openrlhf(model), status=1), "deepspeed")
    assert found["to_do"] == f"install deepspeed==0.19.6, which openrlhf {metadata.version('openrlhf')} pins"
    assert found["state"] == "problem"
    assert named(doctor("--", *verl(model, "+jetrl=unified"), status=0), "deepspeed")["state"] == "skipped"


def test_without_a_command_each_framework_gets_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only OpenRLHF misses does not stop verl's runs."""
    without(monkeypatch, "deepspeed")
    found = doctor(status=0)
    assert found["verdict"] == "a run would start, but not one of openrlhf: see deepspeed"
    assert named(found, "deepspeed")["state"] == "warning"
    assert named(found, "deepspeed")["finding"] == "not installed, but OpenRLHF trains with it; other runs start"
    without(monkeypatch, "deepspeed", "verl")
    found = doctor(status=1)
    assert named(found, "deepspeed")["state"] == "problem"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that these versions are installed, None for a missing package. The frameworks' own requirements stay."""

    def install(**versions: str | None) -> None:
        without(monkeypatch, *(name for name, version in versions.items() if version is None))
        real = guards.installed_version
        monkeypatch.setattr(guards, "installed_version", lambda asked: versions.get(asked) or real(asked))

    return install


def test_a_user_of_verl_is_advised_what_verl_pins(installed: Callable[..., None], model: Path) -> None:
    """Without a command, the installed framework decides; OpenRLHF's packages are not checked."""
    installed(openrlhf=None, deepspeed=None, vllm="0.15.0", torch="2.4.0", transformers="5.15.0")
    for command in ([], verl(model)):
        found = doctor("--", *command, status=1)
        wanted = {"vllm": "0.24.0", "torch": "2.11.0", "transformers": "5.9.0"}
        for name, version in wanted.items():
            assert named(found, name)["to_do"] == f"install {name}=={version}, which verl 0.9.1 pins"
        assert "but verl 0.9.1 requires" in named(found, "transformers")["finding"]  # supported by us, and it breaks verl
        assert named(found, "transformers")["state"] == "warning" and named(found, "vllm")["state"] == "problem"
        assert named(found, "openrlhf")["state"] == named(found, "deepspeed")["state"] == "skipped"
        assert "openrlhf" not in json.dumps([check["to_do"] for check in found["checks"]]).lower()


def test_a_user_of_openrlhf_is_advised_what_openrlhf_pins(installed: Callable[..., None]) -> None:
    installed(verl=None, transformers="5.9.0", vllm="0.15.0")
    found = doctor(status=1)
    assert named(found, "transformers")["to_do"] == "install transformers==5.15.0, which openrlhf 0.11.2 pins"
    assert named(found, "vllm")["to_do"] == "install vllm==0.29.0, which openrlhf 0.11.2 pins"


def test_no_pin_is_advised_that_breaks_another_framework(installed: Callable[..., None], model: Path) -> None:
    """verl refuses the transformers that OpenRLHF pins, so the doctor says nothing about it where both are installed."""
    found = doctor("--", *openrlhf(model), status=0)
    assert named(found, "transformers")["state"] == "ok"
    installed(transformers="5.1.0")
    assert named(doctor("--", *openrlhf(model), status=1), "transformers")["to_do"].startswith("Install transformers>=5.5.3")
