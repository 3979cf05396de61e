"""Packages of others that check a run: martingale's recorder and checker, and molt-rl's metric."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

#: what `make judges-packages` installs
JUDGES = Path(sys.prefix) / "judges"
needs_judges = pytest.mark.skipif(not JUDGES.is_dir(), reason=f"needs {JUDGES}, which `make judges-packages` makes")
