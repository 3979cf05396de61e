"""How adapters are found: those of this package, those of others, and packages that offer something broken."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jetrl_patch import registry, session
from jetrl_patch.errors import PatchError, VersionError
from jetrl_patch.patching import discovery
from jetrl_patch.patching.identity import identity

CACHES = (discovery.offered, discovery.programs, registry.adapters, identity)
GOOD = """
from jetrl_patch.registry import Adapter

class FakeAdapter(Adapter):
    name, requires = "fakefw", ("packaging>=20",)

ADAPTER = FakeAdapter()
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a package whose one module offers an adapter."""
    for cache in CACHES:
        cache.cache_clear()
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str, *, name: str = "fakefw", package: str = "outside", attribute: str = "ADAPTER") -> None:
        (tmp_path / f"{package}.py").write_text(source)
        info = tmp_path / f"{package}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
        points = f"[{discovery.GROUP}]\n{name} = {package}:{attribute}\n[{discovery.PROGRAMS}]\n{name} = fakefw.a\n"
        (info / "entry_points.txt").write_text(points)
        importlib.invalidate_caches()

    yield write
    for cache in CACHES:
        cache.cache_clear()
    for package in ("outside", "jetrl_patch_more"):
        sys.modules.pop(package, None)


def test_its_own_come_in_the_order_of_application() -> None:
    names = [adapter.name for adapter in registry.adapters()]
    assert names == ["transformers", "vllm", "cpu", "megatron", "ray", "verl", "openrlhf", "trl"]


def test_another_packages_adapter_comes_last_and_is_part_of_the_identity(install: Callable[..., None]) -> None:
    alone = identity()
    for cache in CACHES:
        cache.cache_clear()
    install(GOOD)
    assert [adapter.name for adapter in registry.adapters()][-1] == "fakefw"
    assert registry.programs()["fakefw"] == "fakefw.a" and registry.resolve("fakefw").launches() is None
    assert identity() == f"{alone} with outside 1.5"  # a worker without the package is refused by what it says it is
    assert "fakefw" not in {adapter.name for adapter in registry.installed()}


def test_it_is_applied_where_its_framework_is_installed(install: Callable[..., None], framework: Path) -> None:
    install(GOOD)
    assert registry.installed()[-1].name == "fakefw"
    try:
        assert session.enable(precision="bf16").versions["packaging"]
    finally:
        session.disable()


def test_a_range_that_does_not_fit_is_a_version_error(install: Callable[..., None], framework: Path) -> None:
    install(GOOD.replace("packaging>=20", "packaging>=2,<3"))
    with pytest.raises(VersionError, match=r"packaging: required version <3,>=2, found .*\. Install packaging<3,>=2\."):
        session.enable()


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("import no_such_module", {}, "adapter fakefw of outside 1.5: required outside:ADAPTER, found .*no_such_module"),
        ("", {}, "adapter fakefw of outside 1.5: required outside:ADAPTER, found AttributeError"),
        ("ADAPTER = 3", {}, "required an instance of jetrl_patch.registry.Adapter, found 3. Correct outside:ADAPTER"),
        (GOOD, {"name": "verl"}, "adapter verl: required one package that offers it, found .*outside 1.5"),
    ],
    ids=["import", "attribute", "type", "name"],
)
def test_a_broken_package_stops_the_run(install: Callable[..., None], source: str, options: dict[str, Any], says: str) -> None:
    install(source, **options)
    with pytest.raises(PatchError, match=says):
        session.enable()
    assert not session.is_active()


def test_an_unknown_name_lists_the_known(install: Callable[..., None]) -> None:
    with pytest.raises(PatchError, match=r"required one of transformers, .*, openrlhf, trl, found skyrl"):
        registry.resolve("skyrl")


def test_an_installation_without_entry_points_says_how_to_renew_it(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "entry_points", lambda group: ())
    with pytest.raises(PatchError, match=r"registers its adapters .*found none\. Run `pip install -e \.`"):
        registry.installed()


@pytest.mark.parametrize("entry", ["verl", "vllm"])
def test_the_frameworks_plugins_stop_too(entry: str) -> None:
    """verl goes on without a plugin whose import fails with an Exception, so looking for adapters must not fail there."""
    old = "import importlib.metadata as m; m.entry_points = lambda **_: ()"
    code = f"{old}; import jetrl_patch.adapters.{entry}.entry as e; e.register()"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JETRL_")}
    environ["JETRL_PRECISION"] = "fp8-unified"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    raised = "PluginFailed: PatchError" if entry == "verl" else "jetrl_patch.errors.PatchError"
    assert done.returncode == 1 and raised in last and "registers its adapters" in last and "pip install -e ." in last


def test_a_package_whose_name_begins_like_ours_is_another(install: Callable[..., None]) -> None:
    install(GOOD, package="jetrl_patch_more")
    assert discovery.outside() == ["jetrl_patch_more 1.5"]
    points = discovery.offered()
    assert discovery.is_ours(points["verl"]) and not discovery.is_ours(points["fakefw"])


def test_a_source_folder_without_adapters_is_named_as_such(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(PatchError, match=r"the source folder .*pip install -e \."):
        registry.adapters()


def test_adapters_import_nothing_heavy() -> None:
    code = "import sys; from jetrl_patch import registry; registry.adapters(); print({'torch', 'vllm', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
