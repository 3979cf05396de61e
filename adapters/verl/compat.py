"""Where verl 0.9.0 and 0.9.1 differ. No other module of this adapter asks for a version or whether a name exists."""

from __future__ import annotations

import functools

from packaging.version import Version

from jetrl_patch.patching.guards import installed_version
from jetrl_patch.patching.patch import Difference

__all__ = ["DIFFERENCES", "wants_float_logits"]

_TEMPERATURE = Difference(
    "verl.workers.engine.fsdp.transformer_impl._scale_logits_by_temperature",
    changed_in="0.9.1",
    added=True,
    handled="verl divides in line, in the logits' dtype, so it gets FP32 logits",
)

DIFFERENCES = (_TEMPERATURE,)


@functools.cache
def wants_float_logits() -> bool:
    """Whether this verl divides by the temperature in line, where only the logits' dtype decides the rounding."""
    found = installed_version("verl")
    return found is not None and Version(found) < Version(_TEMPERATURE.changed_in)
