"""From metrics.jsonl to summary, table, pictures and page."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jetrl_patch.cli.report import ReportError, make_answers, make_table, read_runs, summarize, write_report
from jetrl_patch.cli.report.figures import script
from jetrl_patch.cli.report.tables import COLUMNS
from jetrl_patch.errors import JetrlError
from jetrl_patch.measure.mismatch import Sums

SUMMARY_KEYS = (
    "name", "precision", "align", "correction", "router_replay", "seed", "steps", "tokens", "reward_first", "reward_last",
    "reward_best", "accuracy_first", "accuracy_last", "accuracy_best", "logp_abs_diff_mean", "logp_abs_diff_max",
    "bit_equal_fraction_min", "route_mismatch_mean", "ess_mean", "clipped_fraction_mean", "k3_kl_mean", "sync_bytes",
    "sync_bytes_bf16", "sync_seconds_mean", "sync_share", "step_seconds_median", "parts", "peak_memory_bytes",
    "quantized_layers", "versions",
)  # fmt: skip

ARMS = (("bf16", "none", 2e-3), ("fp8-rollout", "none", 1e-2), ("fp8-unified", "exact", 0.0))

ANSWERS = [{"question": "1 < 2?", "before": "[b]no", "before_right": False, "after": "yes & no", "after_right": True}]


def step(precision: str, align: str, seed: int, number: int, mismatch: float) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if number in (0, 4):
        data["val-core/words/reward/mean@1"] = 0.3 + 0.15 * number
        data["val-aux/num_turns/mean"] = 2.0
    if number:
        data |= {
            "critic/score/mean": 0.3 + 0.1 * number,
            "jetrl/tokens": 100.0 * number,
            "jetrl/logp_abs_diff_mean": mismatch * number,
            "jetrl/logp_abs_diff_max": 10 * mismatch * number,
            "jetrl/bit_equal_fraction": 1.0 if mismatch == 0 else 0.1 * number,
            "jetrl/k3_kl": mismatch**2,
            "jetrl/sync_bytes": 515,
            "jetrl/sync_bytes_bf16": 1000,
            "jetrl/sync_seconds": 0.25,
            "jetrl/quantized_layers": 28,
            "timing_s/step": float(number),
            "timing_s/testing": 5.0 if number == 4 else 0.0,
        }
    return {"precision": precision, "align": align, "seed": seed, "step": number, "data": data}


def final(precision: str, align: str, seed: int) -> dict[str, Any]:
    versions = {"torch": "2.13.0", "verl": "0.9.1"}
    body = {"peak_memory_bytes": 5 * 2**30, "versions": versions, "answers": ANSWERS}
    return {"precision": precision, "align": align, "seed": seed, "final": body}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records = []
    for precision, align, mismatch in ARMS:
        for seed in (0, 1):
            records += [step(precision, align, seed, n, mismatch) for n in range(5)]
            records.append(final(precision, align, seed))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return tmp_path


def test_summary_of_an_arm(folder: Path) -> None:
    run = next(r for r in read_runs(folder / "metrics.jsonl") if r.precision == "fp8-rollout")
    found = summarize(run)
    assert tuple(found) == SUMMARY_KEYS
    weights = (100, 200, 300, 400)
    mean = sum(w * 1e-2 * n for n, w in enumerate(weights, start=1)) / 1000
    assert found["logp_abs_diff_mean"] == pytest.approx(mean)
    assert found["logp_abs_diff_max"] == pytest.approx(0.4)
    assert found["bit_equal_fraction_min"] == pytest.approx(0.1)
    assert (found["steps"], found["tokens"]) == (4, 1000)
    assert (found["accuracy_first"], found["accuracy_last"]) == (0.3, pytest.approx(0.9))
    assert found["step_seconds_median"] == 2.5  # verl times validation apart
    assert (found["sync_bytes"], found["sync_bytes_bf16"], found["quantized_layers"]) == (515, 1000, 28)
    assert found["peak_memory_bytes"] == 5 * 2**30
    assert found["versions"]["verl"] == "0.9.1"


def test_equality_survives_the_summary_exactly(folder: Path) -> None:
    for found in map(summarize, read_runs(folder / "metrics.jsonl")):
        exact = found["align"] == "exact"
        assert (found["logp_abs_diff_max"] == 0.0) is exact
        assert (found["bit_equal_fraction_min"] == 1.0) is exact


def test_everything_is_written_and_the_page_stands_alone(folder: Path) -> None:
    summaries = write_report(folder, "A <title>", "and more")
    assert json.loads((folder / "summary.json").read_text()) == summaries
    assert len(summaries) == 6
    for name in ("learning.png", "mismatch.png", "agreement.png", "time.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text().replace(script(), "")
    assert "A &lt;title&gt;" in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page)
    assert not re.findall(r"url\(|@import|fetch\(", page)
    assert "0 of 2,000" in page
    assert "1 &lt; 2?" in page
    assert "✗</b> [b]no" in page
    assert "✓</b> yes &amp; no" in page
    assert not re.findall(r"\$[a-z]", page)  # no placeholder is left


def test_what_never_changes_between_rollout_and_trainer_is_a_line_and_no_chart(tmp_path: Path, folder: Path) -> None:
    exact = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if "exact" in line]
    (tmp_path / "exact").mkdir()
    (tmp_path / "exact" / "metrics.jsonl").write_text("\n".join(exact))
    write_report(tmp_path / "exact")
    write_report(folder)
    alone, beside = ((place / "report.html").read_text() for place in (tmp_path / "exact", folder))
    title = r"\u003cb\u003eBit-equal tokens"  # of a chart: its text is JSON
    assert title in beside and title not in alone
    assert re.search(r"<dt>Mean .Δ log-prob.</dt><dd [^>]*>0</dd>", alone)
    assert re.search(r"<dt>Bit-equal tokens</dt><dd [^>]*>100%</dd>", alone)


@pytest.mark.parametrize("width", [66, 80, 120, 170])
def test_the_table_fits_its_terminal(folder: Path, width: int) -> None:
    summaries = [summarize(run) for run in read_runs(folder / "metrics.jsonl")]
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(make_table(summaries, "title", width))
    text = console.export_text()
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "30.0% → 90.0%" in text and "4.0e-01" in text and "bit-equal" in text  # no figure is broken in two
    assert ("fp8-unified/exact" in text) is (width > 66)  # its name goes over two lines
    assert ("k3 KL" in text) is (width >= 120)
    assert ("memory" in text) is (width == 170)


def test_answers_keep_their_brackets() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(make_answers(ANSWERS))
    assert "✗ [b]no" in console.export_text()


def test_a_share_says_100_percent_only_when_it_is() -> None:
    run = dict.fromkeys(SUMMARY_KEYS) | {"precision": "bf16", "align": "none", "seed": 0, "steps": 1}
    (column,) = [column for column in COLUMNS if column.title == "bit-equal"]
    shown = [column.text(run | {"bit_equal_fraction_min": share}) for share in (1.0, 1 - 1e-9, 0.0, None, math.nan)]
    assert shown == ["100%", "99.9%", "0.0%", "–", "nan"]


def test_nan_stays_visible(tmp_path: Path) -> None:
    """verl's file logger writes NaN as null; such a step must not disappear from the summary."""
    records = [step("fp8-unified", "exact", 0, n, 0.0) for n in range(4)]
    records[2]["data"] |= {"jetrl/logp_abs_diff_max": None, "jetrl/bit_equal_fraction": None}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    found = write_report(tmp_path)[0]
    assert math.isnan(found["logp_abs_diff_max"])
    assert math.isnan(found["bit_equal_fraction_min"])


