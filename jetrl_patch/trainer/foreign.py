"""Training frameworks that this version does not patch: with them only the rollout would be in FP8."""

from __future__ import annotations

import sys
from types import FrameType

from jetrl_patch import registry
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, explain

#: top-level packages that train and build rollout engines of their own
PACKAGES = frozenset({"areal", "nemo_rl", "prime_rl", "roll", "skyrl", "skyrl_train", "swift", "trl", "unsloth", "unsloth_zoo"})


def calling_package() -> str:
    """The package among ``PACKAGES`` whose code is running in this thread, called by it or calling; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in PACKAGES:
            return package
        frame = frame.f_back
    return ""


def unknown_trainer(found: str, config: Config) -> ConfigError:
    """The error for a trainer that this version does not patch."""
    what, required = f"precision={config.precision!r}", f"a trainer that jetrl_patch patches ({' or '.join(registry.programs())})"
    fix = "Train with one of these, or run this program without jetrl_patch (JETRL_ENABLED=0)"
    return ConfigError(explain(what, required=required, found=f"{found}, which would go on in its own precision", fix=fix))
