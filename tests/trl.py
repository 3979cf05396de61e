"""TRL in a folder of its own: verl imports it wherever it is installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

#: what `make trl` installs
TRL = Path(sys.prefix) / "trl"
needs_trl = pytest.mark.skipif(not TRL.is_dir(), reason=f"needs {TRL}, which `make trl` makes")


def environ() -> dict[str, str]:
    """What a process needs to find TRL."""
    return {"PYTHONPATH": os.pathsep.join(path for path in (str(TRL), os.environ.get("PYTHONPATH", "")) if path)}
