"""Limit how many product files name a family, a precision or a correction."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "count_facts.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_a_fact_stands_in_few_files(script: dict[str, Any]) -> None:
    for kind, facts in script["counted"]().items():
        for fact, where in facts.items():
            assert 1 <= len(where) <= script["LIMITS"][kind], f"{kind} {fact}: {where}"


@pytest.mark.parametrize(
    ("kind", "name", "names", "names_not"),
    [
        ("precision", "int8-rollout", ["torch.int8", "Int8Format", "a/int8.py", "INT8"], ["torch.uint8"]),
        ("precision", "fp16", ["fp16_stream", "FP16", "torch.float16"], ["bfloat16", "bf16"]),
        ("precision", "fp8-rollout", ["'fp8-rollout'"], ["fp8", "fp8_rollout"]),
        ("precision", "bf16", ["precision='bf16'", '"precision": "bf16"', 'precision == "bf16"'], ['format="bf16"', "to_bf16"]),
        ("correction", "tis", ['"tis"', "TIS"], ['"seq-tis"', "seq_tis", "statistics"]),
        ("correction", "seq-tis", ["'seq-tis'", "seq_tis"], ["tis"]),
    ],
)
def test_what_counts_as_naming(script: dict[str, Any], kind: str, name: str, names: list[str], names_not: list[str]) -> None:
    pattern = script[f"{kind}_patterns"]()[name]
    assert all(pattern.search(text) for text in names) and not any(pattern.search(text) for text in names_not)


def test_families_whose_names_begin_alike_are_told_apart(script: dict[str, Any]) -> None:
    found = script["family_patterns"](["qwen3", "qwen3_moe"])
    for text, family in (("Qwen3MLP", "qwen3"), ("'qwen3'", "qwen3"), ("Qwen3MoeMLP", "qwen3_moe"), ("'qwen3_moe'", "qwen3_moe")):
        assert [name for name, pattern in found.items() if pattern.search(text)] == [family], text
