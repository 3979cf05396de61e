"""List the patches that ``enable()`` would apply, without applying them."""

from __future__ import annotations

import re
from collections import Counter

from jetrl_patch import runtime, support
from jetrl_patch.config import Config
from jetrl_patch.doctor.report import Check, from_error
from jetrl_patch.errors import JetrlError, VersionError
from jetrl_patch.snapshot import PatchStatus

__all__ = ["check_patches"]


def check_patches(config: Config) -> tuple[Check, list[PatchStatus]]:
    """Run the checks of ``enable()`` on versions, settings and targets. Imports no framework and changes nothing."""
    if not support.check_torch()[0]:
        return Check("patches", "skipped", "they need torch (see above)"), []
    try:
        planned = runtime.preview(config)
    except VersionError:
        return Check("patches", "skipped", "a version is not supported (see above)"), []
    except JetrlError as error:
        return from_error("patches", error), []
    counts = Counter(re.split("[.:]", patch.target)[0] for patch in planned)
    parts = ", ".join(f"{number} in {name}" for name, number in counts.items())
    return Check("patches", "ok", f"{len(planned)} would be applied: {parts}"), planned
