"""The code paths of a Hopper GPU on tensors without memory: what would launch a kernel records it instead.

Tensors are on torch's device "meta", which computes shapes and strides only; autograd and Hugging Face's modules run on it
unchanged. The checks of the hardware say yes, DeepGEMM is a stand-in that records, and Triton's launcher too.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from benchmarks.counted import counter
from jetrl_patch import backends, kernels
from jetrl_patch.backends import capability, cublaslt, deep_gemm, gpu
from jetrl_patch.exact import dispatch
from jetrl_patch.kernels import gemm_common, quantize

#: streaming multiprocessors of an H100 and H200
SMS = 132
DEVICE = "meta"


class DeepGemm:
    """Records the product. ``d`` is read too where the kernel adds to it."""

    def fp8_gemm_nt(self, a: Any, b: Any, d: Tensor, c: Tensor | None = None, recipe: Any = None) -> None:
        (q, s), (w, sw) = a, b
        M, K = q.shape
        name, peak = ("deep_gemm 1D2D", "fp8") if c is None else ("deep_gemm 1D1D", "fp8_wgrad")
        counter.record(name, (q, s, w, sw, d, *([] if c is None else [c])), 2.0 * M * K * w.shape[0], peak)


def _scaled_mm(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, recipe_b: Any, out_dtype: torch.dtype) -> Tensor:
    """Records cuBLASLt's product of scales per row, which only WGrad uses."""
    (M, K), N = a.shape, b.shape[0]
    d = torch.empty(M, N, dtype=out_dtype, device=a.device)
    counter.record("cublaslt 1x128", (a, sa, b, sb, d), 2.0 * M * N * K, "fp8_wgrad")
    return d


def _multiprocessors(device: Any) -> int:
    return SMS


@contextlib.contextmanager
def hopper(best: str = "deep_gemm", rounds: bool = True) -> Iterator[None]:
    """Run a block of code as on an H200 whose best backend is ``best``: "deep_gemm" or "triton".

    Args:
        rounds: whether torch has cuBLASLt's product with block scales.
    """
    for module in pkgutil.iter_modules(kernels.__path__, "jetrl_patch.kernels."):
        importlib.import_module(module.name)  # what is defined below this line would be the interpreter's
    yes = (True, "counted, not run")
    no = (False, "not asked for")
    with contextlib.ExitStack() as stack:
        patch = lambda *args: stack.enter_context(mock.patch.object(*args))  # noqa: E731
        stack.enter_context(triton.knobs.runtime.scope())
        triton.knobs.runtime.interpret = True  # launches without a CUDA device
        patch(JITFunction, "run", counter.kernel)
        patch(gemm_common, "_multiprocessors", _multiprocessors)
        checks = {"deep_gemm": (lambda: yes if best == "deep_gemm" else no), "triton": lambda: yes}
        stack.enter_context(mock.patch.dict(capability.CHECKS, checks))
        patch(deep_gemm, "find_deep_gemm", lambda: (DeepGemm(), "recorded"))
        patch(deep_gemm, "check_cublaslt", lambda: yes if rounds else no)
        patch(cublaslt, "_scaled_mm", _scaled_mm)
        stack.enter_context(mock.patch.dict(backends._LOADED, clear=True))
        patch(gpu.GpuBackend, "quantizers", lambda self, x: quantize)
        patch(dispatch, "check_exact_cuda", lambda: yes)
        stack.enter_context(mock.patch.dict(dispatch._chosen, {DEVICE: "triton"}))
        yield
