"""How verl's rollout splits a model over the ranks of an engine, which the trainer's sums follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch.adapters.verl.paths import ROLLOUT, named
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain

__all__ = ["expert_parallel", "problems", "tensor_parallel"]


def tensor_parallel(select: Callable[[str], Any]) -> int:
    """Return the tensor-parallel size."""
    return int(select(f"{ROLLOUT}.tensor_model_parallel_size") or 1)


def expert_parallel(select: Callable[[str], Any]) -> int:
    """Return the expert-parallel size."""
    return int(select(f"{ROLLOUT}.expert_parallel_size") or 1)


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error for experts on other ranks than those of one engine."""
    tp, ep = tensor_parallel(select), expert_parallel(select)
    if config.quantized_rollout and ep not in (1, tp):
        what = f"{named(f'{ROLLOUT}.expert_parallel_size')} with precision={config.precision!r}"
        required = f"1, or tensor_model_parallel_size={tp}, because an engine's experts stay on its tensor-parallel ranks"
        yield ConfigError(explain(what, required=required, found=ep, fix="set it to one of the two"))
