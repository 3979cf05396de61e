"""Add the gradient of a block's residual in the backward kernel of its norm, on a GPU: a launch and 4 bytes an element less.

A block keeps its input for the residual, and reads it once more in a norm. Autograd adds up what comes back on both ways. Here a
block gets a copy of its ``forward`` in which the norm passes the input on, so that its gradient arrives at the norm:

    residual = x;  x = self.norm(x)      becomes      x, residual = passed(self.norm, x)

The values are the same, and so are the bits of the gradients. Nothing of transformers is written, and no table says which
families this serves: every block is served whose source has these two statements, one after the other. The class keeps its name,
by which FSDP and the frameworks find blocks.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from jetrl_patch.adapters.transformers.copies import copied
from jetrl_patch.adapters.transformers.fused import FusedNorm
from jetrl_patch.exact.modules import ExactNorm
from jetrl_patch.exact.residual import passed
from jetrl_patch.fp8 import producers

__all__ = ["add_in_norms"]

_PASSED = "jetrl_passed"


class _Block(NamedTuple):
    """A class with the copied forward, and the names of its norms."""

    kind: type
    norms: tuple[str, ...]


#: a class of modules -> the one in its place; None if it is left alone
_blocks: dict[type, _Block | None] = {}


def add_in_norms(model: nn.Module, backend: str, device_type: str) -> list[str]:
    """Let norms add the gradients of the residuals of their blocks, in place. Returns the names of the changed blocks."""
    if not producers.available(backend, device_type):
        return []
    blocks = {name: (module, block) for name, module in model.named_modules() if (block := _block(type(module))) is not None}
    served = set()
    for module, block in blocks.values():
        for norm in map(module._modules.get, block.norms):
            if isinstance(norm, FusedNorm | ExactNorm):
                norm.jetrl_passes = True
                served.add(block.kind)
    changed = [name for name, (_, block) in blocks.items() if block.kind in served]
    for module, block in map(blocks.__getitem__, changed):  # FSDP takes the class of the first block for that of all
        module.__class__ = block.kind
    return changed


def _block(kind: type) -> _Block | None:
    if kind not in _blocks:
        forward: Any = kind.__dict__.get("forward")
        # a wrapper's source is not what runs, and a closure cannot be copied
        plain = isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__") and forward.__closure__ is None
        _blocks[kind] = block = _rewritten(kind, forward) if plain else None
        if block is not None:
            _blocks[block.kind] = None  # it is served
    return _blocks[kind]


def _rewritten(kind: type, forward: FunctionType) -> _Block | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # no source
        return None
    (definition,) = tree.body
    if any(isinstance(node, ast.AugAssign) for node in ast.walk(tree)):  # autograd refuses it of what a norm passes on
        return None
    norms = tuple(_rewrite(definition.body)) if isinstance(definition, ast.FunctionDef) else ()
    if not norms:
        return None
    ast.increment_lineno(ast.fix_missing_locations(tree), forward.__code__.co_firstlineno - 1)  # for tracebacks
    compiled = compile(tree, forward.__code__.co_filename, "exec", dont_inherit=True)
    code = next(c for c in compiled.co_consts if isinstance(c, CodeType) and c.co_name == forward.__name__)
    copy = copied(forward, {_PASSED: passed}, code)
    names = {"forward": copy, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return _Block(type(kind.__name__, (kind,), names), norms)


def _rewrite(body: list[ast.stmt]) -> Iterator[str]:
    """Replace the pairs of statements of a function. Yields the names of the norms."""
    for at, pair in reversed(list(enumerate(pairwise(body)))):
        match pair:
            case (
                ast.Assign(targets=[ast.Name(id=kept)], value=ast.Name(id=x)),
                ast.Assign(
                    targets=[ast.Name(id=y)],
                    value=ast.Call(ast.Attribute(ast.Name(id="self"), norm), args=[ast.Name(id=read)], keywords=[]),
                ),
            ) if x == y == read != kept:
                (replaced,) = ast.parse(f"{x}, {kept} = {_PASSED}(self.{norm}, {x})").body
                for node in ast.walk(replaced):
                    if hasattr(node, "lineno"):
                        ast.copy_location(node, pair[1])
                body[at : at + 2] = [replaced]
                yield norm
