"""The Ray adapter: one patch, on ``ray.init``, because that is where a job's workers get their environment."""

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
    reason="give every worker of the job our settings and our setup hook, and ask every node whether it is patched",
    remove_when="Ray loads plugins in its workers by entry points",
)


class RayAdapter(Adapter):
    """Ray 2.55 and later: a driver that connects after ``enable()`` has patched workers, or does not go on."""

    name: ClassVar[str] = "ray"
    requires: ClassVar[tuple[str, ...]] = ("ray",)

    def patches(self, config: Config) -> Sequence[Patch]:
        """The same in every mode."""
        return (INIT,)

    def on_apply(self, config: Config, journal: Journal) -> None:
        """Say so if the driver's connection is there already: its workers are what they are."""
        if is_connected_driver():
            logger.warning(
                "jetrl_patch: enable() came after ray.init(), so Ray does not carry it to the workers of this "
                "connection; call enable() first (workers that should be patched and are not stop the run by themselves)"
            )


def is_connected_driver() -> bool:
    """Whether this process is a driver with a connection. False in a worker, which is patched by its hook."""
    ray = sys.modules.get("ray")
    connected = getattr(ray, "is_initialized", None)
    if ray is None or connected is None or not connected():
        return False
    return bool(ray._private.worker.global_worker.mode == ray.SCRIPT_MODE)


ADAPTER = RayAdapter()
