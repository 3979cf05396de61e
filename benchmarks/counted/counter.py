"""Count launches, bytes and FLOPs of the code paths of a Hopper GPU, on tensors without memory (torch's device "meta").

"meta" computes shapes and strides only; autograd and Hugging Face's modules run on it unchanged. An operator or kernel is one
launch. It reads each input once and writes each output once, which is the least that any implementation moves. The hardware
checks are patched to pass; stand-ins for DeepGEMM and Triton's launcher record the launches.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import pkgutil
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.shapes import Peaks
from jetrl_patch import backends, kernels
from jetrl_patch.backends import capability, cublaslt, deep_gemm, gpu
from jetrl_patch.exact import dispatch
from jetrl_patch.kernels import gemm_common, quantize

#: streaming multiprocessors of an H100 and H200
SMS = 132
DEVICE = "meta"
#: operators that launch nothing, apart from views
FREE = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::_unsafe_view")
#: operators that write their first argument without reading it
OVERWRITE = ("aten::copy_", "aten::fill_", "aten::zero_")
#: operators with two launches: padding fills, then copies
TWICE = ("aten::constant_pad_nd",)
#: kernels with a product of sizes M, N and K -> the peak that bounds it
PRODUCTS = {"fprop_kernel": "fp8", "decode_kernel": "fp8", "wgrad_kernel": "fp8_wgrad"}
#: attention kernels -> products per pair of query and key; FlashAttention-2 has 2 forward and 5 backward
ATTENTION = {"attention_kernel": 2, "dq_kernel": 3, "dkdv_kernel": 4}
#: kernels that also read an output -> the flag that says so, and the output
ADDS = {"wgrad_kernel": ("ADD", "dw")}


class Launch(NamedTuple):
    """One launch: bytes read and written, FLOPs, and the field of ``Peaks`` that bounds them."""

    name: str
    bytes: int
    flops: float = 0.0
    peak: str = "bf16"

    def seconds(self, peaks: Peaks) -> float:
        """The time that its bytes or its products take, whichever is longer."""
        return max(self.bytes / (peaks.bandwidth * 1e9), self.flops / (getattr(peaks, self.peak) * 1e12))


_active: list[Counter] = []


def record(name: str, tensors: Iterable[Tensor], flops: float = 0.0, peak: str = "bf16") -> None:
    """One launch that reads or writes each of ``tensors`` once. A tensor that is read and written occurs twice."""
    if _active:
        _active[-1].launches.append(Launch(name, sum(map(size, tensors)), flops, peak))


def size(t: Tensor) -> int:
    """Bytes of a tensor in memory; a broadcast dimension counts once."""
    return math.prod(n for n, step in zip(t.shape, t.stride()) if step) * t.element_size()


class Counter(TorchDispatchMode):
    """Records the launches in a block.

    Args:
        pairs: pairs of query and key, times heads and width, over all sequences: half the FLOPs of a product in attention.
    """

    def __init__(self, pairs: float = 0.0) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.pairs = pairs

    def __enter__(self) -> Counter:
        _active.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not func.is_view and name not in FREE:
            given = (args[1:] if name in OVERWRITE else args, kwargs)
            read = {id(t): t for t in tree_leaves(given) if isinstance(t, Tensor)}
            written = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
            matrices = [t for t in args if isinstance(t, Tensor)]
            flops = 2.0 * written[0].numel() * matrices[-1].shape[-2] if name in ("aten::mm", "aten::addmm", "aten::bmm") else 0.0
            record(name.removeprefix("aten::"), (*read.values(), *written), flops)
            if name in TWICE:
                record(name.removeprefix("aten::"), written)
        return out


def kernel(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Replaces ``JITFunction.run``: record the launch of a Triton kernel."""
    if not _active:
        return
    named = dict(zip(function.arg_names, args)) | kwargs
    bases = {name: value.base if isinstance(value, TensorDescriptor) else value for name, value in named.items()}
    tensors = {id(t): t for t in bases.values() if isinstance(t, Tensor)}
    name = function.__name__
    twice = [bases[out] for flag, out in [ADDS.get(name, ("", ""))] if named.get(flag)]
    flops = 2.0 * named["M"] * named["N"] * named["K"] if name in PRODUCTS else 0.0
    flops += 2 * _active[-1].pairs * ATTENTION.get(name, 0)
    record(name, (*tensors.values(), *twice), flops, PRODUCTS.get(name, "bf16"))


# ---- A Hopper GPU that records --------------------------------------------------------------------------------------


def _fp8_gemm_nt(a: Any, b: Any, d: Tensor, c: Tensor | None = None, recipe: Any = None, compiled_dims: str = "nk") -> None:
    """Records DeepGEMM's product, which also reads ``d`` if it adds to it."""
    (q, s), (w, sw) = a, b
    name, peak = ("deep_gemm 1D2D", "fp8") if c is None else ("deep_gemm 1D1D", "fp8_wgrad")
    record(name, (q, s, w, sw, d, *([] if c is None else [c])), 2.0 * q.numel() * w.shape[0], peak)


def _scaled_mm(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, recipe_b: Any, out_dtype: torch.dtype) -> Tensor:
    """Records cuBLASLt's product with scales per row, which only WGrad uses."""
    (M, K), N = a.shape, b.shape[0]
    d = torch.empty(M, N, dtype=out_dtype, device=a.device)
    record("cublaslt 1x128", (a, sa, b, sb, d), 2.0 * M * N * K, "fp8_wgrad")
    return d


@contextlib.contextmanager
def hopper(best: str = "deep_gemm", rounds: bool = True) -> Iterator[None]:
    """Run the body as on an H200 whose best backend is ``best``, "deep_gemm" or "triton".

    ``rounds`` says whether torch has cuBLASLt's product with block scales.
    """
    for module in pkgutil.iter_modules(kernels.__path__, "jetrl_patch.kernels."):
        importlib.import_module(module.name)  # before kernels would be defined for the interpreter
    yes, no = (True, "counted, not run"), (False, "not asked for")
    with contextlib.ExitStack() as stack:
        patch = lambda *args: stack.enter_context(mock.patch.object(*args))  # noqa: E731
        stack.enter_context(triton.knobs.runtime.scope())
        triton.knobs.runtime.interpret = True  # launches without a CUDA device
        patch(JITFunction, "run", kernel)
        patch(gemm_common, "_multiprocessors", lambda device: SMS)
        checks = {"deep_gemm": (lambda *_: yes if best == "deep_gemm" else no), "triton": lambda *_: yes}
        stack.enter_context(mock.patch.dict(capability.CHECKS, checks))
        patch(deep_gemm, "find_deep_gemm", lambda: (SimpleNamespace(fp8_gemm_nt=_fp8_gemm_nt), "recorded"))
        for backend in (deep_gemm, gpu):
            patch(backend, "check_cublaslt", lambda *_: yes if rounds else no)
        patch(deep_gemm.DeepGemmBackend, "_ahead", lambda *_: None)  # compiled in an earlier step
        patch(cublaslt, "_scaled_mm", _scaled_mm)
        stack.enter_context(mock.patch.dict(backends._LOADED, clear=True))
        patch(gpu.GpuBackend, "quantizers", lambda self, x: quantize)
        patch(capability, "check_exact_cuda", lambda *_: yes)
        stack.enter_context(mock.patch.dict(dispatch._chosen, {DEVICE: "triton"}))
        yield
