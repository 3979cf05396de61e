"""VeOmni, which verl's VeOmni engine runs on, in a folder of its own: verl imports it wherever it is installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import vision_models

#: what `make veomni` installs
VEOMNI = Path(sys.prefix) / "veomni"
needs_veomni = pytest.mark.skipif(not VEOMNI.is_dir(), reason=f"needs {VEOMNI}, which `make veomni` makes")


def environ() -> dict[str, str]:
    """What a process needs to find VeOmni, this package, and what processes images."""
    paths = (str(VEOMNI), *vision_models.environ().values(), os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
