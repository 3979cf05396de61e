"""Where verl 0.9.0 and 0.9.1 differ. No other module of this adapter checks verl's version or whether a name exists."""

from __future__ import annotations

import functools

from packaging.version import Version

from jetrl_patch.patching.guards import Difference, installed_version

_TEMPERATURE = Difference(
    "verl.workers.engine.fsdp.transformer_impl._scale_logits_by_temperature",
    changed_in="0.9.1",
    added=True,
    handled="verl 0.9.0 divides in line, in the logits' dtype, so the plugin passes it FP32 logits",
)

DIFFERENCES = (_TEMPERATURE,)


@functools.cache
def wants_float_logits() -> bool:
    """Whether this verl divides by the temperature in the logits' own dtype."""
    found = installed_version("verl")
    return found is not None and Version(found) < Version(_TEMPERATURE.changed_in)
