"""The progress of ``jetrl parity``: a process for each mode reports its stages, and the command shows them on stderr."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jetrl_patch import Config, progress
from jetrl_patch.cli.parity import cli, run
from jetrl_patch.cli.parity.run import relayed
from jetrl_patch.cli.parity.score import score
from jetrl_patch.measure.parity import Job, Sample, Sampled
from jetrl_patch.progress import Progress

from .. import models
from ..test_progress import Recorded, stages

#: a process that reports two stages but not its end, like one that is killed
CHILD = """
import sys
from jetrl_patch.cli.parity.run import Sender
with open(sys.argv[1], "a", buffering=1) as file:
    sender = Sender(file)
    sender.stage("loading the engine")
    sender.stage("sampling", 2048, "tokens")
    sender.done(1024)
    file.write('["cut o')
"""
SAMPLES = [Sample([1, 2, 3], [4, 5], [-1.0, -1.0]) for _ in range(20)]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A mode that enables nothing, so that this process can load the trainer's model."""
    config = Config(precision="bf16").resolved()
    return Job(model=models.save(tmp_path / "m", "qwen3", steps=0), config=config, stock="bfloat16")


def test_what_a_process_reports_is_shown_by_the_one_that_started_it(tmp_path: Path) -> None:
    seen = Recorded()
    with relayed(tmp_path / "stages", seen):
        subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "stages")], check=True)
    assert seen.calls == [("loading the engine", 0, ""), ("sampling", 2048, "tokens"), 1024]


def test_a_process_without_a_report() -> None:
    seen = Recorded()
    with relayed(Path("/nowhere"), seen):
        pass
    assert seen.calls == []


def test_the_trainer_counts_its_batches(job: Job) -> None:
    seen = Recorded()
    score(job, SAMPLES, seen)
    assert seen.calls == [("loading the trainer's model", 0, ""), ("scoring", 3, "batches"), 1, 2, 3]
    seen = Recorded()
    score(replace(job, cost=True), SAMPLES, seen)
    assert seen.calls[5:] == [("timing the trainer", 3, "batches"), 1, 2, 3]


def test_a_measurement_names_its_stages(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    class Rollout:
        @staticmethod
        def sample(job: Job, progress: Progress) -> Sampled:
            progress.stage("sampling", 1, "batches")
            return Sampled(SAMPLES)

    monkeypatch.setattr(run.registry, "rollout", Rollout)
    seen = Recorded()
    run.measure(job, seen)
    named = [call[0] for call in seen.calls if isinstance(call, tuple)]
    assert named == ["loading torch", "sampling", "loading the trainer's model", "scoring"]


@pytest.mark.e2e
def test_the_process_of_a_mode_reports(job: Job) -> None:
    """The real process, up to its first error: there is no such model."""
    seen = Recorded()
    with pytest.raises(Exception, match="nowhere"):
        run.run_mode(replace(job, model="nowhere"), progress=seen)
    named = [call[0] for call in seen.calls if isinstance(call, tuple)]
    assert named == ["starting a process", "loading torch", "loading the engine"]


def test_the_command_shows_the_stages_of_every_mode(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_mode(job: Job, verbose: bool, progress: Progress) -> dict[str, Any]:
        progress.stage("scoring", 4, "batches")
        figures = dict.fromkeys(("logp_abs_diff_mean", "logp_abs_diff_max", "k3_kl"), 0.0)
        precision, align = job.label
        more = {"tokens": 10, "bit_equal_fraction": 1.0, "route_mismatch": None, "cut_layers": []}
        return {"precision": precision, "align": align, **figures, **more}

    monkeypatch.setattr(progress, "SOON", 0.0)
    monkeypatch.setattr(cli, "run_mode", run_mode)
    assert cli.main(["--model", job.model, "--precision", "bf16", "fp8-unified", "--stock", "bfloat16"]) == 0
    said = capsys.readouterr()
    assert stages(said.err, "parity") == [
        "checking the model and the settings",
        "scoring (stock bfloat16, 1 of 3): 0 of 4 batches",
        "scoring (bf16, 2 of 3): 0 of 4 batches",
        "scoring (fp8-unified/exact, 3 of 3): 0 of 4 batches",
    ]
    assert "rollout vs. trainer" in said.out and "elapsed" not in said.out


def test_a_mode_that_takes_long_is_named_while_it_runs(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process says nothing for a while, as an engine that compiles."""

    def child(*_: object, **__: object) -> None:
        time.sleep(1.5)
        said = stages(capsys.readouterr().err, "parity")
        assert said[-1] == "starting a process (bf16, 1 of 1)"
        raise KeyboardInterrupt

    monkeypatch.setattr(run.subprocess, "run", child)
    with pytest.raises(KeyboardInterrupt):
        cli.main(["--model", job.model, "--precision", "bf16"])
