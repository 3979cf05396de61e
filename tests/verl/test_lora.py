"""LoRA in verl: settings, its FSDP engines under torchrun, and whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetrl_patch import session
from jetrl_patch.adapters.verl import lora
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError
from tests.forks import facts
from tests.models import build, save
from tests.verl.run_verl import A, M, Run, make_task

SCRIPT = Path(__file__).with_name("lora_script.py")
TIMEOUT = 900
QUANTIZED = [Config(precision="fp8-unified"), Config(precision="fp8-rollout"), Config(precision="int8-rollout")]


@pytest.mark.parametrize("config", QUANTIZED, ids=lambda config: config.precision)
def test_the_driver_makes_verl_send_merged_weights(config):
    assert not list(lora.problems({f"{M}.lora_rank": 8}.get, config))
    assert lora.wanted({f"{M}.lora_rank": 8}.get, config) == {f"{M}.lora.merge": True}
    assert not lora.wanted({f"{M}.lora_rank": 0, f"{M}.lora_adapter_path": None}.get, config)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_verls_own_adapters_are_left_alone_where_nothing_is_quantized(precision):
    found = {f"{M}.lora_rank": 8, f"{M}.lora.rank": 8}.get
    assert not list(lora.problems(found, Config(precision=precision))) and not lora.wanted(found, Config(precision=precision))


def test_an_adapter_is_loaded_without_a_rank_in_the_settings(tmp_path):
    """verl 0.9 ignores ``lora_adapter_path`` while ``lora_rank`` is 0, and fails later, in the reference model."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4}))
    for path, rank in ((str(tmp_path), 4), ("hdfs://elsewhere", 1)):
        wanted = lora.wanted({f"{M}.lora_adapter_path": path}.get, QUANTIZED[0])
        assert wanted == {f"{M}.lora.merge": True, f"{M}.lora_rank": rank}
    given = {f"{M}.lora_adapter_path": str(tmp_path), f"{M}.lora_rank": 16}.get
    assert lora.wanted(given, QUANTIZED[0]) == {f"{M}.lora.merge": True}


@pytest.mark.parametrize(
    ("found", "options", "error", "match"),
    [
        ({f"{M}.lora.rank": 8}, {}, ConflictError, r"model\.lora\.rank .*required 0 .*found 8"),
        ({f"{M}.lora_rank": 8, f"{A}.strategy": "megatron"}, {}, ConflictError, r"lora_rank: .*found an adapter with Megatron"),
        ({f"{M}.lora_rank": 8}, {"fp8_all_gather": True}, ConfigError, r"fp8_all_gather with .*lora_rank: required .*found True"),
        ({f"{M}.lora_adapter_path": "x"}, {"invariant_scale": 2.0}, ConfigError, r"invariant_scale with .*lora_adapter_path"),
        ({f"{M}.lora_rank": 8, f"{M}.target_parameters": ["a"]}, {}, ConfigError, r"target_parameters .*required adapters"),
        ({f"{M}.lora_rank": 8, f"{A}.fsdp_config.wrap_policy.min_num_params": 9}, {}, ConfigError, r"min_num_params .*required"),
    ],
)
def test_what_does_not_go_with_adapters_is_one_error(found, options, error, match):
    (problem,) = lora.problems(found.get, Config(precision="fp8-unified", **options))
    assert isinstance(problem, error)
    with pytest.raises(error, match=rf"{match}.*\. [A-Z]"):
        raise problem


