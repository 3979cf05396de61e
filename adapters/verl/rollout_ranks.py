"""How verl's rollout splits a model over the ranks of an engine, which the trainer's sums follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch.adapters.verl.paths import MODEL, ROLLOUT, model_folder, named
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.trainer.preflight import needed_ep

__all__ = ["EXPERTS", "expert_parallel", "problems", "reason", "tensor_parallel", "wanted"]

#: verl's setting of the expert-parallel size, 1 by default
EXPERTS = f"{ROLLOUT}.expert_parallel_size"


def tensor_parallel(select: Callable[[str], Any]) -> int:
    """Return the tensor-parallel size."""
    return int(select(f"{ROLLOUT}.tensor_model_parallel_size") or 1)


def expert_parallel(select: Callable[[str], Any], config: Config) -> int:
    """Return the expert-parallel size: the user's, or if that is 1 the one that ``wanted`` sets."""
    given = _given(select)
    return given if given > 1 else int(wanted(select, config).get(EXPERTS, given))


def wanted(select: Callable[[str], Any], config: Config) -> dict[str, int]:
    """Return the setting for experts of which tensor parallelism would cut a block: path -> value; empty if none is needed.

    verl wants the product of tensor-parallel and data-parallel size; data parallelism inside an engine has no experts in FP8.
    """
    tp, dp = tensor_parallel(select), int(select(f"{ROLLOUT}.data_parallel_size") or 1)
    if _given(select) > 1 or dp > 1:
        return {}
    ep = needed_ep(model_folder(select), config, tp, trust_remote_code=bool(select(f"{MODEL}.trust_remote_code")))
    return {EXPERTS: ep} if ep > 1 else {}


def reason(select: Callable[[str], Any]) -> str:
    """Say why ``wanted`` sets what it does."""
    return f"tensor parallel size {tensor_parallel(select)} would cut a block of the experts, which now stay whole"


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error for experts on other ranks than those of one engine."""
    tp, ep = tensor_parallel(select), _given(select)
    if config.quantized_rollout and ep not in (1, tp):
        what = f"{named(EXPERTS)} with precision={config.precision!r}"
        required = f"1, or tensor_model_parallel_size={tp}, because an engine's experts stay on its tensor-parallel ranks"
        yield ConfigError(explain(what, required=required, found=ep, fix="set it to one of the two"))


def _given(select: Callable[[str], Any]) -> int:
    return int(select(EXPERTS) or 1)
