"""The source distribution equals the repository: it builds, installs and passes tests on its own."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.wheels import build, install, run

ROOT = Path(__file__).resolve().parent.parent

#: quick tests that between them read every kind of file a distribution might lack
TESTS = ("tests/test_config.py", "tests/test_configuration_page.py", "tests/test_readme.py", "tests/docs/test_project.py",
         "tests/patching")  # fmt: skip


def tracked() -> list[str]:
    """The files of the repository, whether it is a clone or an unpacked distribution."""
    listed = subprocess.run(("git", "ls-files"), cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    skipped = {"build", "dist", "outputs"}
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [str(path) for path in found if not skipped & set(path.parts) and "__pycache__" not in path.parts]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "source"  # building leaves egg-info behind
    for name in tracked():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(folder)!r}))"
    run(sys.executable, "-c", build, cwd=copy)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_every_file_of_the_repository_is_in_it(unpacked: Path) -> None:
    kept_back = (".ci/",)  # the hosting service's checks
    missing = [name for name in tracked() if not (unpacked / name).exists() and not name.startswith(kept_back)]
    assert not missing


def test_its_tests_pass_against_the_wheel_that_it_builds(unpacked: Path, tmp_path: Path) -> None:
    target = install(build(unpacked, tmp_path), tmp_path / "target")
    # -P keeps the source folder, which has no adapters, off the path before the installed package
    code = f"import sys; sys.path[:0] = [{str(target)!r}, {str(unpacked)!r}]; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    said = run(sys.executable, "-P", "-c", code, *options, *TESTS, cwd=unpacked)
    assert " passed" in said
    assert " failed" not in said
