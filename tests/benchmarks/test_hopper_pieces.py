"""The pieces of ``make hopper``, on a CPU: what each part measures and promises."""

from __future__ import annotations

import math
import os
import sys
import types
from pathlib import Path

import pytest

from benchmarks.hopper import parity, rollout, sync, tests, training
from benchmarks.hopper.plan import Setup

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("name", "share", "verdict"), [("exact, eager; 64", 1.0, "met"), ("exact, eager; 64", 0.99, "MISSED"),
                                                        ("linear; 64", 0.4, "")])  # fmt: skip
def test_parity_promises_every_token(tmp_path, monkeypatch, name, share, verdict):
    found = dict.fromkeys(("tokens", "backend", "attention", "logp_abs_diff_mean", "logp_abs_diff_max"), 0)
    asked = []
    monkeypatch.setattr(parity, "run_mode", lambda job: asked.append(job) or found | {"bit_equal_fraction": share})
    (row,) = parity.measure(name, Setup(False, tmp_path, share=0.4))
    assert row["verdict"] == verdict and row["bit-equal"] == share
    (job,) = asked
    assert job.batch == 64 and job.tokens == 64 * 2048
    assert job.engine == (("gpu_memory_utilization", 0.4), ("kv_cache_memory_bytes", parity.CACHE))


def test_ratios_are_to_what_was_measured_before(monkeypatch):
    monkeypatch.setattr(training, "_measure", lambda mode, variant, setup: {"step ms": 3.0})
    earlier = ({"mode": "BF16", "sequences": "long", "step ms": 6.0}, {"mode": "BF16", "sequences": "short", "step ms": 9.0})
    (row,) = training.measure("exact; long", Setup(False, Path(), earlier=earlier))
    assert row["BF16 / this"] == 2.0
    assert math.isnan(training.measure("exact; long", Setup(False, Path()))[0]["BF16 / this"])
    assert training.measure("BF16; long", Setup(False, Path()))[0]["BF16 / this"] == 1.0
    (row,) = sync.measure(sync.FP8, Setup(True, Path(), earlier=({"sync": sync.PLAIN, "GB": 1.0, "seconds": 1e9},)))
    assert row["seconds / plain"] < 1 and row["GB"] == row["GB / plain"]


SUITE = """
import os, pytest
@pytest.mark.parametrize("n", [0, 1, 2])
def test_crash(n):
    if n == 1: os._exit(7)
@pytest.fixture
def left():
    yield
    raise ValueError("at its end")
def test_end(left): pass
@pytest.mark.parametrize("n", [0, 1])
def test_fails(n): assert n == 1, "wrong"
def test_xfail(): pytest.xfail("as declared")
@pytest.mark.xfail(strict=True)
def test_strict(): pass
def test_skips(): pytest.skip("not tried, te: old; older")
"""



def outcomes(tmp_path, test):
    (row,) = tests.measure(test, Setup(False, tmp_path))
    return row


def test_each_function_is_told_although_others_end_the_process(tmp_path):
    """Expected failures are not skips. The error of a function that ends its process has pytest's output."""
    file = tmp_path / "test_suite.py"
    file.write_text(SUITE)
    names = ("test_end", "test_fails", "test_xfail", "test_strict", "test_skips")
    found = {name: outcomes(tmp_path, f"{file}::{name}") for name in names}
    assert {name: tuple(row[each] for each in ("passed", "failed", "refused", "skipped")) for name, row in found.items()} == {
        "test_end": (0, 1, 0, 0), "test_fails": (1, 1, 0, 0), "test_xfail": (0, 0, 1, 0), "test_strict": (0, 1, 0, 0),
        "test_skips": (0, 0, 0, 1),
    }  # fmt: skip
    assert found["test_fails"]["failed tests"].startswith("test_fails[0]: AssertionError: wrong")
    assert "at its end" in found["test_end"]["failed tests"]
    assert found["test_skips"]["why skipped"] == "not tried, te: old; older"
    with pytest.raises(RuntimeError, match=r"(?s)status 7.*test_crash\[0\] PASSED.*test_crash\[1\]"):
        outcomes(tmp_path, f"{file}::test_crash")


CASES = {
    "passes": "<testcase name='p'/>",
    "fails": "<testcase name='f'><failure message='wrong'/></testcase>",
    "refused": "<testcase name='x'><skipped type='pytest.xfail' message='as declared'/></testcase>",
    "no CUDA": "<testcase name='s'><skipped type='pytest.skip' message='no CUDA device'/></testcase>",
    "no te": "<testcase name='t'><skipped type='pytest.skip' message='not tried, te: old'/></testcase>",
}


