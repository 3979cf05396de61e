"""How a norm passes its input on to the residual of its block: beside its result, which stays a tensor for hooks and wrappers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NAME = "jetrl_passed"


def passing(y: Tensor, x: Tensor) -> Tensor:
    """The result of a norm, which carries the input that the norm passes on."""
    setattr(y, _NAME, x)
    return y


def passed(norm: Any, x: Tensor) -> tuple[Any, Tensor]:
    """The result of a norm, and x as the norm passes it on. It is x itself if the norm passes nothing, or a wrapper lost it."""
    y = norm(x)
    if torch.compiler.is_compiling():
        return y, x
    return y, getattr(y, "__dict__", {}).pop(_NAME, x)
