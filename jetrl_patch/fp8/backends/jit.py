"""What DeepGEMM needs to compile its kernels, which it does at the first product of each shape.

It looks for these things itself, by the rules repeated here (``tests/anchors/deep_gemm.json``), at import or at that product: too
late to take another backend.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

from packaging.version import Version

Check = tuple[bool, str]

#: the oldest nvcc that DeepGEMM accepts, from which version of it on, newest first; the newer one no longer knows NVRTC
NVCC = (((2, 7), (12, 9)), ((0,), (12, 3)))
#: where it looks for a toolkit if neither ``CUDA_HOME`` nor ``CUDA_PATH`` is set and no nvcc is on PATH
TOOLKIT = "/usr/local/cuda"


def check_compiler(version: str | None) -> Check:
    """Whether this version of DeepGEMM can compile here: a CUDA toolkit, nvcc with its host compiler, and a cache to write to.

    Args:
        version: None if it is not known; then it is treated as the newest.
    """
    since, oldest = next(rule for rule in NVCC if version is None or Version(version).release >= rule[0])
    home = cuda_home()
    if home is None:
        return False, f"its kernels are compiled, and there is no CUDA toolkit: no CUDA_HOME, no nvcc on PATH, no {TOOLKIT}"
    if since == (0,) and os.environ.get("DG_JIT_USE_NVRTC", "0") not in ("", "0"):
        found, reason = (home / "include").is_dir(), f"NVRTC (DG_JIT_USE_NVRTC) needs the headers of CUDA in {home}/include"
    else:
        found, reason = _check_nvcc(Path(os.environ.get("DG_JIT_NVCC_COMPILER") or home / "bin" / "nvcc"), oldest)
    return _check_cache(reason) if found else (found, reason)


def cuda_home() -> Path | None:
    """The toolkit that DeepGEMM takes."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named)
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        return Path(nvcc).parents[1]
    return Path(TOOLKIT) if Path(TOOLKIT).exists() else None


def _check_nvcc(nvcc: Path, oldest: tuple[int, int]) -> Check:
    version = _version(nvcc)
    wanted = ".".join(map(str, oldest))
    if version is None:
        return False, f"its kernels are compiled with nvcc, and {nvcc} cannot be run; install the CUDA toolkit or set CUDA_HOME"
    if version < oldest:
        return False, f"its kernels need nvcc {wanted} or newer, and {nvcc} is {'.'.join(map(str, version))}"
    host = os.environ.get("NVCC_CCBIN") or "gcc"
    if shutil.which(host) is None:
        return False, f"nvcc needs a C++ compiler, and {host} is not on PATH"
    return True, f"nvcc {'.'.join(map(str, version))}"


@functools.cache
def _version(nvcc: Path) -> tuple[int, int] | None:
    """What ``nvcc --version`` says; None if it cannot be run."""
    try:
        said = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", said.stdout)
    return None if said.returncode or found is None else (int(found[1]), int(found[2]))


def _check_cache(compiler: str) -> Check:
    named, home = os.environ.get("DG_JIT_CACHE_DIR", "").split(os.pathsep)[0], os.environ.get("HOME")
    if not named and not home:
        return False, "its compiled kernels need a folder, and neither DG_JIT_CACHE_DIR nor HOME is set"
    cache = Path(named or f"{home}/.deep_gemm").absolute()
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return False, f"its compiled kernels go to {cache}, which cannot be written; set DG_JIT_CACHE_DIR"
    return True, compiler
