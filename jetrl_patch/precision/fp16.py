"""FP16 weights: which ones fit, and the trainer's side of a weight sync in FP16.

FP16 has 10 mantissa bits (BF16: 7) and 5 exponent bits (BF16: 8), so its largest value is 65504. A larger weight of a BF16
checkpoint would silently become Inf; here it is an error that names the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from jetrl_patch.errors import ModelError, SyncError
from jetrl_patch.sync.stream import NamedTensor, SyncStats

__all__ = ["MAX", "check_fits", "fp16_stream", "misfit"]

#: the largest finite FP16 value
MAX = 65504.0


def misfit(weight: torch.Tensor) -> str:
    """Why a weight of any dtype and shape cannot be FP16, as a phrase; empty if it can.

    FP16 rounds to nearest: a value between 65504 and 65520 becomes 65504 and fits.
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
        return "Inf (a weight above 65504, if it was loaded in FP16)" if weight.dtype == torch.float16 else "Inf"
    return f"|w| = {greatest:g}"


def check_fits(weights: Iterable[NamedTensor], where: str) -> None:
    """Raise ModelError if weights of a loaded model do not fit FP16. It names at most three of them."""
    found = [f"{name} has {why}" for name, weight in weights if (why := misfit(weight))]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ModelError(
            f"{where} does not fit FP16, whose largest value is {MAX:g}: {'; '.join(found[:3])}{more}. "
            f"Use precision='bf16' for this model."
        )


def fp16_stream(weights: Iterable[NamedTensor], stats: SyncStats) -> Iterator[NamedTensor]:
    """Yield the framework's ``(name, full tensor)`` pairs in FP16, one at a time, counted in ``stats``.

    Raises:
        SyncError: a weight is NaN, Inf or does not fit. Weights already sent are not taken back: the run must stop.
    """
    for name, weight in weights:
        why = misfit(weight)
        if why:
            raise SyncError(
                f"{name} has {why}, which FP16 cannot hold (largest value {MAX:g}), so the weight sync stops. Check the last "
                f"optimizer steps (gradient norm, learning rate), or use precision='bf16'."
            )
        half = weight.detach().to(torch.float16) if weight.is_floating_point() else weight
        stats.total += half.nbytes
        stats.tensors += 1
        yield name, half
