"""The built wheel, tested outside the source tree: it is complete and contains nothing else."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from jetrl_patch._versions import VERSION
from jetrl_patch.patching.identity import identity
from tests.wheels import build, install, run

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"  # building leaves build/ and egg-info behind
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE", "jetrl_patch", "adapters"):
        run("cp", "-r", str(ROOT / name), str(copy), cwd=folder)
    return build(copy, folder)


@pytest.fixture(scope="module")
def target(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("target"))


def test_the_wheel_has_every_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for source, prefix in (("jetrl_patch", "jetrl_patch"), ("adapters", "jetrl_patch/adapters")):
        for path in (ROOT / source).rglob("*"):
            if path.suffix in (".py", ".c", ".css", ".html", ".js", ".typed"):
                assert f"{prefix}/{path.relative_to(ROOT / source)}" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"jetrl_patch"}


def test_it_works_from_another_folder(target: Path, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import jetrl_patch, jetrl_patch.registry as base\n"
        "from jetrl_patch import registry\n"
        f"assert base.__file__.startswith({str(target)!r}) and jetrl_patch.__file__.startswith({str(target)!r})\n"
        "print([adapter.name for adapter in registry.adapters()])"
    )
    said = run(sys.executable, "-c", code, cwd=tmp_path).strip()
    assert said == "['transformers', 'vllm', 'cpu', 'megatron', 'ray', 'verl', 'openrlhf', 'trl']"


def test_its_identity_is_that_of_the_clone_and_changes_with_the_sources(target: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(target, copy)
    asks = "import sys; sys.path.insert(0, {!r}); from jetrl_patch.patching.identity import identity; print(identity())"
    assert run(sys.executable, "-c", asks.format(str(copy)), cwd=tmp_path).strip() == identity()
    for changed in ("jetrl_patch/fp8/linear.py", "jetrl_patch/adapters/verl/sync.py"):
        before = (copy / changed).read_bytes()
        (copy / changed).write_bytes(before + b"#\n")
        found = run(sys.executable, "-c", asks.format(str(copy)), cwd=tmp_path).strip()
        assert found != identity() and found.startswith(VERSION)
        (copy / changed).write_bytes(before)


def test_the_entry_points_are_declared(target: Path) -> None:
    (text,) = (path.read_text() for path in target.glob("*.dist-info/entry_points.txt"))
    assert "jetrl = jetrl_patch.cli.main:main" in text
    assert "[vllm.general_plugins]\njetrl_patch = jetrl_patch.adapters.vllm.entry:register" in text
    assert "[verl.plugins]\njetrl_patch = jetrl_patch.adapters.verl.entry" in text


def test_from_the_repository_root_an_ordinary_install_is_named_as_the_trap_it_is(wheel: Path) -> None:
    # the source folder comes first on the path and has no adapters; -S keeps the editable finder out
    site = [path for path in sys.path if path.endswith("site-packages")]
    code = (
        f"import sys; sys.path[1:1] = {site!r}\n"
        "from jetrl_patch import registry\n"
        "try: registry.resolve('transformers')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = run(sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, '.')\n{code}", cwd=ROOT)
    assert said.startswith("PatchError jetrl_patch.adapters: required an installed jetrl_patch")
    assert "pip install -e ." in said