@pytest.mark.parametrize(
    ("cases", "verdict"),
    [
        (["passes"], "met"), (["passes", "refused"], "met"), (["passes", "no te"], "met"), (["passes", "fails"], "MISSED"),
        (["passes", "no CUDA"], "not measured"), (["passes", "no te", "no CUDA"], "not measured"), (["no te"], "not measured"),
        ([], "not measured"),
    ],
)  # fmt: skip
def test_tests_that_did_not_run_are_no_success(tmp_path, cases, verdict):
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(map(CASES.get, cases))}</testsuite></testsuites>")
    assert tests.outcomes("x", report)["verdict"] == verdict


def test_every_function_is_a_piece():
    found = tests.pieces(False)
    assert len(found) == len(set(found)) > 20 and all((ROOT / name.split("::")[0]).exists() for name in found)


def test_a_file_that_cannot_be_imported_is_an_error(tmp_path):
    (tmp_path / "test_suite.py").write_text("import nothing_of_that_name\ndef test_a(): pass")
    with pytest.raises(RuntimeError, match="nothing_of_that_name"):
        outcomes(tmp_path, str(tmp_path / "test_suite.py"))


def test_an_engine_serves_the_loads_of_its_mode(tmp_path, monkeypatch):
    """Times are medians without the first turn. Decoding takes what all tokens take beyond the first."""
    now, asked, told = [0.0], [], []

    def generate(engine, prompts, tokens, temperature):
        now[0] += (1.0 if tokens == 1 else 3.0) * len(prompts) + (0.0 if len(told) > 1 else 9.0)
        told.append(tokens)

    core = types.SimpleNamespace(shutdown=lambda: told.append("end"))
    engine = types.SimpleNamespace(llm_engine=types.SimpleNamespace(engine_core=core))
    sample = types.SimpleNamespace(build_engine=lambda job, longest: asked.append((job, longest)) or engine, generate=generate)
    monkeypatch.setitem(sys.modules, "jetrl_patch.adapters.vllm.sample", sample)
    monkeypatch.setattr(rollout.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(rollout, "environment", lambda job: dict(os.environ))
    monkeypatch.setitem(rollout.LOADS, "short", ((1, 10, 5), (2, 20, 9)))
    (tmp_path / "qwen3-8b-random").mkdir()
    base = {"mode": rollout.STOCK_BF16, "requests": 2, "prompt": 20, "response": 9, "decode tokens/s": 2.0}
    found = rollout.measure(f"{rollout.STOCK_FP8}; short", Setup(False, tmp_path, share=0.5, earlier=(base,)))
    ((job, longest),) = asked
    assert longest == 29 and job.batch == 2 and ("gpu_memory_utilization", 0.5) in job.engine and told[-1] == "end"
    assert [row["prefill tokens/s"] for row in found] == [10.0, 20.0] and [row["requests"] for row in found] == [1, 2]
    assert [row["decode tokens/s"] for row in found] == [2.0, 4.0]
    assert math.isnan(found[0]["decode, times BF16"]) and found[1]["decode, times BF16"] == 2.0


def test_the_preparation_tries_what_engines_serve_and_what_a_trainer_multiplies(monkeypatch):
    tried, trained = [], []
    monkeypatch.setattr(rollout, "require_row_equality", lambda backend, shape, device, form, layout, most: tried.append(
        (shape, layout and [part.rows for part in layout.parts], most)))  # fmt: skip
    monkeypatch.setattr(rollout, "train", lambda backend, shape, device: trained.append(shape))
    monkeypatch.setattr(rollout, "choose_backend", lambda asked, device: "torch")
    assert rollout.try_linears("auto", "cuda") == "torch"
    assert sorted(tried, key=str) == [
        ((24576, 4096), [12288, 12288], 16384), ((4096, 12288), None, 16384), ((4096, 4096), None, 16384),
        ((6144, 4096), [4096, 1024, 1024], 16384),
    ]  # fmt: skip
    assert sorted(trained) == [(1024, 4096), (4096, 4096), (4096, 12288), (12288, 4096)]
    monkeypatch.undo()
    monkeypatch.setattr(rollout, "ROWS", 3)
    rollout.train("torch", (128, 256), "cpu")
