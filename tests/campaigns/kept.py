"""Verdicts of a campaign, kept in a file of ``build/``, so that a later call continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> dict[str, Any]:
    """The verdicts of a campaign so far."""
    file = _file(name)
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def write(name: str, verdicts: dict[str, Any]) -> None:
    file = _file(name)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(verdicts, indent=1))


def _file(name: str) -> Path:
    return ROOT / "build" / f"{name}.json"
