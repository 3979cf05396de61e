"""The rule that decides which linear layers are FP8, shared by trainer and rollout.

Patterns match whole parts of a dotted module name, never prefixes of a part: "mlp.gate" is the router of a mixture of experts and
does not match "mlp.gate_up_proj" (prefix matching once left 56 layers of a rollout in BF16).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from jetrl_patch.config.formats import POW2, Format
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.models.families import ABSORBED, ROW_PARALLEL, TOWERS
from jetrl_patch.models.structure import matrices_of

#: linear layers inside a transformer block. All others (embedding, lm_head, value heads) stay in BF16
_IN_BLOCK = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")
#: routers, and the projections that gate a delta net's state: one number per head, less than a block
_GATES = ("gate", "router", "shared_expert_gate", "in_proj_b", "in_proj_a", "in_proj_ba")
#: last name parts of the layers in a block that stay in BF16
_PLAIN = ABSORBED.union(_GATES)


def matches(name: str, pattern: str) -> bool:
    """Whether ``pattern`` (parts may contain ``*``) equals a run of whole parts of ``name``."""
    parts, wanted = name.split("."), pattern.split(".")
    return any(
        all(fnmatchcase(part, want) for part, want in zip(parts[at:], wanted, strict=False))
        for at in range(len(parts) - len(wanted) + 1)
    )


def in_tower(name: str) -> bool:
    """Whether the layer ``name`` belongs to a vision tower."""
    return not TOWERS.isdisjoint(name.split("."))


def is_quantized(name: str, exclude: Sequence[str]) -> bool:
    """Whether the linear layer ``name`` (Hugging Face module name) is quantized.

    Not quantized: layers of a vision tower, and the layer of latent attention that a rollout multiplies with in parts.
    """
    if not _IN_BLOCK.search(name) or name.rpartition(".")[2] in _PLAIN or in_tower(name):
        return False
    return not any(matches(name, pattern) for pattern in exclude)


def experts_quantized(name: str, count: int, exclude: Sequence[str]) -> bool:
    """Whether the experts of the module ``name`` are quantized. Trainer and rollout both decide by this function.

    Raises ModelError if patterns exclude some of them but not all.
    """
    layers = matrices_of(name, count)
    out = [layer for layer in layers if not is_quantized(layer, exclude)]
    if out and len(out) != len(layers):
        found = f"exclude={list(exclude)}, which excludes {out[0]}" + (f" and {len(out) - 1} more" if out[1:] else "")
        required = f"all {len(layers)} matrices of {name} in FP8 or none, because one operation computes them"
        fix = f"exclude {'.'.join(name.split('.')[-4:])!r} or other layers"
        raise ModelError(explain("experts of a block", required=required, found=found, fix=fix))
    return not out


def is_row_parallel(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in ROW_PARALLEL


def is_cut(name: str, k: int, tp: int, form: Format = POW2) -> bool:
    """Whether ``tp`` ranks of the rollout cut a block of the layer ``name``, which contracts over ``k``.

    Trainer and rollout both decide by this function. ``form`` is the run's ``Config.scales``.
    """
    return is_row_parallel(name) and (k % tp != 0 or form.cuts(k // tp, k))


def cut_words(layers: Sequence[str], tp: int, form: Format = POW2) -> str:
    """One line about the layers that ``on_cut="bf16"`` leaves in BF16, and why."""
    leaves = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in layers}))
    return (
        f"tensor parallel size {tp} cuts {form.unit} in {len(layers)} layers ({leaves}; {layers[0]} to {layers[-1]}), "
        "which run in BF16 on both sides"
    )


def check_splits(layers: Iterable[tuple[str, int]], tp: int, form: Format = POW2) -> None:
    """Raise ModelError for a tensor-parallel size that cuts a block of a row-parallel layer. ``layers`` are (name, K)."""
    split = [f"{name} (K = {k})" for name, k in layers if is_cut(name, k, tp, form)]
    if split:
        raise cut_error(split, tp, form)


def cut_error(layers: Sequence[str], tp: int, form: Format = POW2) -> ModelError:
    """The error for row-parallel layers of which ``tp`` ranks would cut a block."""
    shown = ", ".join(layers[:2]) + (f" and {len(layers) - 2} more" if len(layers) > 2 else "")
    return ModelError(
        f"tensor parallel size {tp} cuts {form.unit} in {len(layers)} layers: {shown}. {form.uncut}, or leave these layers in "
        "BF16 on both sides with on_cut='bf16' (JETRL_ON_CUT=bf16)."
    )
