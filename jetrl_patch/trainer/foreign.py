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
    """The package among ``PACKAGES`` that has called this thread's code; empty if there is none, or its adapter has called it."""
    homes = {found.name: type(found).__module__.rpartition(".")[0] for found in registry.adapters()}
    package = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        root = module.partition(".")[0]
        if not package and root in PACKAGES:
            package = root
        elif package in homes and module.startswith(f"{homes[package]}."):
            return ""
        frame = frame.f_back
    return package


def unknown_trainer(found: str, config: Config) -> ConfigError:
    """The error for a trainer that this version does not patch."""
    what, required = f"precision={config.precision!r}", f"a trainer that jetrl_patch patches ({registry.trainers()})"
    fix = "Train with one of these, or run this program without jetrl_patch (JETRL_ENABLED=0)"
    return ConfigError(explain(what, required=required, found=f"{found}, which would go on in its own precision", fix=fix))
