"""The rule that decides which linear layers are FP8, shared by trainer and rollout.

Patterns match whole parts of a dotted module name, never prefixes of a part: "mlp.gate" is the router of a
mixture of experts and does not match "mlp.gate_up_proj" (prefix matching once left 56 layers of a rollout in BF16).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from jetrl_patch.errors import ModelError
from jetrl_patch.families import ROW_PARALLEL
from jetrl_patch.fp8.formats import BLOCK

#: Matches linear layers inside a transformer block; all others (embedding, lm_head, value heads) stay in BF16.
_IN_BLOCK = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")
#: Router gates stay in BF16.
_ROUTERS = ("gate", "router", "shared_expert_gate")


def matches(name: str, pattern: str) -> bool:
    """Whether ``pattern`` (parts may contain ``*``) equals a run of whole parts of ``name``."""
    parts, wanted = name.split("."), pattern.split(".")
    return any(
        all(fnmatchcase(part, want) for part, want in zip(parts[at:], wanted, strict=False))
        for at in range(len(parts) - len(wanted) + 1)
    )


def is_quantized(name: str, exclude: Sequence[str]) -> bool:
    """Whether the linear layer ``name`` (Hugging Face module name) is quantized."""
    if not _IN_BLOCK.search(name) or name.rsplit(".", 1)[-1] in _ROUTERS:
        return False
    return not any(matches(name, pattern) for pattern in exclude)


def is_row_parallel(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in ROW_PARALLEL


def check_splits(layers: Iterable[tuple[str, int]], tp: int) -> None:
    """Refuse a tensor-parallel size that cuts a 128-block of a row-parallel layer.

    Args:
        layers: (name, K) of each FP8 layer.

    Raises:
        ModelError: names up to two of the layers that would be cut, and their number.
    """
    if tp <= 1:
        return
    split = [(name, k) for name, k in layers if is_row_parallel(name) and k % (tp * BLOCK)]
    if split:
        shown = ", ".join(f"{name} (K = {k})" for name, k in split[:2])
        shown += f" and {len(split) - 2} more" if len(split) > 2 else ""
        raise ModelError(
            f"tensor parallel size {tp} cuts a block of {BLOCK} in {len(split)} layers: {shown}. "
            f"Use a size that keeps K / size a multiple of {BLOCK}, or keep these layers in BF16 on both sides "
            f"with exclude={sorted({name.rsplit('.', 1)[-1] for name, _ in split})}."
        )
