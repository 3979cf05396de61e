"""The Triton digest, compiled for Hopper."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from . import specs_rows
from .aot import Spec, compile_one


@pytest.mark.parametrize("spec", specs_rows.DIGEST, ids=lambda spec: spec.name)
def test_compiles_for_hopper_without_spills(spec: Spec):
    made = compile_one(spec)
    assert made.spills == 0 and made.registers <= 128, made[:3]
    assert "ld.global.v4.b32" in made.ptx or "ld.global.v2.b32" in made.ptx  # neighbouring bytes at once
    assert len(re.findall(r"\b(?:atom|red)\.", made.ptx)) == 1
