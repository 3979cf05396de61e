"""Rotate queries and keys in one launch on a GPU, in the trainer. Attention keeps its code, but for the function that rotates.

transformers' attention classes call ``apply_rotary_pos_emb`` of their module. Here a class gets a copy of its ``forward`` in
which that name is ours. Nothing of transformers is written, and a model that is not prepared rotates as before. No table says
which families this serves: a function is replaced if it has the bits of Hugging Face's common expression on a small input. Left
alone are interleaved halves, angles of three dimensions, vision towers, and functions of other libraries (Liger).
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.adapters.transformers.copies import copied
from jetrl_patch.exact.modules import swap
from jetrl_patch.exact.ops import rotate_pair
from jetrl_patch.fp8 import producers

__all__ = ["rotate_together"]

#: its name in transformers
_FUNCTION = "apply_rotary_pos_emb"
#: a class of attention -> what ``swap`` gives it; None if it is left alone
_behaviours: dict[type, type | None] = {}


def rotate_together(model: nn.Module, backend: str, device_type: str) -> list[str]:
    """Rotate by one kernel in the attention modules of a model, in place. Returns the names of the changed modules."""
    if not producers.available(backend, device_type):
        return []
    changed = []
    for name, module in model.named_modules():
        if (behaviour := _behaviour(type(module))) is not None:
            swap(module, behaviour)
            changed.append(name)
    return changed


def _behaviour(kind: type) -> type | None:
    if kind not in _behaviours:
        forward: Any = kind.__dict__.get("forward")
        served = isinstance(forward, FunctionType) and _FUNCTION in forward.__code__.co_names
        _behaviours[kind] = _rotating(forward) if served and _is_common(forward.__globals__.get(_FUNCTION)) else None
    return _behaviours[kind]


def _rotating(forward: Any) -> type:
    """A behaviour whose forward is this one, with what its module holds now, and rotates by one kernel where that can serve."""
    own = forward.__globals__[_FUNCTION]

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        found = None if more or named else rotate_pair(q, k, cos, sin)
        return own(q, k, cos, sin, *more, **named) if found is None else found

    return type("RotatedTogether", (), {"forward": copied(forward, {_FUNCTION: rotate})})


@torch.no_grad()
def _is_common(function: Any) -> bool:
    """Whether a function has the bits of ``x cos + (-high, low) sin``, and keeps what of a head the tables do not reach."""
    given = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=given, device="cpu").to(torch.bfloat16)  # noqa: E731
    q, k = random(2, 3, 5, 8), random(2, 1, 5, 8)
    for width in (8, 4):
        cos, sin = (random(1, 5, width // 2).repeat(1, 1, 2) for _ in range(2))
        try:
            found = function(q, k, cos, sin)
        except Exception:  # another library's, or without partial rotation, which it is then not asked for
            return width < 8
        if len(found) != 2 or not all(torch.equal(y, _common(x, cos, sin)) for x, y in zip((q, k), found)):
            return False
    return True


def _common(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = x.chunk(2, -1)
    return torch.cat((x * cos.unsqueeze(1) + torch.cat((-high, low), -1) * sin.unsqueeze(1), rest), -1)
