"""Real verl in FP16, with an FP8 KV cache, and with an FP32 ``lm_head``: a few GRPO steps each."""

from __future__ import annotations

import pytest

from tests.verl.run_verl import A, R, Run, make_task
from tests.verl.test_e2e import TIMEOUT, assert_exact, finish

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT + 100)]
FP16 = {"JETRL_PRECISION": "fp16"}
BF16 = {"JETRL_PRECISION": "bf16"}
V0 = "trainer.use_v1=False"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"), fill=True)


def weights_in_16_bits(task) -> int:
    """Bytes of the model's tensors at two bytes per element."""
    from safetensors.torch import load_file

    return sum(2 * weight.numel() for weight in load_file(task / "model" / "model.safetensors").values())


def assert_fp16(task, found: list[dict[str, float]]) -> None:
    """The initial scale, 2^16, may be too large for random weights and is then halved."""
    for step in found:
        assert 0 < step["jetrl/logp_abs_diff_mean"] < 3e-3 and step["jetrl/tokens"] >= 16, found
        assert step["jetrl/sync_bytes_total"] == weights_in_16_bits(task)
        assert step["jetrl/skipped_steps"] <= 2 and step["jetrl/loss_scale"] == 2.0 ** (16 - step["jetrl/skipped_steps"]), found


@pytest.mark.slow
def test_fp16_on_both_sides_v0_fsdp2(task):
    run = Run(task, V0, steps=3, environ=FP16)
    assert_fp16(task, finish(run, 3))
    assert "actor_rollout_ref.rollout.dtype='float16', which was 'bfloat16'" in run.text


@pytest.mark.slow
def test_fp16_v1_fsdp1_with_a_reference_model(task):
    extra = ["trainer.use_v1=True", f"{A}.use_kl_loss=True", f"{R}.temperature=0.7"]
    assert_fp16(task, finish(Run(task, *extra, strategy="fsdp", environ=FP16)))


@pytest.mark.slow
def test_fp16_on_two_ranks_with_tensor_parallel_rollout(task):
    assert_fp16(task, finish(Run(task, V0, processes=2, environ=FP16)))


@pytest.mark.slow
def test_a_checkpoint_beyond_fp16_is_refused_by_name(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_task(tmp_path, fill=True)
    path = folder / "model" / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = 70000.0
    save_file(weights, path, metadata={"format": "pt"})
    run = Run(folder, V0, environ=FP16)
    assert run.wait(TIMEOUT) != 0
    assert "model.layers.1.mlp.up_proj.weight has |w| = 7" in run.text and "does not fit FP16" in run.text


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_overflowing_steps_are_skipped_and_counted(task, tmp_path, strategy):
    """Scale up the loss of the second and third update, so that its gradients overflow at every scale in use.

    A model of random weights may overflow at the first scale, 2^16, too.
    """
    place = tmp_path / "hook"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        """
import wrapt

@wrapt.when_imported("verl.workers.engine.fsdp.transformer_impl")
def _(module):
    forward, step, done = module.FSDPEngineWithLMHead.forward_step, module.FSDPEngine.optimizer_step, []
    def optimizer_step(self):
        norm = step(self)
        done.append(norm)
        return norm
    def forward_step(self, micro_batch, loss_function, forward_only):
        loss, output = forward(self, micro_batch, loss_function, forward_only)
        return loss if forward_only or len(done) not in (1, 2) else loss * 1e30, output
    module.FSDPEngine.optimizer_step = optimizer_step
    module.FSDPEngineWithLMHead.forward_step = forward_step
"""
    )
    run = Run(task, V0, steps=4, strategy=strategy, environ=FP16 | {"PYTHONPATH": str(place)})
    found = finish(run, 4)
    first, *skipped = (step["jetrl/skipped_steps"] for step in found)
    assert first <= 1 and skipped == [first + 1, first + 2, first + 2], found
    assert all(step["jetrl/loss_scale"] == 2.0 ** (16 - step["jetrl/skipped_steps"]) for step in found)
    assert all(0 < step["jetrl/logp_abs_diff_mean"] < 3e-3 for step in found)


@pytest.mark.slow
def test_one_sided_fp16_is_refused(task):
    run = Run(task, V0, f"{R}.dtype=float16", environ=BF16)
    assert run.wait(TIMEOUT) != 0
    assert "required BF16 on both sides" in run.text


@pytest.mark.slow
@pytest.mark.parametrize("environ", [BF16, {"JETRL_PRECISION": "fp8-unified", "JETRL_ALIGN": "linear"}])
def test_fp8_kv_cache(task, environ):
    for step in finish(Run(task, V0, environ=environ | {"JETRL_KV_CACHE": "fp8"})):
        assert 5e-3 < step["jetrl/logp_abs_diff_mean"] < 0.5, step
        assert step["jetrl/bit_equal_fraction"] < 1.0


@pytest.mark.slow
def test_a_wider_head_in_bf16(task):
    plain, wide = (
        [step["jetrl/logp_abs_diff_mean"] for step in finish(Run(task, V0, environ=BF16 | head))]
        for head in ({}, {"JETRL_HEAD_DTYPE": "float32"})
    )
    assert min(wide) > 0 and max(wide) < max(plain) < 0.1, (plain, wide)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["v0", "v1"])
def test_a_wider_head_is_exact(task, trainer):
    environ = {"JETRL_PRECISION": "fp8-unified", "JETRL_HEAD_DTYPE": "float32"}
    extra = [f"trainer.use_v1={trainer == 'v1'}", f"{R}.temperature=0.7", f"{A}.use_kl_loss=True"]
    assert_exact(finish(Run(task, *extra, strategy="fsdp" if trainer == "v1" else "fsdp2", environ=environ)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "environ", [{"JETRL_PRECISION": "fp8-unified", "JETRL_ALIGN": "linear"}, {"JETRL_PRECISION": "int8-rollout"}, FP16]
)
def test_a_wider_head_in_the_other_modes(task, environ):
    for step in finish(Run(task, V0, environ=environ | {"JETRL_HEAD_DTYPE": "float32"})):
        assert 0 < step["jetrl/logp_abs_diff_mean"] < 0.2, step
