"""The Ray adapter: one patch, on ``ray.init``, where a job's workers get their environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

from jetrl_patch.adapters.base import Adapter, Config, Patch
from jetrl_patch.adapters.ray import connect

INIT = Patch(
    module="ray",
    attr="init",
    make=connect.init,
    reason="without it the workers of a job are not patched, and nothing tells the driver; not covered: Ray Client (ray://) "
    "and a connection made before enable(), which are refused",
    remove_when="Ray loads plugins in its workers by entry points",
)


class RayAdapter(Adapter):
    """Patches the workers of a driver that connects after ``enable()``, or stops the driver."""

    name: ClassVar[str] = "ray"
    requires: ClassVar[tuple[str, ...]] = ("ray",)

    def patches(self, config: Config) -> Sequence[Patch]:
        """Return the same patch in every mode."""
        return (INIT,)

    def check(self, config: Config) -> None:
        """Raise NotPatchedError if the driver is connected already, and not so that its workers have these settings."""
        if is_connected_driver():
            connect.require_hook(config)


def is_connected_driver() -> bool:
    """Whether this process is a connected driver. False in a worker, which its setup hook patches."""
    ray = sys.modules.get("ray")
    connected = getattr(ray, "is_initialized", None)
    if ray is None or connected is None or not connected():
        return False
    return bool(ray._private.worker.global_worker.mode == ray.SCRIPT_MODE)


ADAPTER = RayAdapter()
