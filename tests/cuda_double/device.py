"""Doubles of one H100 in a CPU build of torch. ``install`` changes torch for good: call it in a process of its own.

Faked: the device (``device.cpp``), what ``torch.cuda`` says of it, random numbers, and the launches of Triton, DeepGEMM, cuBLASLt
and FlashAttention-3, which check their arguments and compute nothing. The comparisons of trials compare shapes, dtypes and
devices, because no tensor has values (FakeTensorMode). What the design reads on the host (digests, statistics) is counted.

Not faked: the plugin's own Python, torch's operators with their rules for devices and dtypes, autograd, autocast and checkpoints.
So a CPU tensor among CUDA tensors raises, and so do a wrong dtype and whatever makes the host wait for the device.
Bits, kernels, memory and streams are not tested.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime.jit import JITFunction

from jetrl_patch.backends import capability, row_equality
from jetrl_patch.exact import trial
from jetrl_patch.fp8 import fused, grouped
from jetrl_patch.measure import monitor
from jetrl_patch.sync import send
from tests.cuda_double import graphs
from tests.cuda_double.checks import address, launches, need
from tests.cuda_wheels.h100_double import CAPABILITY, MULTIPROCESSORS, NAME
from tests.exact.flash3_double import FlashAttention3
from tests.fp8 import scaled_mm_double
from tests.fp8.deep_gemm_double import DeepGemm

_aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
#: what a launch accepts besides tensors
SCALARS = (int, float, bool, str, tuple, type(None), torch.dtype, triton.language.dtype, triton.language.constexpr)
#: the largest grid
GRID = (2**31 - 1, 65535, 65535)
_tolist = FakeTensor.tolist
#: tensors that ``torch.tensor`` made on the device, by id, with their values
_made: dict[int, tuple[weakref.ref[Tensor], Any]] = {}


class NoWait(TorchDispatchMode):
    """Refuses copies between host and device. FakeTensorMode itself refuses ``.item()`` and shapes that depend on values.

    torch waits for the stream in a copy to the device too, unless it is told not to (``memcpy_and_sync`` in ``Copy.cu``).
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        named = kwargs or {}
        out = func(*args, **named)
        if func in (_aten._to_copy.default, _aten.copy_.default):
            source = args[func is _aten.copy_.default]
            meanwhile = named.get("non_blocking") or (args[2:3] == (True,) and func is _aten.copy_.default)
            need(out.is_cuda == source.is_cuda or (out.is_cuda and meanwhile), "the host waits for a copy of", source)
        elif func in (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default):
            need(not args[0].is_cuda or all(t is None or t.is_cuda for t in args[1]), "the host waits for a copy of an index")
        return out


class Gemm(DeepGemm):
    def fp8_gemm_nt(self, a, b, d, *more, **named):  # type: ignore[no-untyped-def]
        for t in (*a, *b, d):
            need(t.device == DEVICE, "DeepGEMM: a tensor on", t.device)
        copies = self.copies
        super().fp8_gemm_nt(a, b, d, *more, **named)
        need(self.copies == copies, "DeepGEMM would copy scales with strides", a[1].stride(), b[1].stride())
        launches["DeepGEMM"] += 1

    def product(self, a, sa, b, sb, out_dtype, tile) -> Tensor:  # type: ignore[no-untyped-def]
        return torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=DEVICE)


def scaled_mm(a, b, sa, recipe_a, sb, recipe_b, output_dtype) -> Tensor:  # type: ignore[no-untyped-def]
    scaled_mm_double.check(a, b, sa, recipe_a, sb, recipe_b, output_dtype)
    need(a.device == DEVICE, "cuBLASLt: a tensor on", a.device)
    launches["cuBLASLt"] += 1
    return torch.empty(a.shape[0], b.shape[1], dtype=output_dtype, device=DEVICE)


class Attention(FlashAttention3):
    def compute(self, out, lse, qkv, lengths, block_table, *more) -> None:  # type: ignore[no-untyped-def]
        for t in (out, *qkv, *lengths, block_table):
            need(t is None or t.device == DEVICE, "FlashAttention-3: a tensor on", t if t is None else t.device)
        launches["FlashAttention-3"] += 1