def test_a_step_that_compared_nothing_is_not_skipped(tmp_path: Path) -> None:
    """Its figures are NaN and it has no tokens: it shows in the extremes, and does not count in the means."""
    records = [step("fp8-unified", "exact", 0, n, 0.0) for n in range(4)]
    records[2]["data"] |= Sums().figures().as_metrics()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    found = write_report(tmp_path)[0]
    assert math.isnan(found["bit_equal_fraction_min"]) and math.isnan(found["logp_abs_diff_max"])
    assert (found["tokens"], found["logp_abs_diff_mean"]) == (400, 0.0)
    assert "0 of 400" not in (tmp_path / "report.html").read_text()


def test_a_run_without_our_metrics_is_still_reported(tmp_path: Path) -> None:
    record = {"precision": "bf16", "align": "none", "seed": 0, "step": 1, "data": {"critic/score/mean": 0.5}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    found = write_report(tmp_path)[0]
    assert found["steps"] == 1
    assert [key for key in SUMMARY_KEYS if found[key] is None][:2] == ["tokens", "accuracy_first"]
    assert (found["reward_last"], found["reward_best"]) == (0.5, 0.5)


def test_a_last_line_that_was_cut_off_is_left_out(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    whole = [summarize(run) for run in read_runs(path)]
    with path.open("a") as file:
        file.write('{"precision": "bf16", "ali')
    notes: list[str] = []
    assert [summarize(run) for run in read_runs(path, notes=notes)] == whole
    assert notes == [f"{path}, line 37: truncated; the 36 lines before it are used"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{broken", "line 2: not JSON"),
        ("[1, 2]", "line 2: required a JSON object, found list"),
        ('{"step": 1, "data": {}}', "line 2: a record needs precision and align"),
        ('{"precision": "bf16", "align": "none", "seed": 0, "step": "one", "data": {}}', "line 2: required an integer step"),
    ('{"precision": "bf16", "align": "none", "seed": 0, "step": 1}', "line 2: a record needs data, or final"),
    ],
)
def test_a_wrong_line_is_an_error_that_names_it(tmp_path: Path, line: str, says: str) -> None:
    good = json.dumps(step("bf16", "none", 0, 1, 1e-3))
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ReportError, match=says):
        read_runs(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("text", [None, "", "\n\n", json.dumps(final("bf16", "none", 0)) + "\n"])
def test_nothing_to_report_on_is_an_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(JetrlError, match=r"metrics\.jsonl"):
        write_report(tmp_path)
