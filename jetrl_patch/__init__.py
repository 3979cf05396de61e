"""jetrl_patch: RL of language models in one FP8 flow, bit-equal between rollout and trainer.

>>> import jetrl_patch
>>> jetrl_patch.enable(precision="fp8-unified")   # before or after importing verl or vllm
>>> print(jetrl_patch.status())
>>> jetrl_patch.disable()

Importing this package imports neither torch nor a framework and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jetrl_patch._versions import VERSION as __version__

if TYPE_CHECKING:
    from jetrl_patch.config import Config
    from jetrl_patch.errors import (
        AuditError,
        ConfigError,
        ConflictError,
        JetrlError,
        ModelError,
        NotPatchedError,
        PatchError,
        PrecisionError,
        SyncError,
        VersionError,
    )
    from jetrl_patch.session import disable, enable, status
    from jetrl_patch.snapshot import Status

__all__ = [
    "AuditError", "Config", "ConfigError", "ConflictError", "JetrlError", "ModelError", "NotPatchedError", "PatchError",
    "PrecisionError", "Status", "SyncError", "VersionError", "__version__", "disable", "enable", "status",
]  # fmt: skip

_HOME = {
    "Config": "jetrl_patch.config",
    "Status": "jetrl_patch.snapshot",
    "enable": "jetrl_patch.session",
    "disable": "jetrl_patch.session",
    "status": "jetrl_patch.session",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME.get(name, "jetrl_patch.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
