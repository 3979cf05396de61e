"""Checks of this machine, for errors, test skips and ``jetrl doctor``, and of the compiler that DeepGEMM needs."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

from jetrl_patch._versions import SUPPORTED
from jetrl_patch.errors import VersionError, explain
from jetrl_patch.patching.guards import check_version, is_installed

# ---- ``check_*() -> (ok, reason)`` ---------------------------------------------------------------
# If ok, the reason is what was found, such as a version or a device name. If not, it is what is missing. Only ``check_torch`` and
# the checks of hardware import torch.

Check = tuple[bool, str]
#: a GPU's compute capability, major and minor
Capability = tuple[int, int]

MINIMUM_PYTHON = (3, 10)
#: the compute capability with FP8 ``wgmma`` and the GPU libraries' block-scaled kernels (8.9 accumulates in another order, 10.0
#: uses other scales)
HOPPER = (9, 0)


def check_python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < MINIMUM_PYTHON:
        return False, f"Python {'.'.join(map(str, MINIMUM_PYTHON))} or newer is required, but this is {found}"
    return True, found


def check_framework(name: str) -> Check:
    """Whether a framework of ``_versions.SUPPORTED`` is installed in a supported version. Imports nothing."""
    if name not in SUPPORTED:
        return False, f"{name} is not among the supported frameworks: {', '.join(SUPPORTED)}"
    return check_version(name)


def check_torch() -> Check:
    """Whether torch is installed and can be imported."""
    if not is_installed("torch"):
        return False, "torch is not installed"
    try:
        import torch
    except Exception as error:  # a damaged installation may raise anything
        words = " ".join(str(error).split())
        return False, f"torch cannot be imported ({type(error).__name__}: {words[:160]})"
    return True, str(torch.__version__)


def require_torch(command: str) -> None:
    """Raise VersionError if torch cannot be imported. The message names the command that needs it."""
    ok, found = check_torch()
    if not ok:
        fix = f"reinstall torch{SUPPORTED['torch'][0]}"
        raise VersionError(explain(command, required="torch", found=f"that {found}", fix=fix))


def check_compiler() -> Check:
    """Whether this machine can compile the fast CPU backend."""
    ok, reason = check_torch()
    if not ok:
        return False, reason
    from jetrl_patch.native import build

    return build.available()


def check_cuda() -> Check:
    """Whether torch sees a CUDA device."""
    ok, reason = check_torch()
    if not ok:
        return False, reason
    import torch

    if not torch.cuda.is_available():
        return False, f"torch {torch.__version__} sees no CUDA device"
    return True, torch.cuda.get_device_name()


def count_gpus() -> int:
    """The number of CUDA devices that torch sees, within ``CUDA_VISIBLE_DEVICES``."""
    if not check_cuda()[0]:
        return 0
    import torch

    return torch.cuda.device_count()


def check_hopper(sm: Capability | None = None) -> Check:
    """Whether torch sees a Hopper GPU, which the fast FP8 backends require. ``sm``: its capability, so as not to ask the GPU."""
    ok, reason = check_cuda() if sm is None else (True, "")
    if not ok:
        return ok, reason
    import torch

    if torch.version.hip is not None:
        return False, f"it needs an NVIDIA GPU, and this torch was built for ROCm {torch.version.hip}"
    found = sm or torch.cuda.get_device_capability()
    if found != HOPPER:
        return False, f"it needs compute capability 9.0 (Hopper), and this device has {found[0]}.{found[1]}"
    return True, reason


# ---- What DeepGEMM needs to compile its kernels, which it does at the first product of each shape
# DeepGEMM itself looks for a toolkit and a compiler by the rules repeated here (``tests/anchors/deep_gemm.json``), but only at
# import or at the first product: too late to choose another backend.

#: (DeepGEMM's version, the oldest nvcc that it accepts from then on), newest first. The newer one no longer supports NVRTC
NVCC = (((2, 7), (12, 9)), ((0,), (12, 3)))
#: where DeepGEMM looks for a toolkit if neither ``CUDA_HOME`` nor ``CUDA_PATH`` is set and no nvcc is on PATH
TOOLKIT = "/usr/local/cuda"


def check_nvcc(version: str | None) -> Check:
    """Whether this DeepGEMM can compile here: a CUDA toolkit, nvcc with its host compiler, and a cache to write to.

    An unknown version (None) is treated as the newest.
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
    """The CUDA toolkit that DeepGEMM uses, or None."""
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
    """The version that ``nvcc --version`` prints; None if it cannot be run."""
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
