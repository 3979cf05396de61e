"""The cache of compiled kernels: damaged files are rebuilt, and failures are reported in one line."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jetrl_patch.errors import ConfigError, JetrlError
from jetrl_patch.native import build

#: in a process of its own, because a truncated library may end it with a bus error
LOAD = (
    "import torch\nfrom jetrl_patch.native import ops\n"
    "x = torch.ones(4, 128, dtype=torch.bfloat16)\nassert float(ops.bf16_gemm(x, x, torch.float32)[3, 3]) == 128.0"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache whose compiler makes the smallest library, quickly."""
    source = tmp_path / "kernels.c"
    source.write_text("int jetrl_answer(void) { return 42; }\n")
    monkeypatch.setattr(build, "SOURCES", (source,))
    monkeypatch.setenv("JETRL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("JETRL_CPU_ISA", raising=False)
    return tmp_path / "cache"


def load() -> ctypes.CDLL:
    return build._loaded.__wrapped__()[1]


def only(cache: Path) -> Path:
    (file,) = cache.iterdir()
    return file


def put(file: Path, content: bytes) -> None:
    """Replace a file. This process has mapped the old one, and must not see it shrink."""
    file.unlink()
    file.write_bytes(content)


@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.99])
def test_a_truncated_library_is_made_anew(cache: Path, kept: float) -> None:
    load()
    file = only(cache)
    whole = file.read_bytes()
    put(file, whole[: int(kept * len(whole)) if kept < 1 else int(kept)])
    assert not build.is_whole(file)
    assert load().jetrl_answer() == 42
    assert build.is_whole(only(cache)) and only(cache) == file


def test_a_whole_library_is_not_compiled_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert load().jetrl_answer() == 42


def test_other_users_can_read_it(cache: Path) -> None:
    load()
    assert only(cache).stat().st_mode & 0o777 == 0o755


def test_what_somebody_else_could_have_put_there_is_not_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    file, wanted = only(cache), "required files of this user or of root, found"
    for path in (file, cache):
        path.chmod(0o757)
        with pytest.raises(JetrlError, match=f"{wanted} {path}, which everybody can write. Remove it"):
            load()
        path.chmod(0o755)
    cache.chmod(0o1777)  # as /tmp: others cannot replace the file
    assert load().jetrl_answer() == 42
    owner = file.stat().st_uid
    monkeypatch.setattr(build.os, "getuid", lambda: owner + 1)
    if owner == 0:
        assert load().jetrl_answer() == 42
        os.chown(file, 4321, -1)
        owner = 4321
    with pytest.raises(JetrlError, match=f"{wanted} {file} of user {owner}"):
        load()


def test_the_real_kernels_survive_a_truncated_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JETRL_CACHE_DIR", str(tmp_path))
    load()
    file = only(tmp_path)
    put(file, file.read_bytes()[: file.stat().st_size * 6 // 10])
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("place", ["file/cache", "/proc/nothing"])
def test_a_cache_that_cannot_be_written(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("JETRL_CACHE_DIR", str(tmp_path / place))
    with pytest.raises(JetrlError, match=r"required a folder to write .*, found .* Set JETRL_CACHE_DIR"):
        load()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("#!/bin/sh\necho broken >&2\nexit 3\n", "found exit status 3 from .*gcc --version"),
        ("\0garbage", "found .*Exec format error"),
        ("#!/bin/sh\n[ $1 = --version ] || { echo 'x.c:1: error: no'; echo two; exit 1; } >&2\n", "x.c:1: error: no"),
        ("#!/bin/sh\n[ $1 = --version ] || exit 9\n", "found exit status 9"),
    ],
)
def test_a_compiler_that_does_not_work_says_so_in_one_line(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: str
) -> None:
    (tmp_path / "gcc").write_text(text)
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "gcc"))
    with pytest.raises(JetrlError, match=found) as caught:
        load()
    assert "\n" not in str(caught.value) and "Repair the compiler" in str(caught.value)


def only_knows(folder: Path, *refused: str) -> str:
    """A compiler that refuses some options, as an old one does."""
    real = shutil.which("gcc")
    assert real is not None
    refuse = """echo "gcc: error: unrecognized option '$a'" >&2; exit 1"""
    text = f'#!/bin/sh\nfor a in "$@"; do case $a in {"|".join(refused)}) {refuse};; esac; done\nexec {real} "$@"\n'
    (folder / "gcc").write_text(text)
    (folder / "gcc").chmod(0o755)
    return str(folder / "gcc")


ALL = frozenset().union(*(one.needs for one in build.SETS.values()))


@pytest.mark.parametrize(
    ("refused", "name", "speed"),
    [
        (("-mavx512bf16",), "avx512", "about half as fast as with AVX-512-BF16"),
        (("-mavx512bf16", "-mavx512f"), "avx2", "as fast as with AVX-512"),
        (("-mavx2",), "portable", "about 80 times slower than with AVX2"),
    ],
)
def test_an_old_compiler_serves_a_smaller_set_and_says_what_that_costs(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, refused: tuple[str, ...], name: str, speed: str
) -> None:
    monkeypatch.setattr(build, "_features", lambda: ALL)
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("CC", only_knows(tmp_path, *refused))
    assert load().jetrl_answer() == 42
    assert only(cache).name.startswith(f"kernels-{name}-")
    (said,) = caplog.messages
    assert any(f"unrecognized option '{one}'" in said for one in refused) and "\n" not in said
    assert said.endswith(f"use {name}, {speed}.")


def test_two_kinds_of_machine_share_a_home_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    for features in (ALL, build.SETS["avx2"].needs, frozenset()):
        monkeypatch.setattr(build, "_features", lambda features=features: features)
        assert load().jetrl_answer() == 42
    assert sorted(file.name.split("-")[1] for file in cache.iterdir()) == ["avx2", "avx512_bf16", "portable"]
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert load().jetrl_answer() == 42


def test_a_set_by_name(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_features", lambda: build.SETS["avx2"].needs)
    monkeypatch.setenv("JETRL_CPU_ISA", "portable")
    load()
    assert only(cache).name.startswith("kernels-portable-")
    monkeypatch.setenv("JETRL_CPU_ISA", "avx512")
    with pytest.raises(ConfigError, match=r"found one without avx512bw, .* Unset JETRL_CPU_ISA, or set it to avx2 or portable"):
        load()
    monkeypatch.setenv("JETRL_CPU_ISA", "avx")
    with pytest.raises(ConfigError, match=r"unknown JETRL_CPU_ISA=avx\. Use avx2"):
        load()


def test_no_home_for_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JETRL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(JetrlError, match="Set JETRL_CACHE_DIR"):
        load()
