"""Products in Triton's interpreter, for every test that runs in it."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def exact_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dots in FP64, rounded once to FP32; the tests cover everything around them.

    The interpreter alone multiplies the bit patterns of BF16 as integers, and numpy's FP32 product depends on a row's position
    in the tile.
    """
    if not triton.knobs.runtime.interpret:
        return
    original = interpreter.InterpreterBuilder.create_dot

    def widened(t: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if t.dtype.scalar != tl.bfloat16:
            assert t.dtype.primitive_bitwidth == 8, t.dtype
            return t
        return interpreter.TensorHandle((t.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, d, *precision):  # type: ignore[no-untyped-def]
        assert a.dtype.scalar == b.dtype.scalar
        zero = interpreter.TensorHandle(np.zeros_like(d.data, dtype=np.float64), tl.float64)
        dot = original(self, widened(a), widened(b), zero, *precision).data
        return interpreter.TensorHandle((dot + d.data).astype(np.float32), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
