"""What each GPU backend and the exact ops require: ``check_*() -> (ok, reason)``, as in ``native.machine``.

The reason is what was found if ok, and what is missing otherwise. No check launches a kernel. Those of a GPU initialize CUDA,
unless they are given its compute capability ``sm``.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from jetrl_patch.config.modes import ROLLOUT_FORMATS
from jetrl_patch.errors import UNQUANTIZED, ConfigError, explain
from jetrl_patch.native.machine import Capability, Check, check_hopper, check_nvcc
from jetrl_patch.patching.guards import installed_version

#: the first cuBLASLt with block scales
CUDA_OF_CUBLASLT = (12, 9)
#: the first TransformerEngine with the recipe Float8BlockScaling (Megatron requires the same)
TE_OF_BLOCKWISE = (2, 3)
#: DeepGEMM as a package of its own, and bundled with CUDA builds of vLLM, in vLLM's search order
DEEP_GEMM = ("deep_gemm", "vllm.third_party.deep_gemm")
#: the end of a reason that needs no warning
ABSENT = "is not installed"


def check_triton(sm: Capability | None = None) -> Check:
    """Whether the project's own kernels run here."""
    ok, reason = check_hopper(sm)
    missing = _missing("triton") if ok else None
    return (ok, reason) if missing is None else (False, missing)


def check_cublaslt(sm: Capability | None = None) -> Check:
    """Whether ``torch.nn.functional.scaled_mm`` accepts block scales here."""
    ok, reason = check_hopper(sm)
    if not ok:
        return ok, reason
    version = torch.version.cuda or "0.0"
    if tuple(int(part) for part in version.split(".")[:2]) < CUDA_OF_CUBLASLT:
        return False, f"block scales need CUDA 12.9 or newer, and this torch was built with CUDA {version}"
    return True, f"CUDA {version}"


def check_deep_gemm(sm: Capability | None = None) -> Check:
    """Whether a DeepGEMM can be imported here and compile its kernels. With ``sm`` one that is installed is not imported."""
    ok, reason = check_hopper(sm)
    if not ok:
        return ok, reason
    compiler = ""
    if any(_missing(name) is None for name in DEEP_GEMM):
        # checked first, because without a toolkit some versions fail at import with no message
        ok, compiler = check_nvcc(deep_gemm_version())
        if not ok:
            return ok, compiler
        if sm is not None:
            return ok, compiler  # its import asks the GPU
    module, found = find_deep_gemm()
    return module is not None, f"{found}, {compiler}" if module is not None else found


def deep_gemm_installed() -> bool:
    """Whether DeepGEMM is installed, even if its package is broken."""
    return any((missing := _missing(name)) is None or not missing.endswith(ABSENT) for name in DEEP_GEMM)


def deep_gemm_version() -> str | None:
    """The version that will be imported, read from its file without importing it. None if the file does not say."""
    spec = next((importlib.util.find_spec(name) for name in DEEP_GEMM if _missing(name) is None), None)
    if spec is None or spec.origin is None:
        return None
    said = re.search(r"^__version__ = ['\"]([\d.]+)", Path(spec.origin).read_text(errors="replace"), re.MULTILINE)
    return None if said is None else said[1]


def check_te(sm: Capability | None = None) -> Check:
    """Whether TransformerEngine has block scaling, and cuBLASLt, which computes its products, can run."""
    version = installed_version("transformer_engine")
    if version is None:
        return False, "transformer_engine is not installed"
    if Version(version).release < TE_OF_BLOCKWISE:
        return False, f"recipe Float8BlockScaling needs transformer_engine 2.3 or newer, and {version} is installed"
    ok, reason = check_cublaslt(sm)
    return ok, f"transformer_engine {version}, {reason}" if ok else reason


CHECKS: dict[str, Callable[..., Check]] = {
    "deep_gemm": check_deep_gemm,
    "triton": check_triton,
    "cublaslt": check_cublaslt,
    "te": check_te,
}


def refuse_format_on(name: str, majors: Sequence[int], device_type: str, sm: Capability | None = None) -> None:
    """Raise ConfigError for a device that cannot multiply this scale format: neither a CPU nor a GPU of ``majors``."""
    if device_type == "cpu":
        return
    ok, reason = check_exact_cuda(sm) if device_type == "cuda" else (False, f"device type {device_type!r}")
    if ok and (found := sm or torch.cuda.get_device_capability())[0] not in majors:
        ok, reason = False, f"compute capability {found[0]}.{found[1]}"
    if not ok:
        gpus = (f"a Blackwell GPU of compute capability {major}.0 with triton" for major in majors)
        required = ", or ".join(("a CPU", *gpus))
        fix = "use scale_format='pow2' on this device"
        raise ConfigError(explain(f"scale_format={name!r}", required=required, found=reason, fix=fix))


def find_deep_gemm() -> tuple[Any, str]:
    """The DeepGEMM module and its name, or None and the reason. The PyPI package of that name has no kernels."""
    reasons = []
    for name in DEEP_GEMM:
        if (missing := _missing(name)) is not None:
            reasons.append(missing)
            continue
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a broken installation may raise anything
            reasons.append(_broken(name, error))
            continue
        if callable(getattr(module, "fp8_gemm_nt", None)):
            return module, name
        reasons.append(f"{name} has no fp8_gemm_nt")
    return None, ", ".join(reasons)


def _missing(name: str) -> str | None:
    """Why the module ``name`` cannot be imported; None if it can be found. Imports its parent packages."""
    try:
        return f"{name} {ABSENT}" if importlib.util.find_spec(name) is None else None
    except ModuleNotFoundError as error:
        parent = error.name is not None and f"{name}.".startswith(f"{error.name}.")
        return f"{name} {ABSENT}" if parent else _broken(name, error)
    except Exception as error:  # a CUDA library that cannot be loaded, for example, raises OSError
        return _broken(name, error)


def _broken(name: str, error: Exception) -> str:
    return f"{name} cannot be imported ({type(error).__name__}: {error})"


# ---- The exact ops ------------------------------------------------------------------------------

#: that of FP8 in vLLM. The ops themselves need 8.0
LEAST = divmod(ROLLOUT_FORMATS["fp8-block"].capability, 10)


def check_exact_cuda(sm: Capability | None = None) -> Check:
    """Whether the Triton kernels that trainer and rollout share can run here."""
    if sm is None and not torch.cuda.is_available():
        return False, f"torch {torch.__version__} sees no CUDA device"
    if torch.version.hip is not None:
        return False, f"a torch built for ROCm {torch.version.hip}"
    found = sm or torch.cuda.get_device_capability()
    if found < LEAST:
        return False, f"compute capability {found[0]}.{found[1]}"
    if importlib.util.find_spec("triton") is None:
        return False, "the triton package is not installed"
    return True, torch.cuda.get_device_name() if sm is None else ""


def refuse_exact_on(device_type: str, sm: Capability | None = None) -> None:
    """Raise ConfigError for a device without the ops that trainer and rollout share in exact mode.

    On CUDA, this checks that they can run. ``exact.trial`` checks that they are exact before an engine serves.
    """
    if device_type == "cpu":
        return
    ok, reason = check_exact_cuda(sm) if device_type == "cuda" else (False, f"device type {device_type!r}")
    if not ok:
        what, fix = f"align='exact' on {device_type.upper()}", f"use align='linear' if vLLM serves FP8 on it, or {UNQUANTIZED}"
        required = f"a CPU, or an NVIDIA GPU of compute capability {LEAST[0]}.{LEAST[1]} or newer with triton"
        raise ConfigError(explain(what, required=required, found=reason, fix=fix))
