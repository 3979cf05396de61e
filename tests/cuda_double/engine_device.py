"""The doubles of an engine, beside those of ``device``: host tensors have values here (``values``), streams are followed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from jetrl_patch.backends import capability, row_equality
from jetrl_patch.exact import trial
from tests.cuda_double import device, graphs, sleep
from tests.cuda_double.checks import Unsupported, address


def launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """``device.launch``, for a grid that may be a function, on the current stream."""
    bound = self.signature.bind(*args, **{key: value for key, value in named.items() if key in self.arg_names})
    bound.apply_defaults()
    sizes = grid(bound.arguments) if callable(grid) else grid
    device.launch(self, *args, grid=sizes, warmup=warmup, **named)
    values = (getattr(value, "base", value) for value in bound.arguments.values())
    tensors = [value for value in values if isinstance(value, Tensor)]
    sleep.used(tensors)
    graphs.used(tensors)


def tried(call: Callable[[], str]) -> row_equality.Verdict:
    """In place of ``trial._tried``: other errors are the test's, not a verdict."""
    try:
        return row_equality.as_verdict(call)()
    except Unsupported as error:
        return row_equality.Verdict(False, str(error))


def install_engine() -> None:
    """Put the doubles in place. Those of the wheel are there (``h100_double``)."""
    sleep.install()
    torch.Generator = device.Generator  # type: ignore[misc, assignment]
    torch.tensor = device.without_constant(torch.tensor)
    JITFunction.run = launch
    gemm: Any = device.Gemm()
    gemm.__spec__ = ModuleSpec("deep_gemm", None)
    sys.modules["deep_gemm"] = gemm
    capability.check_nvcc = lambda version: (True, "nvcc")
    capability.DEEP_GEMM = ("deep_gemm",)  # type: ignore[assignment]
    trial._tried = tried
    new, host = torch.Tensor.new_tensor, torch.Tensor.data_ptr

    def new_tensor(self: Tensor, data: Any, **named: Any) -> Tensor:
        asked = {"device": self.device, "dtype": self.dtype, **named}
        return torch.tensor(data, **asked) if self.is_cuda else new(self, data, **named)

    torch.Tensor.new_tensor = new_tensor  # type: ignore[method-assign, assignment]
    torch.Tensor.data_ptr = lambda self: address(self) if self.is_cuda else host(self)  # type: ignore[method-assign]
