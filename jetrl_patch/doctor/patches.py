"""Which patches would go in: the plan of ``enable()``, made and dropped."""

from __future__ import annotations

import re
from collections import Counter

from jetrl_patch import runtime
from jetrl_patch.config import Config
from jetrl_patch.doctor.report import Check, from_error
from jetrl_patch.errors import JetrlError, VersionError
from jetrl_patch.snapshot import PatchStatus

__all__ = ["check_patches"]


def check_patches(config: Config) -> tuple[Check, list[PatchStatus]]:
    """Versions, settings and targets as ``enable()`` checks them. No framework is imported, nothing is changed."""
    try:
        planned = runtime.preview(config)
    except VersionError:
        return Check("patches", "skipped", "versions do not fit (see there)"), []
    except JetrlError as error:
        return from_error("patches", error), []
    counts = Counter(re.split("[.:]", patch.target)[0] for patch in planned)
    parts = ", ".join(f"{number} in {name}" for name, number in counts.items())
    return Check("patches", "ok", f"{len(planned)} would go in: {parts}"), planned
