"""The ``jetrl report`` command: output, warnings and errors."""

from __future__ import annotations

import json
import math
import random
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from jetrl_patch.cli.main import app
from jetrl_patch.cli.report import ReportError
from jetrl_patch.cli.report.command import watch
from jetrl_patch.cli.report.figures import script


def data(step: int, mismatch: float) -> dict[str, Any]:
    return {
        "critic/score/mean": 0.5 + step / 100,
        "timing_s/step": 3.0,
        "timing_s/gen": 1.0,
        "timing_s/update_weights": 0.5,
        "timing_s/update_actor": 1.25,
        "jetrl/logp_abs_diff_mean": mismatch * (1 + step),
        "jetrl/scale/model.layers.0.q_proj/saturation": 1e-3 * step,
    }


def write_run(path: Path, mismatch: float, steps: int = 6) -> Path:
    lines = [json.dumps({"step": s, "data": data(s, mismatch)}) + "\n" for s in range(steps)]
    path.write_text("".join(lines))
    return path


def report(*args: object) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, args)], catch_exceptions=True, env={"COLUMNS": "200"})


def drawn(page: str) -> dict[str, dict[str, Any]]:
    """The lines of the first run on the page, by the titles of their charts."""
    call = page[page.index("Plotly.newPlot(", page.index('id="lines"')) :]
    traces, rest = json.JSONDecoder().raw_decode(call, call.index("["))
    layout, _ = json.JSONDecoder().raw_decode(call, call.index("{", rest))
    titles = [note["text"].split("<b>")[1].split("</b>")[0] for note in layout["annotations"] if "<b>" in note["text"]]
    axes = list(dict.fromkeys(trace["yaxis"] for trace in traces))
    return {title: next(t for t in traces if t["yaxis"] == axis) for title, axis in zip(titles, axes, strict=True)}


def test_two_runs_become_a_page_pictures_and_a_table(tmp_path: Path) -> None:
    exact, usual = write_run(tmp_path / "exact.jsonl", 0.0), write_run(tmp_path / "usual.jsonl", 1e-3)
    done = report(f"exact </script> run={exact}", usual, "--out", tmp_path / "out", "--title", "a < b")
    assert done.exit_code == 0, done.output
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {"report.html", "summary.json", "learning.png", "mismatch.png", "time.png", "scales.png"}
    assert "usual" in done.stdout and "16.7%" in done.stdout
    page = (tmp_path / "out" / "report.html").read_text()
    assert "exact </script>" not in page  # a name cannot end the data
    assert "<title>a &lt; b</title>" in page
    first = json.loads((tmp_path / "out" / "summary.json").read_text())[0]
    assert first["parts"] == {"rollout": 1.0, "weight sync": 0.5, "training": 1.25, "other": 0.25}
    assert first["sync_share"] == pytest.approx(0.5 / 3)
    assert first["logp_abs_diff_mean"] == 0.0
    assert first["seed"] is None
    first = drawn(page)["Mean |Δ log-prob|"]
    assert first["name"] == "exact &lt;/script&gt; run" and [text for _, text in first["customdata"]] == ["0"] * 6
    assert '"model.layers.0.q_proj"' in page[page.index('id="layers"') :]


