"""What a GPU would move: the bytes of Triton kernels, counted in the interpreter, and of torch's operators."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

#: operators that move nothing, apart from views
FREE = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::_unsafe_view")


class Traffic(TorchDispatchMode):
    """Counts the launches in a block, and the bytes that they read and write: each operator's inputs and outputs once."""

    def __init__(self):
        super().__init__()
        self.bytes = self.launches = 0
        self._in_a_kernel = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not self._in_a_kernel and not func.is_view and func._schema.name not in FREE:
            read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            written = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            self.launches += 1
            self.bytes += sum(t.numel() * t.element_size() for t in (*read.values(), *written))
        return out

    def __enter__(self):
        self._undo = ExitStack()
        builder, run = interpreter.InterpreterBuilder, interpreter.GridExecutor.__call__
        load, store = builder.create_masked_load, builder.create_masked_store

        def counted_load(its, ptrs, mask, *rest, **named):
            found = load(its, ptrs, mask, *rest, **named)
            self.bytes += int(mask.data.sum()) * found.data.dtype.itemsize
            return found

        def counted_store(its, ptrs, value, mask, *rest, **named):
            self.bytes += int(mask.data.sum()) * value.data.dtype.itemsize
            return store(its, ptrs, value, mask, *rest, **named)

        def launch(its, *args, **kwargs):  # its copies are the interpreter's own
            self.launches += 1
            self._in_a_kernel = True
            try:
                return run(its, *args, **kwargs)
            finally:
                self._in_a_kernel = False

        self._undo.enter_context(mock.patch.object(builder, "create_masked_load", counted_load))
        self._undo.enter_context(mock.patch.object(builder, "create_masked_store", counted_store))
        self._undo.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", launch))
        return super().__enter__()

    def __exit__(self, *error):
        self._undo.close()
        return super().__exit__(*error)
