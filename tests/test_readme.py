"""The README's table of versions is the one table of versions."""

from __future__ import annotations

from pathlib import Path

from jetrl_patch._versions import SUPPORTED

README = Path(__file__).parents[1] / "README.md"


def test_versions_stand_in_the_readme():
    text = README.read_text()
    for name, (supported, tested) in SUPPORTED.items():
        assert f"| {name} | `{supported}` | {tested} |" in text
