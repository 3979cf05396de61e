"""``jetrl parity --stock`` and ``--cost``: an unpatched installation, and the cost of each mode."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jetrl_patch import Config, ConfigError, JetrlError
from jetrl_patch.adapters.vllm import sample
from jetrl_patch.cli.parity import cli
from jetrl_patch.config import SETTINGS
from jetrl_patch.measure.parity import STOCK, Job, chosen

from .. import models

FIGURES = {"tokens": 10, "logp_abs_diff_mean": 0.0, "logp_abs_diff_max": 0.25, "k3_kl": 0.0, "bit_equal_fraction": 0.5}
FIGURES |= {"route_mismatch": None}
SPEED: dict[str, Any] = {"rollout_tokens_per_second": 1234.4, "trainer_tokens_per_second": 5678.6, "execution": "compiled"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder, complete enough for the checks before anything is loaded."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model.safetensors").touch()
    return tmp_path


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """A stand-in for the processes of the command; only BF16 and FP16 can run here."""
    found: list[Job] = []

    def run_mode(job: Job, *_: object) -> dict[str, Any]:
        found.append(job)
        if job.stock in ("fp8-online", "batch-invariant"):
            raise JetrlError(f"measuring stock {job.stock} failed: no kernel")
        precision, align = job.label
        slower = {"rollout_tokens_per_second": 617.2, "execution": "eager"} if job.config.exact else {}
        speed = {**SPEED, **slower} if job.cost else {}
        equal = {"bit_equal_fraction": 1.0} if job.config.exact else {}
        return {"precision": precision, "align": align, **FIGURES, **equal, "cut_layers": [], **speed}

    monkeypatch.setattr(cli, "run_mode", run_mode)
    return found


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return re.sub(r"[\s│┃]+", " ", capsys.readouterr().out)


def test_chosen_ways() -> None:
    assert chosen(None) == ()
    assert chosen([]) == tuple(STOCK)
    assert chosen(["float16", "bfloat16", "float16"]) == ("float16", "bfloat16")
    with pytest.raises(ConfigError, match=r"--stock fp4: required one of bfloat16, .*batch-invariant, found 'fp4'"):
        chosen(["bfloat16", "fp4"])


def test_the_ways_that_run_here_are_measured_and_the_others_named(
    folder: Path, jobs: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--model", str(folder), "--stock", "--json", str(folder / "out.json")]) == 0
    assert [job.stock for job in jobs] == list(STOCK)
    assert [job.config.compute_dtype for job in jobs] == ["bfloat16", "float16", "bfloat16", "bfloat16"]
    assert not any(job.promises_equality for job in jobs)
    text = said(capsys)
    assert "bfloat16 stock 10 0 0.25 0 50.00%" in text and "per second" not in text
    assert "stock fp8-online does not run here: measuring stock fp8-online failed: no kernel" in text
    written = json.loads((folder / "out.json").read_text())
    assert [r["precision"] for r in written] == ["bfloat16", "float16"]


def test_a_way_that_was_asked_for_fails_the_command(folder: Path, jobs: list[Job]) -> None:
    with pytest.raises(JetrlError, match="no kernel"):
        cli.main(["--model", str(folder), "--stock", "bfloat16", "fp8-online"])


def test_no_way_that_runs_is_an_error(folder: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(STOCK, "bfloat16")
    monkeypatch.delitem(STOCK, "float16")
    with pytest.raises(JetrlError, match="stock fp8-online does not run here"):
        cli.main(["--model", str(folder), "--stock"])


def test_stock_beside_a_mode_with_the_cost_of_both(folder: Path, jobs: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--model", str(folder), "--stock", "bfloat16", "--align", "exact", "--cost"]) == 0
    assert [(job.stock, job.config.resolved_align) for job in jobs] == [("bfloat16", "none"), (None, "exact")]
    text = said(capsys)
    assert "bfloat16 stock 10 0 0.25 0 50.00%" in text and "fp8-unified exact 10 0 0.25 0 100.00%" in text
    assert "bfloat16 stock compiled 1,234 1.00 5,679 1.00" in text and "fp8-unified exact eager 617 0.50 5,679 1.00" in text
    assert """Each engine runs as in training; all alike, not compiled: --engine '{"enforce_eager": true}'""" in text
    assert cli.main(["--model", str(folder), "--align", "exact", "--cost"]) == 0
    assert "as in training" not in said(capsys)


@pytest.fixture
def engine_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function from a job to the arguments that its engine would get on a GPU, or here."""
    import vllm
    from vllm.platforms import current_platform

    monkeypatch.setattr(vllm, "LLM", lambda **settings: settings)
    monkeypatch.setattr(sample, "_config", lambda _: SimpleNamespace())

    def arguments(job: Job, on_cpu: bool) -> dict[str, Any]:
        monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: on_cpu)
        found: dict[str, Any] = sample.build_engine(job, 128)
        return found

    return arguments


@pytest.mark.parametrize("stock", [None, "bfloat16"])
def test_an_engine_on_a_gpu_leaves_room_for_the_trainer(engine_of: Any, stock: str | None) -> None:
    """Weights on one side, weights and their gradients on the other: a third of the memory, and a cache of a few sequences."""
    job = Job(model="m", config=Config(precision="bf16"), stock=stock)
    assert 1 / 3 < engine_of(job, False)["gpu_memory_utilization"] < 1 / 2
    asked = Job(model="m", config=job.config, stock=stock, engine=(("gpu_memory_utilization", 0.7),))
    assert engine_of(asked, False)["gpu_memory_utilization"] == 0.7
    assert "gpu_memory_utilization" not in engine_of(job, True)


def test_what_is_timed_compiles_as_a_stock_engine_does(engine_of: Any) -> None:
    config = Config(precision="fp8-unified", align="linear")
    for stock in (None, "bfloat16"):
        assert engine_of(Job(model="m", config=config, stock=stock, cost=True), False)["enforce_eager"] is False
    assert engine_of(Job(model="m", config=config), False)["enforce_eager"] is True


def test_the_help_names_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in ("backend", "scale_format", "on_cut"):
        assert f"{', '.join(SETTINGS[name].choices)} (default: {SETTINGS[name].default})" in text


@pytest.mark.e2e
@pytest.mark.slow
def test_an_untouched_installation(tmp_path: Path) -> None:
    """Real vLLM and Hugging Face without a patch, and exact mode, in one table."""
    model = models.save(tmp_path / "m", "qwen3")
    file = tmp_path / "out.json"
    arguments = ["--model", model, "--tokens", "256", "--length", "16", "--json", str(file)]
    assert cli.main([*arguments, "--stock", "bfloat16", "--align", "exact", "--cost"]) == 0
    stock, exact = json.loads(file.read_text())
    assert stock["logp_abs_diff_mean"] > 1e-4 and stock["bit_equal_fraction"] < 1.0
    assert exact["logp_abs_diff_max"] == 0.0
    assert all(row[name] > 0 for row in (stock, exact) for name in ("rollout_tokens_per_second", "trainer_tokens_per_second"))
    assert (stock["execution"], exact["execution"]) == ("compiled", "eager")
