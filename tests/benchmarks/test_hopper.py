"""``make hopper`` without a GPU: the plan, the command line, and the dry run."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hopper import __main__ as hopper
from benchmarks.hopper import loop, parity, plan, record, rollout, sync, training
from benchmarks.hopper.plan import ALL, FIRST, PARTS, Step, find, steps

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """A command names folders for compiled kernels in its environment."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in plan.CACHES})


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.hopper", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})


def test_the_plan_needs_the_standard_library_alone():
    code = "import sys; from benchmarks.hopper.__main__ import main; assert not main(['--plan']) and 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [line[2] for line in run.stdout.splitlines()[2:9]] == list("abcdefg") and "estimated" in run.stdout


PLANNED = {part: importlib.import_module(f"benchmarks.hopper.{part.name}").pieces(False) for part in PARTS}


def test_every_piece_is_in_one_step():
    planned = [(part.name, name) for part, names in PLANNED.items() for name in names]
    found = [piece for step in steps(PLANNED) for piece in step.pieces]
    assert sorted(found) == sorted(planned) and len(set(planned)) == len(planned)
    assert steps(PLANNED)[: len(FIRST)] == list(FIRST)  # each of its names is a piece
    chosen = steps({find(["loop"])[0]: ["bf16", "fp8-rollout"]})
    assert [step.pieces for step in chosen] == [(("loop", "bf16"),), (("loop", "fp8-rollout"),)]


def test_the_first_eight_minutes_show_equality_and_the_speed_of_exact_mode():
    """What is compared with BF16 comes right after it. What runs at the same time as others has no figure of speed."""
    assert sum(step.seconds for step in FIRST[:3]) <= 8 * 60
    for number, step in enumerate(FIRST[:5], 1):
        assert f"\n| {number} | {step.seconds / 60:.1f} | " in record.INDEX.read_text()
    equal, served, trained, looped, *_ = FIRST
    assert {part for part, _ in equal.pieces} == {"rollout", "tests", "parity"}
    assert [name for part, name in equal.pieces if part == "rollout"] == [rollout.PREPARATION]
    assert all(parity.LENGTH * int(name.rsplit(";")[1]) >= 20_000 for part, name in equal.pieces if part == "parity")
    assert served.pieces[0][1].startswith(rollout.STOCK_BF16) and served.pieces[1][1].startswith(f"{rollout.GRAPHS};")
    assert trained.pieces[0][1].startswith(training.BASELINE) and [name for _, name in looped.pieces] == ["bf16", loop.EXACT]
    assert [step for step in FIRST if step.together] == [equal]
    modes = dict.fromkeys(name.split("; ")[0] for name in training.pieces(False))
    assert next(iter(modes)) == "BF16" and sync.pieces(False)[0] == sync.PLAIN
    assert set(loop.pieces(False)) == {mode for mode, arm in loop.MODES.items() if arm.router_replay == "none"}


def test_a_baseline_is_of_the_same_command():
    base, ours, other = (("p", name) for name in ("base", "ours", "other"))
    step = Step((base, ours, other), 30.0)
    assert step.left(()) == step and step.left({base, ours, other}).pieces == ()
    assert step.left({base, ours}) == Step((base, other), 20.0)
    assert step.left({ours}).pieces == (base, ours, other)  # what was compared with nothing is measured again
    assert Step((base, ours, other), 30.0, together=True).left({base}) == Step((ours, other), 30.0, together=True)


def test_parts_have_letters_and_names(capsys):
    assert [p.letter for p in find(["g", "tests", "a"])] == ["a", "g"] and len(find([])) == len(PARTS)
    assert hopper.main(["--part", "z"]) == 2 and "no part is called 'z'" in capsys.readouterr().err


def test_without_a_gpu_it_says_so_before_anything_starts(tmp_path):
    run = start("--part", "b", "--out", str(tmp_path / "out"), CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 1 and run.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
    assert "required an NVIDIA GPU with FP8 of compute capability 9.0" in run.stderr and "sees no CUDA device" in run.stderr


@pytest.mark.parametrize(
    ("missing", "asked", "ran", "status"),
    [
        ({"c": "part c: no vllm", "g": "part g: no vllm"}, [], "abdef", 0),
        ({"c": "part c: no vllm"}, ["--part", "c"], "", 1),
        ({"c": "part c: no vllm"}, ["--part", "c", "--part", "b"], "", 1),
        ({ALL: "no GPU"}, [], "", 1),
        ({part.letter: f"part {part.letter}" for part in PARTS}, [], "", 1),
    ],
)
def test_parts_that_can_run_do(tmp_path, monkeypatch, capsys, missing, asked, ran, status):
    done = []
    monkeypatch.setattr(hopper, "in_a_process", lambda *_: missing)
    monkeypatch.setattr(hopper.Run, "measure", lambda self, parts: done.extend(part.letter for part in parts) or True)
    assert hopper.main([*asked, "--out", str(tmp_path / "out"), "--scratch", str(tmp_path)]) == status
    said = capsys.readouterr()
    assert "".join(done) == ran
    assert all(text in (said.out if ran else said.err) for text in missing.values())
    assert not ran or said.out.count("not run: part") == len(missing)


@pytest.mark.parametrize(("words", "backend"), [([], "auto"), (["--without-deep-gemm"], "triton")])
def test_without_deep_gemm_no_engine_uses_it(tmp_path, monkeypatch, words, backend):
    given = []
    monkeypatch.setattr(hopper, "in_a_process", lambda *_: {})
    monkeypatch.setattr(hopper.Run, "measure", lambda self, parts: given.append(self.setup.backend) or True)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "/mine")
    assert hopper.main([*words, "--part", "b", "--out", str(tmp_path), "--scratch", str(tmp_path)]) == 0 and given == [backend]
    folders = {name: os.environ[name] for name in plan.CACHES}
    assert folders.pop("DG_JIT_CACHE_DIR") == "/mine"
    assert all(Path(folder).parent == tmp_path / "compiled" for folder in folders.values()) and len(set(folders.values())) == 3
    names = parity.pieces(False) + rollout.pieces(False)
    for mode in {name.split("; ")[0] for name in names} - {rollout.PREPARATION}:
        job = parity.job(mode, backend)
        assert (job.stock is None) == (mode not in parity.STOCKS)  # without the plugin its settings decide nothing
        if job.stock is None:
            assert job.config.backend == backend and job.config.decode_graphs == mode.startswith(parity.GRAPHS)
            assert job.config.kv_cache == ("fp8" if mode == parity.FP8_CACHE else "auto")


@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "parts",
    [[part for part in PARTS if part.name != "loop"], pytest.param(PARTS, marks=pytest.mark.slow)],
    ids=["without runs of verl", "all"],
)
def test_the_dry_run(tmp_path, parts):
    """Every part runs its own code on this CPU, with real vLLM and verl."""
    chosen = [word for part in parts for word in ("--part", part.letter)]
    run = start("--dry", *chosen, "--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch"))
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    for part in parts:
        found = record.load(tmp_path / "out", part)
        assert found["dry"] and record.state(found) == "done", part.name
        assert all(found["rows"].values()), part.name
        assert "A dry run on a CPU" in (tmp_path / "out" / f"{part.name}.md").read_text()
    assert record.load(tmp_path / "out", find(["parity"])[0])["rows"]["exact, CUDA graphs; 2"][0]["bit-equal"] == 1.0