def test_a_line_that_was_cut_off_is_a_warning_in_the_terminal_and_on_the_page(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.jsonl", 0.0)
    path.write_text(path.read_text()[:-20])
    done = report(path, "--out", tmp_path / "out")
    assert done.exit_code == 0
    says = f"{path}, line 6: truncated; the 5 lines before it are used"
    assert f"warning: {says}" in done.stderr
    assert says in (tmp_path / "out" / "report.html").read_text()


def test_runs_without_a_common_metric_and_without_any(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good.jsonl", 0.0)
    other, empty = tmp_path / "other.jsonl", tmp_path / "empty.jsonl"
    other.write_text('{"step": 900, "data": {"actor/entropy": 0.5}}\n')
    empty.write_text('{"step": 1, "data": {"something/else": 0.5}}\n')
    done = report(good, other, empty, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "empty: has none of the metrics that the report shows" in done.stderr
    assert "no metric is common to all runs" in done.stderr
    alone = report(empty, "--out", tmp_path / "none")
    assert isinstance(alone.exception, ReportError)
    assert "required metrics of a training run, found something/else." in str(alone.exception)
    assert not (tmp_path / "none").exists()


def test_what_is_no_number_is_in_the_page(tmp_path: Path) -> None:
    values = [0.1, math.nan, math.inf, 0.2, -math.inf, 0.3]
    path = tmp_path / "run.jsonl"  # Python's own json writes NaN and Infinity
    path.write_text("".join(json.dumps({"step": i, "data": {"reward": v}}) + "\n" for i, v in enumerate(values)))
    done = report(path, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    found = drawn((tmp_path / "out" / "report.html").read_text())["Reward of the training batch"]
    assert found["y"] == [0.1, None, None, 0.2, None, 0.3]
    assert [text for _, text in found["customdata"]] == ["0.1", "NaN", "Infinity", "0.2", "-Infinity", "0.3"]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())[0]["reward_best"] == 0.3


@pytest.mark.parametrize(
    ("module", "says", "left"),
    [
        ("matplotlib.figure", "pictures need matplotlib", {"report.html"}),
        ("plotly.offline", "report.html needs plotly", {"learning.png", "mismatch.png", "time.png", "scales.png"}),
    ],
)
def test_what_needs_a_library_that_is_missing_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, says: str, left: set[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    done = report(write_run(tmp_path / "run.jsonl", 0.0), "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert says in done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"summary.json"} | left


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    steps, spike = 30_000, 17_017
    path = tmp_path / "run.jsonl"
    with path.open("w") as file:
        for s in range(steps):
            values = {name: random.random() for name in ("critic/score/mean", "jetrl/ess", "timing_s/step")}
            if s == spike:
                values["critic/score/mean"] = 99.5
            file.write(json.dumps({"step": s, "data": values}) + "\n")
    done = report(path, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "out" / "report.html").read_text()
    assert len(page) - len(script()) < 1_000_000
    found = drawn(page)["Reward of the training batch"]
    assert len(found["x"]) <= 600
    assert found["y"][found["x"].index(spike)] == 99.5


def test_watching_waits_for_a_run_follows_it_and_ends_with_the_finished_page(tmp_path: Path) -> None:
    path, page = tmp_path / "run.jsonl", tmp_path / "out" / "report.html"
    looks: list[str] = []

    def sleep(seconds: float) -> None:
        looks.append(page.read_text() if page.exists() else "")
        if len(looks) <= 2:
            write_run(path, 0.0, steps=len(looks))
        if len(looks) == 4:
            raise KeyboardInterrupt

    console = Console(width=200, record=True, file=StringIO())
    warnings = Console(width=200, record=True, file=StringIO())
    watch([str(path)], tmp_path / "out", "title", 7, console, warnings, sleep)
    assert [len(drawn(text)["Reward of the training batch"]["x"]) if text else 0 for text in looks] == [0, 1, 2, 2]
    assert '<meta http-equiv="refresh" content="7">' in looks[-1]
    said = console.export_text()
    assert said.count(" step ") == 2 and "run step 1" in said  # nothing is said or written while the file stays as it is
    assert warnings.export_text().count("waiting: ") == 1
    assert 'http-equiv="refresh"' not in page.read_text()
    assert (tmp_path / "out" / "learning.png").exists()
    assert not list((tmp_path / "out").glob(".*"))


def test_the_newest_metrics_for_prometheus(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    exact, usual = write_run(tmp_path / "exact.jsonl", 0.0), write_run(tmp_path / "usual.jsonl", 1e-3, steps=4)
    file = tmp_path / "jetrl.prom"
    done = report(exact, f"a run={usual}", "--out", tmp_path / "out", "--prometheus", file)
    assert done.exit_code == 0, done.output
    found = {
        (sample.name, sample.labels["run"]): sample.value
        for family in text_string_to_metric_families(file.read_text())
        for sample in family.samples
    }
    assert found["jetrl_step", "exact"] == 5 and found["jetrl_step", "a run"] == 3
    assert found["jetrl_logp_abs_diff_mean", "exact"] == 0 and found["jetrl_logp_abs_diff_mean", "a run"] == 4e-3
    assert found["jetrl_scale_model_layers_0_q_proj_saturation", "exact"] == 5e-3
    refused = report(exact, "--out", tmp_path / "out", "--prometheus", tmp_path / "missing" / "jetrl.prom")
    assert refused.exit_code != 0
