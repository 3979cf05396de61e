"""Real verl with its Megatron engine and real vLLM rollouts on the CPU: equality of whole runs."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.megatron import environ, needs_megatron
from tests.rescore_script import rescore
from tests.verl import test_delta_runs as delta
from tests.verl.run_verl import A, M, R, Run, make_task
from tests.verl.test_async_runs import APART, DUMPER, SAVE, TOGETHER
from tests.verl.test_latent import END

pytestmark = [needs_megatron, pytest.mark.e2e, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"), fill=True, head_dim=128)


#: two ranks that share heads, and each layer's experts
EXPERTS = [f"{A}.megatron.{kind}={size}" for kind, size in (
    ("tensor_model_parallel_size", 2), ("expert_tensor_parallel_size", 1), ("expert_model_parallel_size", 2),
)]  # fmt: skip
#: two ranks with half of the layers each, beside engines of one
STAGES = (f"{A}.megatron.pipeline_model_parallel_size=2", f"{R}.tensor_model_parallel_size=1")
#: 1,024 tokens a step
BATCH = ("data.train_batch_size=8", f"{A}.ppo_mini_batch_size=8", f"{R}.n=8")


def steps_of(
    task, *extra: str, processes: int = 1, steps: int = 3, layers: int = 21, audit_fraction: str = "0.0625"
) -> list[dict[str, float]]:
    """The metrics of a run's steps, each of which must be exact."""
    run = Run(
        task, *BATCH, *extra, strategy="megatron", processes=processes, steps=steps,
        environ={"JETRL_PRECISION": "fp8-unified", "JETRL_AUDIT_FRACTION": audit_fraction, **environ()},
    )  # fmt: skip
    assert run.wait(900) == 0, run.failure
    found = run.metrics()
    assert len(found) == steps, run.failure
    assert sum(step["jetrl/tokens"] for step in found) > 2000
    for step in found:
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["jetrl/logp_abs_diff_max"] == 0.0, found
        assert step["jetrl/quantized_layers"] == layers and step["jetrl/sync_bytes"] <= 0.55 * step["jetrl/sync_bytes_bf16"]
    return found


def test_tensor_parallelism_and_a_reference_model(task):
    """Old log-probs are not computed again, so the losses compare every token. From hidden states, without all logits."""
    extra = [f"{A}.megatron.tensor_model_parallel_size=2", f"{A}.use_kl_loss=True", f"{R}.temperature=0.7"]
    extra += [f"{M}.use_fused_kernels=True"]
    found = steps_of(task, *extra, "trainer.use_v1=False", processes=2)
    assert all(step["jetrl/audited_tokens"] == step["jetrl/tokens"] for step in found)


@pytest.mark.slow
def test_v1_entropy_and_a_wider_rollout(task):
    extra = [f"{A}.entropy_coeff=0.01", f"{R}.tensor_model_parallel_size=2", "trainer.use_v1=True"]
    steps_of(task, *extra, f"{M}.use_remove_padding=False", processes=2)


@pytest.mark.slow
def test_samples_that_leave_out_tokens(task):
    """Two updates in each step, and a pass for old log-probs over all samples."""
    extra = [f"{A}.megatron.tensor_model_parallel_size=2", f"{A}.ppo_mini_batch_size=4", f"{A}.entropy_coeff=0.01"]
    limits = [f"{R}.top_p=0.95", f"{R}.top_k=50", f"{R}.temperature=0.8"]
    steps_of(task, *extra, *limits, processes=2, audit_fraction="1.0")


@pytest.mark.slow
def test_experts_that_trainer_and_rollout_split(tmp_path):
    """Two training ranks, and an engine of two ranks, with half of the experts each."""
    folder = make_task(tmp_path, "qwen3_moe", fill=True, head_dim=128)
    steps_of(folder, *EXPERTS, f"{R}.expert_parallel_size=2", processes=2, layers=84)


@pytest.mark.slow
def test_latent_attention(tmp_path):
    """Two training ranks that share heads and experts, and an engine of two ranks."""
    folder = make_task(tmp_path, "deepseek_v3", fill=True, tokens=(END,), n_shared_experts=2)
    steps_of(folder, *EXPERTS, f"{R}.expert_parallel_size=2", processes=2, layers=69)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "size"), [("fp8-rollout", 1.0), ("int8-rollout", 0.55)])
def test_only_the_rollout_is_quantized(tmp_path, precision, size):
    """The layers are Megatron's local ones, which take no packed sequences, and which Megatron-Bridge loads for Llama only."""
    task = make_task(tmp_path, "llama", fill=True, head_dim=128)
    layers = f"+{A}.megatron.override_transformer_config"
    extra = [
        f"{M}.use_remove_padding=False", f"{A}.megatron.tensor_model_parallel_size=2", f"{A}.megatron.sequence_parallel=False",
        *(f"{layers}.{fusion}=False" for fusion in ("apply_rope_fusion", "persist_layer_norm", "gradient_accumulation_fusion")),
    ]  # fmt: skip
    run = Run(
        task, *BATCH, *extra, strategy="megatron", processes=2, steps=3, environ={"JETRL_PRECISION": precision, **environ()}
    )
    assert run.wait(900) == 0, run.failure
    for step in run.metrics():
        assert step["jetrl/bit_equal_fraction"] < 0.1 and 1e-3 < step["jetrl/logp_abs_diff_mean"] < 0.5
        assert step["jetrl/quantized_layers"] == 21 and step["jetrl/sync_bytes"] <= size * step["jetrl/sync_bytes_bf16"]


