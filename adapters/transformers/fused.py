"""Fused kernels that make the trainer faster on a GPU: norms, activations, residuals and the rotary embedding."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jetrl_patch.exact import elementwise, ops
from jetrl_patch.exact.elementwise import passed
from jetrl_patch.exact.modules import ExactMLP, ExactNorm, swap
from jetrl_patch.fp8 import producers
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.models.families import covering

# ---- Copies of transformers' functions, with other globals. Transformers itself is not changed ----

def copied(function: FunctionType, names: Mapping[str, Any], code: CodeType | None = None) -> FunctionType:
    """Copy a function and a snapshot of its globals, with ``names`` replaced or added. ``code`` runs instead of its own."""
    found = {**function.__globals__, **names}
    copy = FunctionType(code or function.__code__, found, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__annotations__, copy.__doc__ = function.__kwdefaults__, function.__annotations__, function.__doc__
    return copy


# ---- Norms and activations that feed FP8 layers, fused with the quantization ---------------------
# With ``align="exact"`` they equal the rollout's bit for bit: an activation depends on one gate and one up, and a norm is the
# rollout's kernel, which adds its squares in the order of the norm alone. If a kernel does not support an input (FP32 masters
# under autocast), the original forward runs.

class FusedNorm:
    """RMSNorm whose output is quantized for the layers that read it."""

    weight: Tensor
    variance_epsilon: float
    jetrl_fp8: Fp8State
    #: whether the block gets its residual from this norm (``add_in_norms``)
    jetrl_passes: bool = False

    def forward(self, hidden_states: Tensor) -> Any:
        made = producers.rms_norm(hidden_states, self.weight, self.variance_epsilon, self.jetrl_fp8)
        if made is None:
            return super().forward(hidden_states)  # type: ignore[misc]
        return elementwise.passing(*made) if self.jetrl_passes else made[0]


class FusedMLP:
    """Gated MLP whose product is quantized for ``down_proj``."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: Fp8Linear
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Any:
        gate, up, state = self.gate_proj(x), self.up_proj(x), self.down_proj.fp8
        straight = x.requires_grad and all(_has_both_gradients(layer, state) for layer in (self.gate_proj, self.up_proj))
        y = producers.silu_mul(gate, up, state, straight)
        return self.down_proj(self.multiply(gate, up) if y is None else y)

    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        """The activation, for inputs that the kernel does not support."""
        product: Tensor = self.act_fn(gate) * up
        return product


class FusedExactMLP(FusedMLP):
    """The same in exact mode."""

    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.silu_mul(gate, up)


def fuse(model: nn.Module, backend: str, device_type: str) -> list[str]:
    """Fuse modules of a model with FP8 layers, in place. Returns the names of the changed modules.

    It recognizes classes by name, or as those of exact mode, so a part of a model will do. Norms per head and the final norm feed
    no FP8 layer and stay.
    """
    if not producers.available(backend, device_type):
        return []
    changed = []
    families = covering("fused").values()
    norms, mlps = {family.norm: family for family in families}, {family.mlp for family in families}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parent, _, leaf = name.rpartition(".")
        kind = type(module)
        if isinstance(module, FusedNorm | FusedMLP):
            continue
        known = [k.__name__ for k in (kind.__mro__ if issubclass(kind, ExactNorm) else (kind,)) if k.__name__ in norms]
        if known:
            layers = (modules.get(f"{parent}.{reader}") for reader in norms[known[0]].readers.get(leaf, ()))
            first = next((layer for layer in layers if isinstance(layer, Fp8Linear)), None)
            if first is None:
                continue
            swap(module, FusedNorm)
            module.jetrl_fp8 = first.fp8
        elif isinstance(module, ExactMLP) and isinstance(module.down_proj, Fp8Linear):
            swap(module, FusedExactMLP)
        elif kind.__name__ in mlps and isinstance(module.down_proj, Fp8Linear) and _is_silu(module.act_fn):
            swap(module, FusedMLP)
        else:
            continue
        changed.append(name)
    return changed


def _has_both_gradients(layer: nn.Module, state: Fp8State) -> bool:
    """Whether a layer's backward reads its output gradient in both layouts, quantized in the format of ``state``."""
    if not isinstance(layer, Fp8Linear) or not layer.weight.requires_grad:
        return False
    return (layer.fp8.backend_name, layer.fp8.scale_format) == (state.backend_name, state.scale_format)


def _is_silu(activation: object) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


