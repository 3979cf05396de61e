"""Tensors of the device have no values (FakeTensorMode), those of the host have. What the host reads from the device is zero."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.cuda_double import graphs, libraries, peers, sleep, traced
from tests.cuda_double.checks import need

aten = torch.ops.aten
#: copies to page-locked memory, which a CPU build cannot allocate
PINNED = (aten.pin_memory.default, aten._pin_memory.default)
#: rows that an op finds whose count depends on values
FOUND = 5


@functools.cache
def composite(func: Any) -> bool:
    """Whether an operator is made of others. In inference mode it comes as it is."""
    return func.namespace != "prim" and func._can_decompose()


def written(func: Any, args: Any) -> list[Tensor]:
    """The arguments that an operator writes in place."""
    declared = (argument.alias_info for argument in func._schema.arguments)
    return [arg for arg, alias in zip(args, declared) if alias is not None and alias.is_write and isinstance(arg, FakeTensor)]


class OnDevice(TorchDispatchMode):
    """Separates what runs on the host, with values, from what runs on the device, without."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo trace below this mode."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        kwargs.pop("pin_memory", None)
        there = [t for t in tensors if isinstance(t, FakeTensor)]
        asked = kwargs.get("device") or next((arg for arg in args if isinstance(arg, torch.device)), None)
        if func.namespace in libraries.NAMESPACES:
            sleep.used(there)
            return self.used(there, libraries.call(func, args, kwargs))
        if not there and (asked is None or torch.device(asked).type != "cuda"):
            with unset_fake_temporarily():
                return args[0].clone() if func in PINNED else func(*args, **kwargs)
        if (python := libraries.PYTHON.get(func._schema.name)) is not None:
            with self:
                out = python(*args, **kwargs)
            if func.namespace == "jetrl_patch":
                traced.check_description(func, (args, kwargs), out, func(*args, **kwargs))
            return out
        if composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func.namespace in ("c10d", "symm_mem"):
            double = peers.collective if func.namespace == "c10d" else peers.symmetric_sum
            return double(func, args)
        if not func.is_view and func.namespace != "prim":
            sleep.used(there, written(func, args))
        if func in (aten._local_scalar_dense.default, aten.equal.default):
            return self.read(func, args)
        if func is aten.is_pinned.default:
            return False
        if func in (aten._to_copy.default, aten.copy_.default) and self.crosses(tensors, asked):
            return self.between(func, args, kwargs, asked)
        if "generator" in kwargs:
            kwargs["generator"] = None
        for t in tensors:  # a copy from the host cannot be captured, except scalars which are arguments
            if graphs.State.capture is not None:
                need(t.is_cuda or not t.dim(), "a capture reads a tensor of the host:", func, list(t.shape))
        if func is aten.nonzero.default:
            graphs.host_waits("a count of nonzeros")
            out = aten.new_empty.default(args[0], [FOUND, args[0].dim()], dtype=torch.int64)
        elif func in (aten.index.Tensor, aten._index_put_impl_.default, aten.index_put_.default, aten.index_put.default):
            out = self.indexed(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        if func is aten.all.default:
            out.holds = True  # all of them are finite, or equal
        return self.used(there, out)

    @staticmethod
    def crosses(tensors: list[Tensor], asked: Any) -> bool:
        """Whether a copy goes from the host to the device or back."""
        places = {t.is_cuda for t in tensors} | ({torch.device(asked).type == "cuda"} if asked is not None else set())
        return len(places) > 1

    def between(self, func: Any, args: Any, kwargs: Any, asked: Any) -> Any:
        """A copy between host and device. One from page-locked memory could be captured, but nothing here may ask for it."""
        into, source = (args[0], args[1]) if func is aten.copy_.default else (None, args[0])
        if source.is_cuda:
            need(graphs.State.capture is None, "a capture copies to the host:", list(source.shape))
            if not (kwargs.get("non_blocking") or (into is not None and len(args) > 2 and args[2])):
                graphs.host_waits(f"a copy of {list(source.shape)} to the host")
            return self.zeros(source, kwargs.get("dtype")) if into is None else into.zero_()
        need(graphs.State.capture is None or not source.dim(), "a capture copies from the host:", list(source.shape))
        if into is not None:
            need(torch.broadcast_shapes(source.shape, into.shape) == into.shape, "copy_:", source.shape, into.shape)
            return self.used([into], into)
        dtype = kwargs.get("dtype") or source.dtype
        return self.used([], aten.empty_strided.default(source.shape, source.stride(), dtype=dtype, device=asked))

    @staticmethod
    def used(read: list[Tensor], out: Any) -> Any:
        graphs.used(read, [t for t in tree_leaves(out) if isinstance(t, FakeTensor)])
        sleep.made(out)
        return out

    @staticmethod
    def zeros(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        with unset_fake_temporarily():
            return torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, device="cpu")

    def read(self, func: Any, args: Any) -> Any:
        graphs.host_waits("a value")
        if func is aten.equal.default:
            need(args[0].dtype == args[1].dtype and args[0].device == args[1].device, "equal: other dtypes or devices")
            return args[0].shape == args[1].shape
        kind = args[0].dtype
        return getattr(args[0], "holds", False) if kind == torch.bool else 0.0 if kind.is_floating_point else 0

    def indexed(self, func: Any, args: Any, kwargs: Any) -> Any:
        indices = []
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                need(index.is_cuda, "a mask of the host")
                graphs.host_waits("a count of a mask")
                indices += [aten.new_empty.default(index, [FOUND], dtype=torch.int64) for _ in range(index.dim())]
            else:
                indices.append(index)
        return func(args[0], indices, *args[2:], **kwargs)


@functools.cache
def without_values(cls: type) -> type:
    """The class of a parameter of class ``cls`` on the device."""
    return type(cls.__name__, (cls, FakeTensor), {})


def keep_class(new: Any) -> Any:
    """``Parameter.__new__``, which makes no subclass of itself of a tensor that is a subclass."""

    def made(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        found = new(cls, data, requires_grad)
        if isinstance(found, FakeTensor) and cls is not torch.nn.Parameter:
            found.__class__ = without_values(cls)
        return found

    return made


@contextmanager
def tensors() -> Iterator[None]:
    """The context in which an engine runs."""
    torch.autograd.set_multithreading_enabled(False)  # a mode holds in its own thread
    new = torch.nn.Parameter.__new__
    torch.nn.Parameter.__new__ = staticmethod(keep_class(new))  # type: ignore[assignment]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), OnDevice():
            yield
    finally:
        torch.nn.Parameter.__new__ = new  # type: ignore[method-assign]