def launch(self: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> None:
    """Bind the arguments to the kernel's signature, as ``JITFunction.run`` does, and launch nothing."""
    name = self.fn.__name__
    options = {key for key in named if key not in self.arg_names}
    need(options <= CUDAOptions.__dataclass_fields__.keys(), name, "has no option", options)
    bound = self.signature.bind(*args, **{key: named[key] for key in named.keys() - options})
    need(len(grid) <= 3 and all(type(n) is int and 0 < n <= most for n, most in zip(grid, GRID)), name, "grid", grid)
    for key, value in bound.arguments.items():
        value = getattr(value, "base", value)  # of a TMA descriptor
        on_device = isinstance(value, Tensor) and value.device == DEVICE
        need(on_device or isinstance(value, SCALARS), name, key, getattr(value, "device", type(value)))
    launches[name] += 1


def same_kind(ours: Tensor, theirs: Tensor, where: str) -> None:
    """In place of ``row_equality.require_equal``."""
    for what in ("shape", "dtype", "device"):
        need(getattr(ours, what) == getattr(theirs, what), where, getattr(ours, what), getattr(theirs, what))


class Generator(torch.Generator):
    """A generator of any device, on the host."""

    def __new__(cls, device: object = None) -> Generator:
        return super().__new__(cls)


def on_host(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors with values."""
    return unset_fake_temporarily()(call)


def without_generator(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Random numbers, which no generator of a CPU build makes for this device. On the host they have values."""

    def made(*sizes: Any, generator: object = None, **named: Any) -> Tensor:
        if named.get("device", "cpu") != "cpu":
            return make(*sizes, **named)
        with unset_fake_temporarily():
            return make(*sizes, **named)

    return made


def without_constant(tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.tensor``: FakeTensorMode would keep its values, and fail to copy them to a device without memory."""

    def made(data: Any, *, device: Any = None, pin_memory: bool = False, **named: Any) -> Tensor:
        if isinstance(data, Tensor):
            return tensor(data, device=device, **named)
        if device is None:
            modes = _get_current_function_mode_stack()
            device = next((mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext)), "cpu")
        device = torch.device(device)
        with unset_fake_temporarily():
            found = tensor(data, device="cpu", **named)
        if device.type == "cpu":
            return found
        need(NoWait not in map(type, _get_current_dispatch_mode_stack()), "the host waits for a copy of", data)
        there = torch.empty_like(found, device=device)
        _made[id(there)] = weakref.ref(there), data
        return there

    return made


def to_device(model: Any, dtype: torch.dtype = torch.bfloat16) -> None:
    """Move a model without values: parameters as FSDP holds them in a forward pass, in ``dtype``, buffers in their own."""

    def moved(t: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(t.shape, dtype=dtype, device=DEVICE)

    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = torch.nn.Parameter(moved(p, dtype), requires_grad=p.requires_grad)
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = moved(b, b.dtype)


def waiting(call: Callable[..., Any]) -> Callable[..., Any]:
    """Count calls of a double for something that waits by design, and compute it from no values."""

    @functools.wraps(call)
    def counted(*args: Any, **named: Any) -> Any:
        launches["waits"] += 1
        return call(*args, **named)

    return counted


def tolist(self: FakeTensor) -> Any:
    """Of what ``torch.tensor`` made on the device: the host waits, which is counted."""
    if id(self) not in _made or _made[id(self)][0]() is not self:
        return _tolist(self)  # raises
    launches["waits"] += 1
    return _made[id(self)][1]


def install(flash3: bool) -> None:
    """Put the doubles in place. Without ``flash3`` vLLM's FlashAttention-3 is absent."""
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS, major=CAPABILITY[0], minor=CAPABILITY[1])
    for name, value in {
        "is_available": True, "current_device": 0, "empty_cache": None, "get_device_capability": CAPABILITY,
        "get_device_name": NAME, "get_device_properties": properties, "device_count": 1, "set_device": None, "synchronize": None,
        "ipc_collect": None, "current_stream": graphs.State.stream,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, lambda *args, value=value: value)
    torch.cuda.Stream, torch.cuda.Event = graphs.Stream, graphs.Event  # type: ignore[misc, assignment]
    torch.cuda.stream, torch.cuda.set_stream = graphs.on_stream, graphs.set_stream  # type: ignore[misc, assignment]
    graphs.State.busy = 1  # the host never waits
    torch.version.cuda = "13.0"
    torch.Generator = Generator  # type: ignore[misc, assignment]
    torch.tensor, torch.as_tensor = without_constant(torch.tensor), without_constant(torch.as_tensor)
    torch.randn, torch.randperm = without_generator(torch.randn), without_generator(torch.randperm)
    torch.Tensor.data_ptr = address  # type: ignore[method-assign]
    FakeTensor.tolist = tolist  # type: ignore[method-assign]
    torch.nn.functional.scaled_mm = scaled_mm
    JITFunction.run = launch

    gemm: Any = Gemm()
    gemm.__spec__ = ModuleSpec("deep_gemm", None)
    sys.modules["deep_gemm"] = gemm
    sys.modules["vllm.vllm_flash_attn"] = Attention() if flash3 else None  # type: ignore[assignment]

    capability.check_nvcc = lambda version: (True, "nvcc")
    capability.DEEP_GEMM = ("deep_gemm",)  # type: ignore[assignment]
    fused._is_common = on_host(fused._is_common)  # compares values
    for module in (trial, grouped, row_equality):
        module.require_equal = same_kind  # type: ignore[attr-defined]
    send.read = waiting(lambda started: [(0, False)] * len(started))
    monitor._to_host = waiting(lambda tensors: [[0.0] * t.numel() if t.dim() else 0.0 for t in tensors])
    trial._tried = lambda call: row_equality.as_verdict(call)()  # errors are the test's, not a verdict


@contextmanager
def tensors_without_values() -> Iterator[None]:
    torch.autograd.set_multithreading_enabled(False)  # a mode holds in its own thread
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