# ---- Residual gradients added in the norm's backward kernel: one launch and 4 bytes per element less
# A block uses its input twice: as residual, and in a norm. Autograd adds the two gradients in a separate kernel. Here a block
# gets a copy of its ``forward`` in which the norm passes its input on, and receives both gradients:
#
#     residual = x;  x = self.norm(x)      becomes      x, residual = passed(self.norm, x)
#
# Values and gradients keep their bits. There is no table of families: a block qualifies if its source has these two statements in
# a row. The class keeps its name, because FSDP and the frameworks find blocks by name.

_PASSED = "jetrl_passed"


class _Block(NamedTuple):
    """A class with a copied forward, and the names of its norms."""

    kind: type
    norms: tuple[str, ...]


def add_in_norms(model: nn.Module, backend: str, device_type: str) -> list[str]:
    """Make norms add the gradients of their blocks' residuals, in place. Returns the names of the changed blocks."""
    if not producers.available(backend, device_type):
        return []
    kinds: dict[str, Any] = {name: type(module) for name, module in model.named_modules()}
    blocks = {name: (model.get_submodule(name), block) for name, kind in kinds.items() if (block := _block(kind)) is not None}
    served = set()
    for module, block in blocks.values():
        for norm in map(module._modules.get, block.norms):
            if isinstance(norm, FusedNorm | ExactNorm):
                norm.jetrl_passes = True
                served.add(block.kind)
    found = {name: pair for name, pair in blocks.items() if pair[1].kind in served}
    for module, block in found.values():  # all blocks of a kind: FSDP assumes that they have the class of the first
        module.__class__ = block.kind
    return list(found)


@functools.cache
def _block(kind: type) -> _Block | None:
    """The replacement for a class of modules; None for no replacement."""
    forward: Any = kind.__dict__.get("forward")
    # a wrapper's source is not the code that runs, and a closure cannot be copied
    plain = isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__") and forward.__closure__ is None
    return _rewritten(kind, forward) if plain and _PASSED not in forward.__globals__ else None


def _rewritten(kind: type, forward: FunctionType) -> _Block | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # no source
        return None
    (definition,) = tree.body
    if any(isinstance(node, ast.AugAssign) for node in ast.walk(tree)):  # autograd forbids it on a tensor that a norm passes on
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
    """Replace these pairs of statements in a function. Yields the names of the norms."""
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


# ---- Queries and keys rotated in one launch ------------------------------------------------------
# transformers' attention classes call ``apply_rotary_pos_emb`` of their module. Here a class gets a copy of its ``forward`` in
# which that name is ours; models that are not prepared rotate as before. There is no table of families: a function is replaced
# if, on a small input, it has the bits of Hugging Face's common expression. Interleaved halves, three-dimensional angles, vision
# towers and functions of other libraries (Liger) stay.

#: its name in transformers
_FUNCTION = "apply_rotary_pos_emb"


def rotate_together(model: nn.Module, backend: str, device_type: str) -> list[str]:
    """Rotate with one kernel in the attention modules of a model, in place. Returns the names of the changed modules."""
    if not producers.available(backend, device_type):
        return []
    changed = []
    for name, module in model.named_modules():
        kind: Any = type(module)
        if (behavior := _behavior(kind)) is not None:
            swap(module, behavior)
            changed.append(name)
    return changed


@functools.cache
def _behavior(kind: type) -> type | None:
    """The behavior of a class of attention for ``swap``; None for no change."""
    forward: Any = kind.__dict__.get("forward")
    calls = isinstance(forward, FunctionType) and _FUNCTION in forward.__code__.co_names
    own: Any = forward.__globals__.get(_FUNCTION) if calls else None
    if own is None or not _is_common(own):
        return None

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        found = None if more or named else ops.rotate_pair(q, k, cos, sin)
        return own(q, k, cos, sin, *more, **named) if found is None else found

    return type("RotatedTogether", (), {"forward": copied(forward, {_FUNCTION: rotate})})


@torch.no_grad()
def _is_common(function: Any) -> bool:
    """Whether a function has the bits of ``x cos + (-high, low) sin`` and leaves the rest of a wider head unchanged."""
    given = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=given, device="cpu").to(torch.bfloat16)  # noqa: E731
    q, k = random(2, 3, 5, 8), random(2, 1, 5, 8)
    for width in (8, 4):
        cos, sin = (random(1, 5, width // 2).repeat(1, 1, 2) for _ in range(2))
        try:
            found = function(q, k, cos, sin)
        except Exception:  # another library's function; or one without partial rotation, of a model that does not need it
            return width < 8
        if len(found) != 2 or not all(torch.equal(y, _common(x, cos, sin)) for x, y in zip((q, k), found)):
            return False
    return True


def _common(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = x.chunk(2, -1)
    return torch.cat((x * cos.unsqueeze(1) + torch.cat((-high, low), -1) * sin.unsqueeze(1), rest), -1)
