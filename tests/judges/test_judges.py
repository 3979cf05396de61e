"""How ``make judges`` reads pytest's reports and compares two runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.judges import __main__ as judges
from scripts.judges import explained, suites
from scripts.judges.__main__ import file_of, moved, texts
from scripts.judges.run import Outcome, Run, outcomes

TESTS = """
import pytest

@pytest.fixture
def torn():
    yield
    raise OSError("torn down")

@pytest.fixture
def missing():
    raise OSError("no network")

def test_passes(): pass
def test_fails(): assert 1 == 2, "one is not two"
def test_cannot_begin(missing): pass
def test_ends_badly(torn): pass
@pytest.mark.skip(reason="no GPU")
def test_is_skipped(): pass
"""


def test_outcomes_are_those_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=found.xml"]
    subprocess.run(words, cwd=tmp_path, capture_output=True)
    found = {name.partition("::")[2]: outcome for name, outcome in outcomes(tmp_path / "found.xml").items()}
    verdicts = {name: outcome.verdict for name, outcome in found.items()}
    assert verdicts == {
        "test_passes": "passed", "test_fails": "failed", "test_cannot_begin": "error", "test_ends_badly": "error",
        "test_is_skipped": "skipped",
    }  # fmt: skip
    assert "one is not two" in found["test_fails"].message and "no GPU" in found["test_is_skipped"].message


def test_only_what_ends_differently_has_moved() -> None:
    passed, failed = Outcome("passed"), Outcome("failed", "another message")
    stock = Run({"a": passed, "b": failed, "c": passed}, 1.0)
    other = Run({"a": passed, "b": Outcome("failed"), "c": failed, "d": passed}, 1.0)
    assert moved(stock, other) == {"c": (passed, failed), "d": (Outcome("not run"), passed)}


@pytest.mark.parametrize(
    ("test", "file"),
    [
        ("tests.a.test_b::test_c[x.y]", "tests/a/test_b.py"),
        ("tests.a.test_b.TestC::test_d", "tests/a/test_b.py"),
    ],
)
def test_the_file_of_a_test(test: str, file: str) -> None:
    assert file_of(test) == file


def test_every_explanation_is_of_a_suite_and_its_arms() -> None:
    for one in explained.EXPLAINED:
        fitting = [suite for suite in suites.SUITES if explained.fnmatchcase(suite.name, one.suite)]
        assert fitting and all(set(one.arms) <= set(suite.arms) for suite in fitting)


def test_an_explanation_is_of_one_end_alone() -> None:
    """That a test passes with the plugin does not explain that it fails."""
    name = "tests.test_batch_invariance::test_logprobs_bitwise_batch_invariance_bs1_vs_bsN[CPU_ATTN]"
    assert explained.reason("vLLM determinism, qwen3", "exact", name, "passed")
    assert explained.reason("vLLM determinism, qwen3", "exact", name, "failed") is None


def test_what_is_not_explained_is_said_to_be() -> None:
    row = {
        "suite": "verl on CPU", "tests of": "verl", "run against": "verl", "run": 2, "passed": 1, "failed": 1, "skipped": 0,
        "minutes": 1.0, "processor": "p", "date": "2026-01-01",
    }  # fmt: skip
    rows = [{**row, "plugin": "off", "moved": {}}, {**row, "plugin": "bf16", "moved": {"t": {"why": None}}}]
    assert "- verl on CPU, bf16, 1 test: not explained" in texts(rows)["moved"]


def test_a_suite_in_which_nothing_passes_is_an_error_and_keeps_its_earlier_results(monkeypatch, tmp_path, capsys):
    row = {"suite": "OpenRLHF", "plugin": "off", "passed": 20, "processor": "p", "date": "d", "moved": {}}
    row |= dict.fromkeys(("tests of", "run against", "run", "failed", "skipped", "minutes"), 0)
    results, page, kept = tmp_path / "results.json", tmp_path / "page.md", tmp_path / "runs" / "OpenRLHF off.json"
    results.write_text(json.dumps([row]))
    page.write_text("<!-- judges -->\n<!-- /judges -->\n<!-- moved -->\n<!-- /moved -->\n")
    kept.parent.mkdir()
    kept.write_text("{}")
    monkeypatch.setattr(judges, "RESULTS", results)
    monkeypatch.setattr(judges, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["judges", "--openrlhf", str(tmp_path), "--only", "OpenRLHF", "--out", str(tmp_path)])
    monkeypatch.setattr(judges, "rows", lambda *_: [row | {"passed": 0}])
    assert judges.main() == 1
    assert "OpenRLHF: no test passed" in capsys.readouterr().out
    assert json.loads(results.read_text()) == [row] and not kept.exists()
    monkeypatch.setattr(judges, "rows", lambda *_: [row | {"passed": 0}, row | {"plugin": "exact", "passed": 1}])
    assert judges.main() == 0
    assert [one["passed"] for one in json.loads(results.read_text())] == [0, 1]
