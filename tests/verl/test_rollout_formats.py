"""Real verl with INT8 and per-channel FP8 rollouts, and with QuRL's invariant scale: a few GRPO steps each."""

from __future__ import annotations

import json

import pytest

from tests.verl.run_verl import A, R, Run, make_task
from tests.verl.test_e2e import TIMEOUT, assert_exact, finish

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT + 100)]
INT8 = {"JETRL_PRECISION": "int8-rollout"}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"), fill=True)


def assert_measured(found: list[dict[str, float]]) -> None:
    for step in found:
        assert 1e-4 < step["jetrl/logp_abs_diff_mean"] < 0.2 and step["jetrl/bit_equal_fraction"] < 1.0, found
        assert step["jetrl/quantized_layers"] == 21 and step["jetrl/sync_seconds"] > 0
        assert 0.5 < step["jetrl/sync_bytes"] / step["jetrl/sync_bytes_bf16"] < 0.52


@pytest.mark.slow
def test_int8_with_invariant_scale_v0(task):
    """Two steps: the second sync is smoothed by the activations of the trainer's forward pass."""
    environ = INT8 | {"JETRL_INVARIANT_SCALE": "1.5"}
    assert_measured(finish(Run(task, "trainer.use_v1=False", environ=environ)))


@pytest.mark.slow
def test_int8_v1_fsdp1_with_a_reference_model(task):
    extra = ["trainer.use_v1=True", f"{A}.use_kl_loss=True", f"{R}.temperature=0.7"]
    assert_measured(finish(Run(task, *extra, strategy="fsdp", environ=INT8 | {"JETRL_SMOOTHING": "0.8"})))


@pytest.mark.slow
def test_int8_on_two_ranks_with_tensor_parallel_rollout(task):
    assert_measured(
        finish(Run(task, "trainer.use_v1=False", processes=2, environ=INT8 | {"JETRL_INVARIANT_SCALE": "1.5"}))
    )


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["v0", "v1"])
def test_fp8_per_channel(task, trainer):
    environ = {"JETRL_PRECISION": "fp8-rollout", "JETRL_ROLLOUT_GRANULARITY": "channel"}
    environ |= {"JETRL_SMOOTHING": "0.5", "JETRL_SCALE_FORMAT": "fp32"} if trainer == "v1" else {}
    assert_measured(finish(Run(task, f"trainer.use_v1={trainer == 'v1'}", environ=environ)))


@pytest.mark.slow
def test_the_unified_flow_stays_exact_with_invariant_scale(task):
    environ = {"JETRL_PRECISION": "fp8-unified", "JETRL_INVARIANT_SCALE": "1.5"}
    assert_exact(finish(Run(task, "trainer.use_v1=False", f"{A}.use_kl_loss=True", environ=environ)))


@pytest.mark.slow
def test_a_resumed_run_is_not_scaled_again(tmp_path):
    """Two steps, a checkpoint, a third step in a new run: norms are scaled by 1.5, not by 2.25."""
    import torch
    from safetensors.torch import load_file

    folder = make_task(tmp_path, fill=True)
    environ = INT8 | {"JETRL_INVARIANT_SCALE": "1.5"}
    finish(Run(folder, "trainer.use_v1=False", "trainer.save_freq=2", environ=environ))
    extra = ["trainer.use_v1=False", "trainer.save_freq=1", "trainer.resume_mode=auto"]
    assert_measured(finish(Run(folder, *extra, steps=3, environ=environ), steps=1))
    for step in (2, 3):
        saved = folder / "checkpoints" / f"global_step_{step}" / "actor"
        assert json.loads((saved / "huggingface" / "config.json").read_text())["jetrl_invariant_scale"] == 1.5
        state = torch.load(saved / "model_world_size_1_rank_0.pt", weights_only=False)
        original = load_file(folder / "model" / "model.safetensors")
        for name, factor in (("input_layernorm", 1.5), ("self_attn.q_proj", 1 / 1.5), ("self_attn.o_proj", 1.0)):
            key = f"model.layers.1.{name}.weight"
            weight = state[key]
            weight = getattr(weight, "to_local", lambda weight=weight: weight)()
            ratio = weight.double().norm() / original[key].double().norm()
            assert abs(ratio / factor - 1) < 0.1, (step, key, ratio)
    other = Run(folder, *extra, steps=4, environ=INT8 | {"JETRL_INVARIANT_SCALE": "2.0"})
    assert other.wait(TIMEOUT) != 0
    assert "resuming from" in other.text and "Resume with invariant_scale=1.5" in other.text
