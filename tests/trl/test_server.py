"""TRL's trainers with vLLM's server, a process of its own: whole runs on the CPU, and servers that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trl import LIMIT, LORA, needs_trl, run_python, train
from tests.trl.serving import serving
from tests.trl.test_runs import EXACT, SCRIPT, assert_exact, steps_of

pytestmark = [needs_trl, pytest.mark.e2e, pytest.mark.pins, pytest.mark.timeout(3 * LIMIT)]


def test_a_server_is_exact_and_serves_one_run_after_the_other(tmp_path: Path) -> None:
    """Its evaluations, too. The second run begins with weights that the first has left in the server."""
    with serving(tmp_path, JETRL_PRECISION="fp8-unified") as (server, _):
        evaluates = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8}
        log = train(tmp_path, EXACT, {**server, **evaluates})
        steps = steps_of(log, 3)
        for line in steps:
            assert_exact(line)
            assert line["jetrl/audited_tokens"] == line["jetrl/tokens"]
        for line in steps[:2]:  # the evaluation has synced for the last one
            assert line["jetrl/quantized_layers"] == 28 and 0 < line["jetrl/sync_bytes"] <= 0.55 * line["jetrl/sync_bytes_bf16"]
        evaluations = [line for line in log if "eval_loss" in line]
        assert evaluations
        for line in evaluations:
            assert line["eval_jetrl/bit_equal_fraction"] == 1.0 and line["eval_jetrl/tokens"] > 0
        again = {**server, "rloo": True, "lora": LORA, "fsdp2": {}, "learning_rate": 1e-2, "max_steps": 2}
        for line in steps_of(train(tmp_path, EXACT, again, ranks=2), 2):
            assert_exact(line)


def test_a_server_with_two_ranks_and_one_that_dies_in_a_sync(tmp_path: Path) -> None:
    with serving(tmp_path, "--tensor-parallel-size", "2", JETRL_PRECISION="fp8-unified") as (server, group):

        def fails(plugin: dict[str, Any], settings: dict[str, Any]) -> str:
            done = run_python(tmp_path, SCRIPT, json.dumps(plugin), json.dumps(settings))
            assert done.returncode != 0, done.stderr[-3000:]  # gloo ends a process with a transfer under way by a signal
            return done.stderr

        said = fails(EXACT, server)
        assert "ConfigError: vllm_tensor_parallel_size with the vLLM server at " in said
        assert "required 2, as it has, found 1. Set it to 2." in said
        found = "required precision='fp8-rollout', align='', found precision='fp8-unified', align='exact'."
        assert found in fails({"precision": "fp8-rollout"}, server)
        settings = {**server, "vllm_tensor_parallel_size": 2}
        for line in steps_of(train(tmp_path, EXACT, {**settings, "max_steps": 2}), 2):
            assert_exact(line)
        assert "SyncError: the vLLM worker failed or died during a weight sync" in fails(EXACT, {**settings, "kill": group})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, "NotPatchedError: the vLLM server at {}: required workers with jetrl_patch, found HTTP status 500"),
        ({"JETRL_PRECISION": "fp8-unified", "VLLM_SERVER_DEV_MODE": "0"},
         "ConfigError: the vLLM server at {}: required its development endpoints, found none."),
    ],
)  # fmt: skip
def test_a_server_that_does_not_fit_is_an_error_before_the_first_step(
    tmp_path: Path, environ: dict[str, str], says: str
) -> None:
    with serving(tmp_path, **environ) as (server, _):
        done = run_python(tmp_path, SCRIPT, json.dumps(EXACT), json.dumps(server))
        assert done.returncode == 1 and says.format(server["vllm_server_base_url"]) in done.stderr, done.stderr[-3000:]
