"""The Ray adapter: one patch, on ``ray.init``, where a job's workers get their environment."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import ClassVar

from jetrl_patch.adapters.base import Adapter, Config, Journal, Patch
from jetrl_patch.adapters.ray import connect

logger = logging.getLogger(__name__)

INIT = Patch(
    module="ray",
    attr="init",
    make=connect.init,
    reason="without it the workers of a job are not patched, and nothing tells the driver; not covered: Ray Client (ray://), "
    "and a connection made before enable()",
    remove_when="Ray loads plugins in its workers by entry points",
)


class RayAdapter(Adapter):
    """Patches the workers of a driver that connects after ``enable()``, or stops the driver."""

    name: ClassVar[str] = "ray"
    requires: ClassVar[tuple[str, ...]] = ("ray",)

    def patches(self, config: Config) -> Sequence[Patch]:
        """Return the same patch in every mode."""
        return (INIT,)

    def on_apply(self, config: Config, journal: Journal) -> None:
        """Warn if the driver is connected already: its workers cannot be patched any more."""
        if is_connected_driver():
            logger.warning(
                "jetrl_patch: enable() was called after ray.init(), so the workers of this connection are not patched and will "
                "stop the run if they must be; call enable() first"
            )


def is_connected_driver() -> bool:
    """Whether this process is a connected driver. False in a worker, which its setup hook patches."""
    ray = sys.modules.get("ray")
    connected = getattr(ray, "is_initialized", None)
    if ray is None or connected is None or not connected():
        return False
    return bool(ray._private.worker.global_worker.mode == ray.SCRIPT_MODE)


ADAPTER = RayAdapter()