@pytest.mark.slow
def test_stages(task):
    extra = [*STAGES, f"+{A}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=1"]
    extra += [f"{A}.megatron.vanilla_mbridge=True"]
    steps_of(task, *extra, processes=2)


@pytest.mark.slow
def test_context_parallelism(task):
    steps_of(task, f"{A}.megatron.context_parallel_size=2", f"{R}.tensor_model_parallel_size=1", processes=2)


def run_scored_again(task, folder, *extra: str, hook: str = "", **variables: str) -> list[dict[str, float]]:
    """The metrics of six steps whose samples may be older than the trainer's weights. Each sample is scored again by the exact
    Hugging Face model of the version that made it."""
    (folder / "sitecustomize.py").write_text(hook + DUMPER)
    path = environ()["PYTHONPATH"]
    run = Run(
        task, f"trainer.default_local_dir={folder}", *SAVE, *extra, strategy="megatron", steps=6,
        environ={"JETRL_PRECISION": "fp8-unified", "PYTHONPATH": f"{folder}:{path}", "SAMPLES": str(folder), **variables},
    )  # fmt: skip
    assert run.wait(900) == 0, run.failure
    checkpoints = folder / "global_step_{v}" / "actor" / "model" / "huggingface"
    tokens, equal, versions, late = rescore(folder, 0, task / "model", str(checkpoints))
    assert equal == tokens >= 500 and versions >= 3 and late > 0
    assert len(run.metrics()) == 6
    return run.metrics()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [TOGETHER, APART], ids=["colocate_async", "separate_async"])
def test_samples_are_equal_under_the_version_that_made_them(task, tmp_path, mode):
    for step in run_scored_again(task, tmp_path, *mode):
        assert step.get("jetrl/bit_equal_fraction_current", 1.0) == 1.0 and step["jetrl/sync_bytes"] > 0


@pytest.mark.slow
def test_delta_syncs_of_two_stages(tmp_path):
    """Two stages, each with half of the layers, beside their engines, which have forgotten the base at the third sync."""
    task = delta.add_hook(make_task(tmp_path, fill=True, head_dim=128, num_hidden_layers=4))
    run = Run(
        task, delta.RATE, *STAGES, strategy="megatron", processes=2, steps=5,
        environ={**delta.DELTA, "RESTARTS": "3", "PYTHONPATH": f"{task / 'hook'}:{environ()['PYTHONPATH']}"},
    )  # fmt: skip
    assert run.wait(900) == 0, run.failure
    delta.assert_deltas(run.metrics(), {3}, steps=5)


@pytest.mark.slow
def test_delta_syncs_to_an_engine_apart(task, tmp_path):
    steps = run_scored_again(
        task, tmp_path, delta.RATE, *APART, hook=f"HIT = {delta.HIT!r}\n{delta.HOOK}", JETRL_SYNC="delta", RESTARTS="3"
    )
    delta.assert_one_sent_everything(steps)


#: stops the process that first sends a part of its second sync
_STOPPER = """
import os, signal, wrapt

@wrapt.when_imported("jetrl_patch.adapters.verl.transport")
def _(module):
    send, sent = module.WatchedSocket.send_pyobj, []
    def send_pyobj(self, obj):
        send(self, obj)
        sent.append(id(self))
        if len(set(sent)) == 2 and sent[-2] == sent[-1]:
            try:
                os.close(os.open(os.environ["STOPPED"], os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            print("STOPPED IN SYNC", os.getpid(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
    module.WatchedSocket.send_pyobj = send_pyobj
"""


@pytest.mark.slow
def test_a_training_rank_killed_during_a_sync_ends_the_run(task, tmp_path):
    """One of two tensor-parallel ranks stops in the middle of a sync, and is then killed."""
    (tmp_path / "sitecustomize.py").write_text(_STOPPER)
    own = {"PYTHONPATH": f"{tmp_path}:{environ()['PYTHONPATH']}", "STOPPED": str(tmp_path / "stopped")}
    run = Run(
        task, f"{A}.megatron.tensor_model_parallel_size=2", strategy="megatron", processes=2, steps=50,
        environ={"JETRL_PRECISION": "fp8-unified", "JETRL_SYNC_TIMEOUT": "20", **own},
    )  # fmt: skip
    run.wait_for(lambda text: "STOPPED IN SYNC" in text, 600)
    os.kill(int(re.findall(r"STOPPED IN SYNC (\d+)", run.text)[-1]), signal.SIGKILL)
    assert run.wait(300) != 0
    assert not any(step["training/global_step"] > 2 for step in run.metrics()), run.text[-3000:]
