"""The runner of demo and compare: its command line, how it follows a run, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from rich.text import Text

from examples.common import runner, show
from examples.common.processes import MARK, Group, temporary_folder
from examples.common.recipe import Arm, Launch
from examples.common.runner import Phases, RunFailedError, ending
from examples.common.tail import Follower
from examples.verl.recipe import Recipe, answers, overrides, step_of
from jetrl_patch.cli.report import Run
from jetrl_patch.errors import ConfigError

EXACT = Arm(precision="fp8-unified")
RECIPE = Recipe(steps=3)

# replaces the trainer's command: logs steps as verl's file logger does, and starts a child in a session of its own
TRAINER = """
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(os.path.join({folder!r}, "tmp"), "w").write(os.environ["TMPDIR"])
open(os.path.join({folder!r}, "child"), "w").write(str(child.pid))
out = open(os.environ["VERL_FILE_LOGGER_PATH"], "w")
for step in range({steps} + 1):
    data = {{"jetrl/tokens": 10, "critic/score/mean": 0.5, "jetrl/logp_abs_diff_max": {largest},
             "jetrl/bit_equal_fraction": 1.0}} if step else {{"val-core/words/reward/mean@1": 0.3}}
    out.write(json.dumps({{"step": step, "data": data}}) + chr(10)); out.flush()
{end}
"""


def trainer(monkeypatch: pytest.MonkeyPatch, folder: Path, steps: int = 3, largest: float = 0.0, end: str = "") -> None:
    code = TRAINER.format(folder=str(folder), steps=steps, largest=largest, end=end)
    launch = Recipe.launch

    def start_the_other(self: Recipe, *args: Path) -> Launch:
        return dataclasses.replace(launch(self, *args), command=[sys.executable, "-c", code])

    monkeypatch.setattr(Recipe, "launch", start_the_other)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def run(folder: Path, arm: Arm = EXACT) -> int:
    return show.run_all(RECIPE, [arm], folder, "title", "subtitle")


def nothing_left(folder: Path) -> bool:
    """Neither the trainer's child process nor the run's temporary folder."""
    return gone(int((folder / "child").read_text())) and not Path((folder / "tmp").read_text()).exists()


def test_a_run_that_keeps_its_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(monkeypatch, tmp_path)
    assert run(tmp_path) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(s["precision"], s["align"], s["steps"], s["logp_abs_diff_max"]) for s in summary] == [
        ("fp8-unified", "exact", 3, 0.0)
    ]
    assert summary[0]["peak_memory_bytes"] > 0
    assert summary[0]["versions"]["verl"]
    assert (tmp_path / "report.html").exists()
    assert nothing_left(tmp_path)


def test_arms_that_differ_in_the_replay_of_routes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(monkeypatch, tmp_path, largest=1e-3)
    arms = [Arm(precision="fp8-rollout"), Arm(precision="fp8-rollout", router_replay="R3")]
    assert show.run_all(RECIPE, arms, tmp_path, "title", "subtitle") == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(s["steps"], s["router_replay"]) for s in summary] == [(3, ""), (3, "R3")]


def test_an_exact_arm_that_is_not_exact_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(monkeypatch, tmp_path, largest=1e-7)
    assert run(tmp_path) == 1
    assert json.loads((tmp_path / "summary.json").read_text())[0]["logp_abs_diff_max"] == 1e-7


def test_other_arms_promise_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(monkeypatch, tmp_path, largest=1e-3)
    assert run(tmp_path, Arm(precision="fp8-unified", align="linear")) == 0


@pytest.mark.parametrize(
    ("steps", "end", "says"),
    [
        (3, "raise ValueError('out of luck')", "out of luck"),
        (2, "", "required 3 steps, found 2"),
        (2, "os.kill(os.getpid(), 9)", "status -9"),
    ],
)
def test_a_run_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, end: str, says: str
) -> None:
    trainer(monkeypatch, tmp_path, steps=steps, end=end)
    with pytest.raises(RunFailedError, match=says):
        runner.run_arm(RECIPE, EXACT, tmp_path, lambda *_: None, lambda: None)
    assert nothing_left(tmp_path)
    assert run(tmp_path) == 1
    assert (tmp_path / "report.html").exists()  # of the steps that were logged


def test_a_run_that_stalls_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(monkeypatch, tmp_path, end="time.sleep(600)")

    def no_more(*_: object) -> None:
        """Shorten the limit at the first step; a busy machine may take long to reach it."""
        monkeypatch.setattr(runner, "STALL_SECONDS", 3.0)

    with pytest.raises(RunFailedError, match="no step in 3 s"):
        runner.run_arm(RECIPE, EXACT, tmp_path, no_more, lambda: None)
    assert nothing_left(tmp_path)


def test_stopping_by_the_keyboard_ends_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(monkeypatch, tmp_path, end="time.sleep(600)")

    def press() -> None:
        while not (tmp_path / "child").exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    end = Group._end

    def end_while_pressed_again(group: Group, patience: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        end(group, patience)

    monkeypatch.setattr(Group, "_end", end_while_pressed_again)
    # A shell that runs the tests in the background ignores SIGINT, and its children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=press).start()
        assert run(tmp_path) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert nothing_left(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_group_finds_descendants_in_other_sessions_and_weighs_them(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
    code += " start_new_session=True); time.sleep(600)"
    group = Group([sys.executable, "-c", code], dict(os.environ), tmp_path, tmp_path / "log")
    try:
        deadline = time.monotonic() + 500
        while len(group.members()) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        pids = [p.pid for p in group.members()]
        assert len(pids) == 2
        assert group.weigh() == group.peak_memory_bytes > 0
    finally:
        group.end()
    group.end()
    assert all(map(gone, pids))


def test_a_run_within_a_run_ends_with_it(tmp_path: Path) -> None:
    """The inner run has its own session and mark. When the outer one ends, nothing else would end it."""
    code = (
        "import os, sys, time; from pathlib import Path; from examples.common.processes import Group; "
        "inner = Group([sys.executable, '-c', 'import time; time.sleep(600)'], os.environ, Path.cwd(), Path(sys.argv[1]))\n"
        "while not inner.members():  # during its exec a process shows no environment\n"
        "    time.sleep(0.1)\n"
        "print(inner.leader.pid, flush=True); os._exit(0)"
    )
    log = tmp_path / "log"
    group = Group([sys.executable, "-c", code, str(tmp_path / "inner")], os.environ, Path.cwd(), log)
    assert group.leader.wait(60) == 0
    inner = psutil.Process(int(log.read_text()))
    assert inner.environ()["SPT_NOENV"] == "1" and [process.pid for process in group.members()] == [inner.pid]
    group.end()
    assert gone(inner.pid)


def test_on_a_gpu_an_arm_runs_as_its_users_run_it(tmp_path: Path) -> None:
    """vLLM compiles and captures; in exact mode the plugin captures decoding, unless the command asks for eager layers."""
    for precision, align in (("bf16", None), ("fp8-unified", "linear"), ("fp8-unified", "exact")):
        arm = Arm(precision=precision, align=align)
        command = Recipe(device="cuda", gpu_memory_utilization=0.2).launch(arm, tmp_path, Path("t"), tmp_path / "log").command
        assert not any("enforce_eager" in word for word in command)
        assert "actor_rollout_ref.rollout.gpu_memory_utilization=0.2" in command


def test_the_temporary_folder_is_short_and_goes() -> None:
    with temporary_folder() as folder:
        assert len(str(folder)) < 30
        (folder / "file").write_text("")
    assert not folder.exists()


def test_the_follower_reads_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    follower = Follower(path, step_of)
    assert follower.new() == []
    path.write_text('{"step": 0, "data": {"a": 1}}\n{"step": 1, "da')
    assert follower.new() == [(0, {"a": 1})]
    with path.open("a") as file:
        file.write('ta": {}}\n')
    assert follower.new() == [(1, {})]
    assert follower.last == 1


@pytest.mark.parametrize("system", ["", "system\nYou are helpful\n"])
def test_answers_that_changed_come_first(tmp_path: Path, system: str) -> None:
    assert answers(tmp_path / "nothing") == {}
    # question n is right before and after as the letters say
    kinds = ["tt"] * 5 + ["ff"] * 4 + ["ft"] * 4 + ["tf"] * 3
    for step, position in ((0, 0), (5, 0), (10, 1)):
        lines = [
            {
                "input": f"{system}user\nquestion {n}?\nassistant\n",
                "output": f"it is {step}",
                "score": float(kind[position] == "t"),
            }
            for n, kind in enumerate(kinds)
        ]
        (tmp_path / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[step:] + lines[:step]))
    found = answers(tmp_path)
    assert found["answers_changed"] == {"questions": 16, "became_right": 4, "became_wrong": 3}
    assert [(a["question"], a["before_right"], a["after_right"]) for a in found["answers"]] == [
        *((f"question {n}?", False, True) for n in (10, 11, 12)),
        *((f"question {n}?", True, False) for n in (13, 14)),
        ("question 5?", False, False),
    ]
    assert found["answers"][0]["before"] == "it is 0" and found["answers"][0]["after"] == "it is 10"
    assert len(answers(tmp_path, shown=100)["answers"]) == 16


@pytest.mark.parametrize(
    ("arm", "largest", "share", "says"),
    [
        (EXACT, 0.0, 1.0, "every token equal: yes, all 20 tokens of 2 steps, to the last bit"),
        (EXACT, 1e-7, 1.0, "every token equal: no, although it is promised: 2 of 2 steps"),
        (EXACT, 0.0, 0.9996, "no, although it is promised: 2 of 2 steps have unequal tokens, the worst step 99.9% equal ones"),
        (EXACT, None, 1.0, "every token equal: no, although it is promised"),
        (EXACT, 0.0, None, "every token equal: not measured"),
        (Arm(precision="bf16"), 1e-3, 0.02, "no, which this mode does not promise: 2 of 2 steps have unequal tokens"),
    ],
)
def test_the_verdict_is_one_line(arm: Arm, largest: float | None, share: float | None, says: str) -> None:
    data = {"jetrl/tokens": 10, "jetrl/logp_abs_diff_max": largest, "jetrl/bit_equal_fraction": share}
    steps = {step: {name: value for name, value in data.items() if value is not None} for step in (1, 2)}
    line = Text.from_markup(show.verdict(arm, Run("", "", 0, steps))).plain
    assert says in line and "\n" not in line


def test_the_start_is_told_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    phases = Phases(log, [("one", "first"), (r"two \d", "second"), ("three", "third")])
    assert phases.new() == []
    log.write_text("noise\none\none\ntw")
    assert phases.new() == ["first"]
    with log.open("a") as file:
        file.write("o 2\none\n")
    assert phases.new() == ["second"]
    log.write_text(log.read_text() + "three\n")
    assert phases.new() == ["third"] and phases.new() == []
    later = Phases(log, [("zero", "never"), ("three", "last")])
    assert later.new() == ["last"]  # skipped milestones are not reported


def test_a_run_tells_its_start_and_its_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(monkeypatch, tmp_path)
    said = Console(width=150, record=True, file=StringIO())
    monkeypatch.setattr(show, "console", said)
    assert run(tmp_path) == 0
    text = said.export_text()
    assert "starting Ray, then the trainer and vLLM" in text
    assert "every token equal: yes, all 30 tokens of 3 steps" in text


def test_the_ending_of_a_log_starts_at_its_last_traceback(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert ending(log) == ""
    log.write_text("a\nTraceback (most recent call last):\n  first\nb\nTraceback (most recent call last):\n  second\n")
    assert ending(log) == "Traceback (most recent call last):\n  second"


def test_names_of_arms() -> None:
    assert EXACT.exact
    assert EXACT.name == "fp8-unified/exact, seed 0"
    assert EXACT.slug == "fp8-unified-exact-seed0"
    assert Arm(precision="bf16", seed=3).name == "bf16, seed 3"
    replaying = Arm(precision="fp8-rollout", router_replay="R3")
    assert (replaying.name, replaying.slug) == ("fp8-rollout+R3, seed 0", "fp8-rollout-R3-seed0")
    assert not Arm(precision="fp8-unified", align="linear").exact
    with pytest.raises(ConfigError):
        Arm(precision="bf16", align="exact").config("cpu")


def test_the_environment_carries_the_settings_and_no_foreign_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("JETRL_ALIGN", "linear")
    env = RECIPE.launch(EXACT, tmp_path, Path("/tmp/x"), tmp_path / "log").env
    assert "RAY_ADDRESS" not in env
    assert (env["JETRL_ENABLED"], env["JETRL_PRECISION"], env["JETRL_PLATFORM"]) == ("1", "fp8-unified", "cpu")
    assert env["JETRL_ALIGN"] == ""
    assert env["VERL_FILE_LOGGER_PATH"] == "/tmp/x/steps.jsonl"
    assert MARK not in env
    cuda = Recipe(device="cuda").launch(EXACT, tmp_path, Path("t"), tmp_path / "log")
    assert cuda.env["JETRL_PLATFORM"] == "cuda"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_verl_accepts_every_override(tmp_path: Path, device: Any) -> None:
    """Hydra composes them with verl's own configuration, where an unknown key is an error."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    config = Path(spec.origin).parent / "trainer" / "config"
    given = overrides(Recipe(device=device), EXACT, *(tmp_path / name for name in ("train", "held_out", "answers")))
    code = (
        "import sys, hydra\n"
        "with hydra.initialize_config_dir(sys.argv[1], version_base=None):\n"
        "    c = hydra.compose('ppo_trainer', [o for o in sys.argv[2:] if not o.startswith('hydra.')])\n"
        "print(c.data.train_batch_size, c.actor_rollout_ref.rollout.n, c.trainer.use_v1, list(c.trainer.logger))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(config), *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{Recipe().prompts} {Recipe().samples} True ['console', 'file']"


def test_the_start_says_what_to_expect_of_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show.build, "instruction_set", lambda: "avx2")
    said = show.expected(Recipe(), True, "compiled for avx2")
    assert "compiled for avx2; on two such cores" in said and f"took {Recipe().step_seconds['avx2']} s" in said
    monkeypatch.setattr(show.build, "instruction_set", lambda: "portable")
    assert show.expected(Recipe(), True, "compiled for portable") == "[dim]CPU kernels: compiled for portable[/]"
    assert "slowly.[/] no compiler" in show.expected(Recipe(), False, "no compiler")