def test_critics_and_modes_that_quantize_nothing_keep_verls_layers_and_sync(monkeypatch):
    build_module = lora.build_lora_module(lambda self, module: module)
    send = lora.merged_lora_per_tensor_param(lambda self: "verl's own")
    for precision, engine in (("fp8-unified", SimpleNamespace()), ("bf16", policy := SimpleNamespace(_jetrl=Prepared()))):
        monkeypatch.setattr(session, "active_config", lambda precision=precision: Config(precision=precision))
        assert build_module(engine, "module") == "module" and send(engine) == "verl's own"
    assert policy._jetrl.adapters is None


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_checkpoint_of_another_scaling_is_refused(tmp_path, wrapped):
    (tmp_path / "lora_train_meta.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}))

    def model(alpha):
        peft = SimpleNamespace(peft_config={"default": SimpleNamespace(r=8, lora_alpha=alpha)})
        return SimpleNamespace(_fsdp_wrapped_module=peft) if wrapped else peft

    exact = Config(precision="fp8-unified")
    lora.check_resumed(tmp_path, model(16), exact)
    with pytest.raises(ConfigError, match=r"resuming .*required lora_alpha=32, found lora_alpha=16\. Use the checkpoint's"):
        lora.check_resumed(tmp_path, model(32), exact)
    for config in (Config(precision="fp8-unified", resume_any=True), Config(precision="bf16")):
        lora.check_resumed(tmp_path, model(32), config)
    lora.check_resumed(tmp_path, SimpleNamespace(), exact)
    lora.check_resumed(tmp_path / "elsewhere", model(32), exact)


class Prepared(SimpleNamespace):
    adapters = None


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", steps=2)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A saved adapter of another rank than that of the settings, with rsLoRA's scaling of 2."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    settings = {"r": 4, "lora_alpha": 4, "use_rslora": True, "exclude_modules": r".*layers\.2\..*q_proj"}
    model = get_peft_model(build("qwen3"), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    model.save_pretrained(folder := tmp_path_factory.mktemp("adapter"))
    return str(folder)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("strategy", "ranks", "states", "saved"),
    [
        ("fsdp2", 2, "fp32", False),
        ("fsdp", 1, "fp32", False),
        pytest.param("fsdp", 2, "fp8", False, marks=pytest.mark.slow),
        pytest.param("fsdp2", 1, "8bit", False, marks=pytest.mark.slow),
        pytest.param("fsdp2", 2, "fp32", True, marks=pytest.mark.slow),
    ],
)
def test_the_engine_trains_with_the_weights_that_it_sends(strategy, ranks, states, saved, model_dir, adapter, tmp_path):
    found = facts(SCRIPT, ranks, strategy, model_dir, str(tmp_path), states, *([adapter] if saved else []))
    optimizer = {"fp32": "AdamW", "8bit": "AdamW8bit", "fp8": "AdamWFp8"}[states]
    assert found == {"class": optimizer, "adapters": 20, "tensors": 36 + 20}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


def run(task, *extra, environ=None, **options):
    """Three steps with adapters of rank 8 on every linear layer."""
    words = [f"{M}.lora_rank=8", f"{M}.lora_alpha=16", f"{A}.optim.lr=1e-2", *extra]
    found = Run(task, *words, steps=3, environ={"JETRL_PRECISION": "fp8-unified", **(environ or {})}, **options)
    assert found.wait(TIMEOUT) == 0, found.failure
    assert "actor_rollout_ref.model.lora.merge=True, which was False" in found.text
    steps = found.metrics()
    assert len(steps) == 3, found.failure
    return found, steps


def assert_exact(steps):
    for step in steps:
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["jetrl/logp_abs_diff_max"] == 0.0, steps
        assert step["jetrl/tokens"] >= 16 and step["jetrl/quantized_layers"] == 21


def kl(found):
    """The KL loss against the reference model in each step: 0 until an update has changed the adapters."""
    import re

    return [float(value) for value in re.findall(r"actor/kl_loss:(?:np\.\w+\()?([-\d.e]+)", found.text)]


@pytest.mark.e2e
@pytest.mark.timeout(TIMEOUT + 100)
def test_a_run_with_lora_is_exact_and_its_reference_is_the_model_without(task):
    extra = ["trainer.use_v1=True", f"{A}.use_kl_loss=True", f"{M}.enable_gradient_checkpointing=True"]
    found, steps = run(task, *extra)
    assert_exact(steps)
    first, *later = kl(found)
    assert first == 0.0 and all(value > 0.0 for value in later), kl(found)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize(
    ("extra", "options"),
    [
        (["trainer.use_v1=True", f"{A}.use_kl_loss=True"], {"strategy": "fsdp"}),
        (["trainer.use_v1=False", f"{A}.use_kl_loss=True", f"{M}.enable_gradient_checkpointing=True"], {}),
        (["trainer.use_v1=False", f"{A}.use_kl_loss=True"], {"processes": 2}),
        (["trainer.use_v1=False"], {"processes": 2, "strategy": "fsdp"}),
    ],
    ids=["v1-fsdp1", "v0-fsdp2", "two-ranks-fsdp2", "two-ranks-fsdp1"],
)
def test_runs_with_lora_are_exact(task, extra, options):
    assert_exact(run(task, *extra, **options)[1])


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
def test_delta_syncs_of_merged_adapters_are_exact(task):
    """An update of rank 8 changes few of the merged bytes, so a delta is smaller than a full sync."""
    steps = run(task, "trainer.use_v1=False", f"{A}.optim.lr=1e-5", environ={"JETRL_SYNC": "delta"})[1]
    assert_exact(steps)
    assert all(step["jetrl/sync_bytes_total"] < step["jetrl/sync_bytes_full"] for step in steps)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize(
    "environ", [{"JETRL_ALIGN": "linear"}, {"JETRL_PRECISION": "fp8-rollout"}, {"JETRL_PRECISION": "int8-rollout"}]
)
def test_the_other_quantized_modes_run_with_lora(task, environ):
    for step in run(task, "trainer.use_v1=False", environ=environ)[1]:
        assert 0.0 < step["jetrl/logp_abs_diff_mean"] < 1.0 and step["jetrl/quantized_layers"] == 21
