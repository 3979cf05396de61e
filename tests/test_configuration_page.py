"""``docs/configuration.md``, and what other pages take from the code, agree with it."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest

from jetrl_patch.cli.run import usage
from jetrl_patch.config import SETTINGS, Config, environment
from jetrl_patch.config.arguments import options as parsed
from jetrl_patch.config.fields import FIRST

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "configuration.md").read_text()


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "fill_tables.py"))


def test_tables_and_lists_are_those_of_the_code(script: dict[str, Any]) -> None:
    old = [page.name for page, text in script["pages"]().items() if page.read_text() != text]
    assert not old, "run: python -m scripts.fill_tables"


def test_every_setting_is_there_with_its_variable_its_key_and_its_meaning(script: dict[str, Any]) -> None:
    assert set(script["meanings"]()) == set(environment.FIELDS.values()) == {field.name for field in dataclasses.fields(Config)}
    for variable, name in environment.FIELDS.items():
        assert f"| `{variable}` | `jetrl.{name}` |" in TEXT
    for name in environment.VARIABLES:
        assert f"`{name}`" in TEXT


def test_the_settings_that_matter_first_are_named_first_everywhere() -> None:
    page = TEXT[TEXT.index("## All settings") : TEXT.index("<!-- options -->")]
    options = usage()[usage().index("settings to decide on first") :]
    for text, quote in ((Config.__doc__ or "", "``"), (page, "`"), (options, " ")):
        places = [text.index(f"{quote}{name}{quote}") for name in FIRST]
        assert places == sorted(places)
    others = [name for name in SETTINGS if name not in FIRST]
    assert all(f"``{name}``" in (Config.__doc__ or "") and name in usage() for name in others)
    assert len(FIRST) == 8


def test_the_command_line_forms_are_understood() -> None:
    for name in environment.FIELDS.values():
        default = getattr(Config(), name)
        text = {"align": "linear", "exclude": "a,b", "correction_bounds": "0.5,5", "guard_sqnr": "20"}
        text = text.get(name, str(default))
        wanted = {"align": "linear", "exclude": ("a", "b"), "correction_bounds": (0.5, 5.0), "guard_sqnr": 20.0}
        wanted = wanted.get(name, default)
        if name in ("smoothing", "invariant_scale"):  # None by default
            text, wanted = "0.5", 0.5
        if name == "upstream_fixes":  # None by default
            text, wanted = "0", False
        assert parsed(["--set", f"{name}={text}"]) == {name: wanted}
    assert parsed(["--fp8-unified"]) == parsed(["--precision", "fp8-unified"])
