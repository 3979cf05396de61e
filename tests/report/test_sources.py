"""Reading the files of runs: every format of both frameworks, run names, and invalid files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jetrl_patch.cli.report import ReportError, collect, read_runs
from jetrl_patch.cli.report.runs import Run
from jetrl_patch.cli.report.sources import RunArgument, find_file, name_runs, openrlhf_step, parse, verl_step
from jetrl_patch.config import Config
from jetrl_patch.trainer import record

STEPS = [{"critic/score/mean": 0.5, "jetrl/k3_kl": 1e-5}, {"critic/score/mean": 0.75, "jetrl/k3_kl": 0.0}]


def write_lines(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def verl_file(path: Path) -> Path:
    return write_lines(path, [{"step": n, "data": data} for n, data in enumerate(STEPS, start=1)])


def test_the_file_of_verls_file_logger(tmp_path: Path) -> None:
    orjson = pytest.importorskip("orjson")  # used by verl's logger: NaN becomes null
    lines = [{"step": 1, "data": {"critic/score/mean": math.nan}}, {"step": 2, "data": {"critic/score/mean": 0.5}}]
    (tmp_path / "run.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    (run,) = read_runs(tmp_path / "run.jsonl")
    first, second = run.reward
    assert first[0] == 1 and math.isnan(first[1])
    assert second == (2, 0.5)


def test_verls_console_log_with_rays_colors_and_prefixes(tmp_path: Path) -> None:
    text = (
        "(TaskRunner pid=7) some text with step: 3 in it\n"
        "\x1b[36m(TaskRunner pid=7)\x1b[0m step:0 - val-core/words/acc/mean@1:np.float64(0.25)\n"
        "\x1b[36m(TaskRunner pid=7)\x1b[0m step:1 - critic/score/mean:0.5 - actor/pg_loss:-1.5e-05 - "
        "a:nan - b:np.float64(inf) - c:-inf - d:np.int32(3)\n"
        "step:2 - critic/score/mean:0.7"  # truncated: it may have been 0.75
    )
    (tmp_path / "run.log").write_text(text)
    notes: list[str] = []
    (run,) = read_runs(tmp_path / "run.log", notes=notes)
    assert run.accuracy == [(0, 0.25)]
    assert run.reward == [(1, 0.5)]
    data = run.steps[1]
    assert data["actor/pg_loss"] == -1.5e-05
    assert math.isnan(data["a"]) and data["b"] == math.inf and data["c"] == -math.inf and data["d"] == 3.0
    assert notes == [f"{tmp_path / 'run.log'}, line 4: truncated; the lines before it are used"]


@pytest.mark.slow  # importing verl
def test_verls_own_console_logger_is_understood() -> None:
    aggregate = pytest.importorskip("verl.utils.logger.aggregate_logger")
    numpy = pytest.importorskip("numpy")
    data = {"a/b": 0.5, "c": numpy.float64(1e-7), "d-e/f@1": numpy.int32(3), "text": "no number", "g": -2}
    found = verl_step(aggregate.concat_dict_to_str(data, step=12))
    assert found == (12, {"a/b": 0.5, "c": 1e-7, "d-e/f@1": 3.0, "g": -2.0})


def test_openrlhfs_log_and_the_launchers_line(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(
        "jetrl: precision fp8-unified, align exact, 77 changes in process 14384, of which 62 wait for an import\n"
        "INFO ppo_trainer.py:600] ✨ Global step 3: {'reward': 0.5, 'timing/step_total': 1.5, 'x': nan}\n"
        "INFO ✨ Evaluation completed in 0:01, global_step 3, eval_metrics: {'eval_words_pass1': 0.25}\n"
    )
    (run,) = read_runs(tmp_path / "run.log")
    assert (run.precision, run.align, run.arm) == ("fp8-unified", "exact", "fp8-unified/exact")
    assert run.reward == [(3, 0.5)]
    assert run.seconds == [(3, 1.5)]
    assert run.accuracy == [(3, 0.25)]
    assert openrlhf_step("Global step 3 of nothing") is None
    text = (tmp_path / "run.log").read_text()
    (tmp_path / "run.log").write_text(
        text.replace("fp8-unified, align exact,", "fp8-rollout, align none, correction tis,")
    )
    assert read_runs(tmp_path / "run.log")[0].arm == "fp8-rollout+tis"


def test_a_flat_history_as_it_is_exported(tmp_path: Path) -> None:
    records = [
        {"_step": 0, "train/global_step": 1, "train/rollout/reward_mean": 0.5, "_runtime": 3.5, "text": "x"},
        {"_step": 1, "train/global_step": 2, "train/rollout/reward_mean": "NaN", "eval/eval_words_pass1": None},
        {"_step": 2, "eval/global_step": 2, "eval/eval_words_pass1": 0.5},
    ]
    (run,) = read_runs(write_lines(tmp_path / "history.jsonl", records))
    assert run.reward[0] == (1, 0.5) and math.isnan(run.reward[1][1])
    assert run.accuracy == [(2, 0.5)]


def test_tensorboards_event_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(log_dir=str(tmp_path / "tb")) as writer:
        for step in (1, 2):
            writer.add_scalar("train/rollout/reward_mean", 0.25 * step, step)
        writer.add_text("train/generated_samples", "text", 1)
    (run,) = collect([str(tmp_path / "tb")], [])
    assert run.reward == [(1, 0.25), (2, 0.5)]
    assert run.label == "tb"


def test_a_step_written_twice_has_the_later_figures(tmp_path: Path) -> None:
    """A run resumed from a checkpoint writes some steps again."""
    records = [{"step": s, "data": {"reward": v}} for s, v in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25))]
    (run,) = read_runs(write_lines(tmp_path / "a.jsonl", records))
    assert run.reward == [(1, 0.1), (2, 0.25), (3, 0.3)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "required at least one step"),
        ('{"step": 1, "da', "line 1: truncated"),
        ('{"hello": 1}\n', 'line 1: required an object with "step" and "data".*found an object with hello'),
        ('{"step": 1.5, "data": {}}\n', "line 1: required an integer step"),
        ('{"_step": "one", "a": 1}\n', "line 1: required an integer step"),
        ("\xff\xfe\x00 no text at all\n", "required at least one step"),
        ("[1, 2]\n", "found list"),
    ],
)
def test_a_file_that_is_no_metrics_file_is_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "run.jsonl").write_text(text)
    if "no text" in text:
        (tmp_path / "run.jsonl").rename(tmp_path / "run.bin")
        (tmp_path / "run.bin").write_bytes(text.encode("latin-1"))
    with pytest.raises(ReportError, match=says):
        collect([str(tmp_path)] if "no text" not in text else [str(tmp_path / "run.bin")], [])


def test_a_folder_without_metrics_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="found nothing"):
        find_file(tmp_path)
    (tmp_path / "config.yaml").write_text("a: 1")
    with pytest.raises(ReportError, match=r"found config\.yaml"):
        find_file(tmp_path)
    verl_file(tmp_path / "one.jsonl")
    assert find_file(tmp_path).name == "one.jsonl"
    verl_file(tmp_path / "two.jsonl")
    with pytest.raises(ReportError, match=r"found one\.jsonl, two\.jsonl. Give the path of the file"):
        find_file(tmp_path)
    verl_file(tmp_path / "metrics.jsonl")
    assert find_file(tmp_path).name == "metrics.jsonl"


def test_a_checkpoint_of_trl(tmp_path: Path) -> None:
    """The newest checkpoint has the log of all steps, and the settings are beside it."""
    for steps in (9, 10):
        folder = tmp_path / f"checkpoint-{steps}"
        folder.mkdir()
        history = [{"step": step, "reward": step / 10, "step_time": 2.0, "jetrl/tokens": 5.0} for step in range(1, steps + 1)]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": [*history, {"step": steps, "eval_reward": 0.5}]}))
        record.write(folder, Config(precision="fp8-rollout", correction="tis"))
    (run,) = collect([str(tmp_path)], [])
    assert (run.precision, run.correction, list(run.steps)) == ("fp8-rollout", "tis", list(range(1, 11)))
    assert run.reward[-1] == (10, 1.0) and run.steps[10]["eval_reward"] == 0.5 and len(run.seconds) == 10
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text("[]")
    with pytest.raises(ReportError, match="required the state of a Trainer, found TypeError"):
        collect([str(tmp_path)], [])


def test_names(tmp_path: Path) -> None:
    first, second = verl_file(tmp_path / "a" / "run.jsonl"), verl_file(tmp_path / "b" / "run.jsonl")
    texts = [str(first), str(second), f"mine={verl_file(tmp_path / 'c' / 'run.jsonl')}"]
    assert [run.label for run in collect(texts, [])] == ["a/run", "b/run", "mine"]
    odd = verl_file(tmp_path / "x=y.jsonl")
    assert parse(str(odd)) == RunArgument(odd)
    for wrong in ("", "=", "name="):
        with pytest.raises(ReportError, match="name=path"):
            parse(wrong)
    with pytest.raises(ReportError, match="found same twice"):
        collect([f"same={first}", f"same={second}"], [])
    with pytest.raises(ReportError, match="are the same file"):
        collect([f"one={first}", f"two={first.parent}"], [])


def test_arms_of_one_file_are_named_by_arm_and_seed(tmp_path: Path) -> None:
    def sources(count: int) -> list[RunArgument]:
        found = [RunArgument(tmp_path / name) for name in ("a", "b")[:count]]
        for source in found:
            source.runs = [Run("bf16", "none", 0), Run("fp8-unified", "exact", 0), Run("fp8-unified", "exact", 1)]
        name_runs(found)
        return found

    assert [r.label for s in sources(1) for r in s.runs] == [
        "bf16", "fp8-unified/exact, seed 0", "fp8-unified/exact, seed 1",
    ]  # fmt: skip
    names = [r.label for s in sources(2) for r in s.runs]
    assert names[0] == "a: bf16" and names[-1] == "b: fp8-unified/exact, seed 1"
    assert len(set(names)) == 6
