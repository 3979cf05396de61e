"""LoRA in real OpenRLHF with real vLLM: every token equal, and the adapters alone are trained and saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.openrlhf.run_openrlhf import Run, make_task
from tests.openrlhf.test_e2e import TIMEOUT, UNIFIED, assert_exact, finish

LORA = ["--ds.lora.rank", "8", "--ds.lora.alpha", "32"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT + 100)]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    whole = folder / "out" / "adapter_model.safetensors"
    return load_file(whole) if whole.exists() else torch.load(folder / "out" / "adapter_model.bin")


def test_zero2_trains_and_saves_the_adapters(task):
    extra = ["--actor.gradient_checkpointing_enable", "--train.colocate_all"]
    assert_exact(finish(Run(task, *LORA, *extra, environ=UNIFIED, steps=3), 3))
    saved = adapter(task)
    assert len(saved) == 2 * 21 and all("lora_" in name for name in saved)
    assert all(bool(tensor.any()) for tensor in saved.values())  # B starts at zero


@pytest.mark.slow
@pytest.mark.parametrize("actors", [1, 2])
def test_zero3(task, actors):
    assert_exact(finish(Run(task, *LORA, environ=UNIFIED, stage=3, actors=actors, steps=3), 3))
    assert all(bool(tensor.any()) for tensor in adapter(task).values())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8-rollout", "int8-rollout"])
def test_a_quantized_rollout_alone_gets_merged_weights(task, precision):
    found = finish(Run(task, *LORA, environ=UNIFIED | {"JETRL_PRECISION": precision}, steps=3), 3)
    assert all(0 < step["jetrl/logp_abs_diff_mean"] < 0.3 for step in found)


@pytest.mark.slow
def test_a_run_continues_from_its_checkpoint(task):
    save = ["--ckpt.save_steps", "1"]
    finish(Run(task, *LORA, *save, environ=UNIFIED, checkpoints=True))
    more = [*save, "--ckpt.load_enable", "--train.num_episodes", "2"]
    assert_exact(finish(Run(task, *LORA, *more, environ=UNIFIED, checkpoints=True)))
    other = Run(task, *LORA[:-1], "16", *more, environ=UNIFIED, checkpoints=True)
    assert other.wait(TIMEOUT) == 1 and "lora_alpha" in other.text and "resume_any=True" in other.text
