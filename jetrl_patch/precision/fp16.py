"""FP16 weights: what fits, and the trainer's side of a weight sync in FP16.

FP16 has ten bits of mantissa where BF16 has seven, and five of exponent where BF16 has eight: nothing beyond 65504. A
weight of a BF16 checkpoint beyond it would become Inf without a word; here it is an error with the weight's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from jetrl_patch.errors import ModelError, SyncError
from jetrl_patch.sync.stream import NamedTensor, SyncStats

__all__ = ["MAX", "check_fits", "fp16_stream", "misfit"]

#: the greatest finite FP16 value
MAX = 65504.0


def misfit(weight: torch.Tensor) -> str:
    """Why a weight, of any dtype and shape, cannot be FP16, in words; empty if it can.

    FP16 rounds to nearest: what lies below 65520 becomes 65504 and fits.
    """
    if weight.numel() == 0 or not weight.is_floating_point() or weight.is_meta:
        return ""
    weight = weight.detach()
    if bool(torch.isnan(weight).any()):
        return "NaN"
    if bool(torch.isfinite(weight.to(torch.float16)).all()):
        return ""
    greatest = float(weight.abs().max())
    if greatest == float("inf"):
        return "Inf (a weight beyond 65504, if it was loaded in FP16)" if weight.dtype == torch.float16 else "Inf"
    return f"|w| = {greatest:g}"


def check_fits(weights: Iterable[NamedTensor], where: str) -> None:
    """Raise ModelError, naming the first ten, if weights of a loaded model do not fit FP16."""
    found = [f"{name} has {why}" for name, weight in weights if (why := misfit(weight))]
    if found:
        more = f" and {len(found) - 10} more" if len(found) > 10 else ""
        raise ModelError(
            f"{where} does not fit FP16, whose greatest value is {MAX:g}: {'; '.join(found[:10])}{more}. Use "
            f"precision='bf16' for this model"
        )


def fp16_stream(weights: Iterable[NamedTensor], stats: SyncStats) -> Iterator[NamedTensor]:
    """The framework's ``(name, full tensor)`` in FP16, one at a time, counted in ``stats``.

    Raises:
        SyncError: a weight that is NaN, Inf or does not fit. What was sent before it is not taken back: the run stops.
    """
    for name, weight in weights:
        why = misfit(weight)
        if why:
            raise SyncError(
                f"{name} has {why}, which FP16 cannot hold (greatest value {MAX:g}), so the weight sync stops; look at the "
                f"last optimizer steps (gradient norm, learning rate), or use precision='bf16'"
            )
        half = weight.detach().to(torch.float16) if weight.is_floating_point() else weight
        stats.total += half.nbytes
        stats.tensors += 1
        yield name, half
