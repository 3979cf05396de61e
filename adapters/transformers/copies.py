"""Copies of functions of transformers, in which a name means something else: nothing of transformers is written."""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any


def copied(function: FunctionType, names: Mapping[str, Any], code: CodeType | None = None) -> FunctionType:
    """A copy of a function, with what its module holds now.

    Args:
        names: what takes the place of its module's globals, or is added to them.
        code: what it runs instead of its own code.
    """
    found = {**function.__globals__, **names}
    copy = FunctionType(code or function.__code__, found, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__annotations__, copy.__doc__ = function.__kwdefaults__, function.__annotations__, function.__doc__
    return copy
