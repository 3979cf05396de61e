"""Latent attention in verl: what is accepted, what is refused by name, and a real run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jetrl_patch.adapters.verl import settings
from jetrl_patch.adapters.verl.vision import check_worker
from jetrl_patch.errors import ModelError
from tests import models
from tests.fp8.thresholds import MISMATCH
from tests.verl.run_verl import Run, make_task
from tests.verl.test_delta_nets import PACKED, PADDED, SLICES, M
from tests.verl.test_e2e import TIMEOUT, finish
from tests.verl.test_settings import BF16, EXACT, LINEAR, ROLLOUT

#: verl looks for it in the tokenizer of every model of this type
END = "<\uff5cend\u2581of\u2581sentence\uff5c>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latent")
    models.config_of("deepseek_v3").save_pretrained(path)
    return path


@pytest.mark.parametrize("extra", [PACKED, PADDED])
@pytest.mark.parametrize("config", [LINEAR, ROLLOUT, EXACT])
def test_what_is_accepted(base: Any, folder: Path, extra: str, config: Any) -> None:
    given = base(f"{M}.path={folder}", extra)  # on GPUs
    assert [str(problem) for problem in settings.problems(given, config)] == []
    given = base(f"{M}.path={folder}", extra, "trainer.device=cpu")
    assert [str(problem) for problem in settings.problems(given, config)] == []


@pytest.mark.parametrize(
    ("extra", "config", "says"),
    [
        (SLICES, LINEAR, r"size=2: required whole sequences of a model with latent attention .*deepseek_v3'\. Set it to 1"),
        ((f"{M}.lora_rank=8",), ROLLOUT, r"LoRA with .*required attention that is not latent .*model_type='deepseek_v3'"),
        ((), replace(EXACT, backend="torch"), r"'deepseek_v3': required a CPU, or a GPU .*found cuda with backend='torch'"),
        (("trainer.device=cpu",), replace(EXACT, kv_cache="fp8"), r"'deepseek_v3': required a BF16 cache .*found kv_cache='fp8'"),
    ],
)
def test_what_is_refused(base: Any, folder: Path, extra: tuple[str, ...], config: Any, says: str) -> None:
    given = base(f"{M}.path={folder}", *extra)
    (problem,) = settings.problems(given, config)
    with pytest.raises(ModelError, match=says):
        raise problem
    assert not list(settings.problems(given, BF16))


def test_a_remote_model_is_refused_in_the_worker() -> None:
    model = SimpleNamespace(use_fused_kernels=False, use_remove_padding=True)
    config = models.config_of("deepseek_v3")
    check_worker(config, SimpleNamespace(ulysses_sequence_parallel_size=1, model_config=model), False)
    with pytest.raises(ModelError, match="whole sequences of a model with latent attention"):
        check_worker(config, SimpleNamespace(ulysses_sequence_parallel_size=2, model_config=model), False)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
def test_a_run(tmp_path: Path) -> None:
    """V1, FSDP2, rows that hold several sequences."""
    environ = {"JETRL_PRECISION": "fp8-unified", "JETRL_ALIGN": "linear", "JETRL_MEASURE_ROUTES": "1"}
    task = make_task(tmp_path, "deepseek_v3", fill=True, tokens=(END,))
    steps = finish(Run(task, PACKED, steps=2, environ=environ), 2)
    for step in steps:  # one dense block, then two of eight experts and a shared one
        assert step["jetrl/quantized_layers"] == 3 * 4 + 3 + 2 * (3 + 8 * 3)
        assert 0 < step["jetrl/logp_abs_diff_mean"] < MISMATCH["fp8-unified"], step
        assert step["jetrl/route_mismatch"] < 0.5


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
def test_an_exact_run(tmp_path: Path) -> None:
    """As above, without a difference in any token or route."""
    environ = {"JETRL_PRECISION": "fp8-unified", "JETRL_MEASURE_ROUTES": "1"}
    task = make_task(tmp_path, "deepseek_v3", fill=True, tokens=(END,))
    for step in finish(Run(task, PACKED, steps=3, environ=environ), 3):
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["jetrl/logp_abs_diff_max"] == 0.0
        assert step["jetrl/route_mismatch"] == 0.0 and step["jetrl/tokens"] >= 16
