"""Megatron-Core, which verl's Megatron engine runs on, in a folder of its own: verl imports it wherever it is installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

#: what `make megatron` installs
MEGATRON = Path(sys.prefix) / "megatron"
needs_megatron = pytest.mark.skipif(not MEGATRON.is_dir(), reason=f"needs {MEGATRON}, which `make megatron` makes")


def environ() -> dict[str, str]:
    """What a process needs to find Megatron."""
    return {"PYTHONPATH": os.pathsep.join(path for path in (str(MEGATRON), os.environ.get("PYTHONPATH", "")) if path)}
