"""TRL's own trainers with real vLLM in their process, on the CPU: equality and figures of whole runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests import fp64
from tests.models import VARIANTS
from tests.trl import LIMIT, LORA, VERSION, ZERO3, needs_trl, run_python, train

EXACT, HALF = {"precision": "fp8-unified"}, {"precision": "fp16"}
#: what leaves out tokens, where it is supported
LIMITS = {"top_p": 0.95, "top_k": 40, "min_p": 0.01} if VERSION and Version(VERSION) >= Version("1.15") else {}
SCRIPT = str(Path(__file__).with_name("script.py"))

#: marks runs that need TRL's own log-probs
needs_their_head = pytest.mark.skipif(
    VERSION.startswith("1.15."), reason="TRL 1.15 computes log-probs by a kernel for GPUs, which exact mode replaces"
)

pytestmark = [needs_trl, pytest.mark.e2e, pytest.mark.pins, pytest.mark.timeout(3 * LIMIT)]


def steps_of(log: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    found = [line for line in log if "grad_norm" in line]
    assert len(found) == steps
    return found


def assert_exact(line: dict[str, Any], prefix: str = "") -> None:
    assert line[f"{prefix}jetrl/bit_equal_fraction"] == 1.0 and line[f"{prefix}jetrl/tokens"] >= 32, line
    assert line[f"{prefix}jetrl/logp_abs_diff_max"] == 0.0
    for name in ("min", "mean", "max"):  # RLOO has none
        assert line.get(f"{prefix}sampling/importance_sampling_ratio/{name}", 1.0) == 1.0


def test_trls_defaults_are_exact_and_a_checkpoint_keeps_the_settings(tmp_path: Path) -> None:
    """FP32 masters, autocast, gradient checkpointing. No pass for old log-probs runs, and every token is compared."""
    found = steps_of(train(tmp_path, EXACT, {"save_strategy": "steps", "save_steps": 2}), 3)
    for line in found:
        assert_exact(line)
        assert line["jetrl/audited_tokens"] == line["jetrl/tokens"]
        assert line["jetrl/quantized_layers"] == 28 and 0 < line["jetrl/sync_bytes"] <= 0.55 * line["jetrl/sync_bytes_bf16"]
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert json.loads((checkpoint / "jetrl.json").read_text())["settings"]["precision"] == "fp8-unified"
    for plugin, ends in ((EXACT, ""), ({"precision": "fp8-rollout"}, "required precision='fp8-rollout'")):
        done = run_python(tmp_path, SCRIPT, json.dumps(plugin), json.dumps({"resume": str(checkpoint)}))
        if ends:
            assert done.returncode == 1 and f"ConfigError: resuming {checkpoint}: {ends}" in done.stderr, done.stderr[-3000:]
        else:
            assert done.returncode == 0, done.stderr[-3000:]
            assert_exact(json.loads((tmp_path / "log.json").read_text())[-2])


@needs_their_head
@pytest.mark.parametrize("rloo", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_without_vllm_nothing_is_compared(tmp_path: Path, rloo: bool) -> None:
    """A precision that only measures leaves such a run alone: transformers generates, with the trainer's own weights."""
    for line in steps_of(train(tmp_path, {"precision": "bf16"}, {"use_vllm": False, "rloo": rloo}), 3):
        assert "jetrl/tokens" not in line and "reward" in line


@pytest.mark.skipif(not LIMITS, reason="needs trl>=1.15")
@pytest.mark.parametrize(
    "given",
    [
        {"vllm_structured_outputs_regex": "[a-z0-9+= ]{6,40}", "top_p": 0.9, "generation_kwargs": {"bad_words": ["1", "="]}},
        pytest.param({"generation_kwargs": {"min_tokens": 5, "stop": ["2", "3"]}}, marks=pytest.mark.slow),
    ],
)
def test_banned_tokens(tmp_path: Path, given: dict[str, Any]) -> None:
    for line in steps_of(train(tmp_path, EXACT, {**given, "beta": 0.04}), 3):
        assert_exact(line)


def test_several_updates_a_reference_model_and_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fp64.environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    settings: dict[str, Any] = {
        **LIMITS,
        "per_device_train_batch_size": 4, "steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2,
        "max_steps": 6, "beta": 0.04, "temperature": 0.8 if Version(VERSION) >= Version("1.14") else 1.0,
        "per_device_eval_batch_size": 8,
        "eval_strategy": "steps", "eval_steps": 3,
    }  # fmt: skip
    log = train(tmp_path, {**EXACT, "audit_fraction": 1.0}, settings)
    found = steps_of(log, 6)
    # 16 samples serve four updates: the pass compares all of them, and the first update its half once more
    for line in (found[0], found[4]):
        everything = 16 * line["completions/mean_length"]
        assert line["jetrl/bit_equal_fraction"] == 1.0 and everything < line["jetrl/tokens"] < 2 * everything
    assert not any("jetrl/tokens" in line for line in (found[1], found[2], found[3], found[5]))
    of_updates = fp64.seen(tmp_path)
    assert of_updates.rows > 500 and of_updates.apart < 1e-5 and (of_updates.kept < 100 or not LIMITS), of_updates
    evaluations = [line for line in log if "eval_loss" in line]
    assert len(evaluations) == 2
    for line in evaluations:
        assert line["eval_jetrl/bit_equal_fraction"] == 1.0 and line["eval_jetrl/tokens"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"deepspeed": ZERO3, "vllm_tensor_parallel_size": 2, **LIMITS},
        {"mask_truncated_completions": True},
        {"fsdp2": {"activation_checkpointing": True}, "gradient_checkpointing": False},
    ],
)
def test_two_ranks(tmp_path: Path, settings: dict[str, Any]) -> None:
    """ZeRO-3 with an engine on both ranks; DDP and FSDP2 with an engine on each."""
    for line in steps_of(train(tmp_path, EXACT, {**settings, "max_steps": 2, "beta": 0.04}, ranks=2), 2):
        assert_exact(line)


def test_adapters_sharded_by_fsdp2(tmp_path: Path) -> None:
    """The layers compute with merged weights, and the reference model is the policy without its adapters."""
    settings = {"fsdp2": {}, "lora": LORA, "learning_rate": 1e-2, "beta": 0.04, "max_steps": 2}
    for line in steps_of(train(tmp_path, EXACT, settings, ranks=2), 2):
        assert_exact(line)
        assert line["kl"] == 0.0 if line["step"] == 1 else line["kl"] > 0.0


def test_rloo_with_adapters_and_several_updates(tmp_path: Path) -> None:
    """TRL drops the rollout's log-probs there. The checkpoint's adapters fit no others."""
    settings = {
        **LIMITS, "rloo": True, "lora": LORA, "learning_rate": 1e-2, "beta": 0.04, "per_device_train_batch_size": 4,
        "steps_per_generation": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 2,
    }  # fmt: skip
    found = steps_of(train(tmp_path, {**EXACT, "audit_fraction": 1.0}, settings), 4)
    for line in (found[0], found[2]):  # the pass compares all samples, and the first update its half once more
        assert_exact(line)
        assert line["jetrl/tokens"] > 8 * line["completions/mean_length"]
    assert not any("jetrl/tokens" in line for line in (found[1], found[3]))
    other = {**settings, "lora": {**LORA, "lora_alpha": 32}, "resume": str(tmp_path / "out" / "checkpoint-2")}
    done = run_python(tmp_path, SCRIPT, json.dumps(EXACT), json.dumps(other))
    assert done.returncode == 1 and "required lora_alpha=32, found lora_alpha=16" in done.stderr, done.stderr[-3000:]


def test_tools_an_environment_and_an_engine_that_sleeps(tmp_path: Path) -> None:
    """A sleeping engine has lost its weights: they are sent again for each turn. Tokens of tools are nobody's."""
    settings = {
        **LIMITS, "tools": True,
        "vllm_enable_sleep_mode": True, "max_completion_length": 60, "vllm_max_model_length": 128, "max_steps": 2,
        "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8,
    }  # fmt: skip
    log = train(tmp_path, EXACT, settings)
    for line in steps_of(log, 2):
        assert_exact(line)
        assert line["tools/call_frequency"] > 0.25 and line["tools/failure_frequency"] == 0.0
        assert line["jetrl/tokens"] == 8 * line["completions/mean_length"]  # of the model's own tokens
    for line in (line for line in log if "eval_loss" in line):
        assert line["eval_jetrl/bit_equal_fraction"] == 1.0 and line["eval_jetrl/tokens"] > 0


def test_a_mixture_that_the_script_has_loaded_with_its_balancing_loss(tmp_path: Path) -> None:
    settings = {"family": "qwen3_moe", "loaded": True, "router_aux_loss_coef": 0.1, "beta": 0.04, "max_steps": 2}
    for line in steps_of(train(tmp_path, EXACT, settings), 2):
        assert_exact(line)
        assert line["aux_loss"] > 1.0 and line["grad_norm"] > 0.0


#: those that no other run has; Granite's logits are divided by a number of its own, which is refused
FAMILIES = sorted({family for family, _ in VARIANTS.values()} - {"granite", "qwen3", "qwen3_moe"})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(tmp_path: Path, family: str) -> None:
    for line in steps_of(train(tmp_path, EXACT, {"family": family, "beta": 0.04, "max_steps": 2}), 2):
        assert_exact(line)


@pytest.mark.slow
def test_adapters_of_a_mixture(tmp_path: Path) -> None:
    lora = {**LORA, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    settings = {"family": "qwen3_moe", "lora": lora, "learning_rate": 1e-2, "beta": 0.04, "max_steps": 2}
    for line in steps_of(train(tmp_path, EXACT, settings), 2):
        assert_exact(line)


def test_a_rank_without_the_plugin_stops_the_run(tmp_path: Path) -> None:
    plugin = json.dumps({**EXACT, "sync_timeout": 30.0})
    done = run_python(tmp_path, SCRIPT, plugin, json.dumps({"half": True}), ranks=2)
    assert done.returncode == 1 and "required jetrl_patch in every rank, found no word from rank 1 in 30 s" in done.stderr


def test_weights_that_change_between_rollout_and_update_stop_the_run(tmp_path: Path) -> None:
    """The comparison that stands for the pass: without it the run would train on log-probs that nobody had checked."""
    done = run_python(tmp_path, SCRIPT, json.dumps(EXACT), json.dumps({"change": 0.5}))
    assert done.returncode == 1 and "AuditError: log-prob of response token 0 of sample 0" in done.stderr, done.stderr[-3000:]


@needs_their_head
def test_a_weight_that_is_nan_stops_the_run_before_an_engine_gets_it(tmp_path: Path) -> None:
    done = run_python(tmp_path, SCRIPT, json.dumps({"precision": "fp8-rollout"}), json.dumps({"change": math.nan}))
    assert done.returncode == 1, done.stderr[-3000:]
    assert "SyncError: model.embed_tokens.weight holds NaN or Inf, so the sync was stopped." in done.stderr


@pytest.mark.slow
def test_a_full_disk_stops_the_run_at_its_checkpoint(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "full": True}
    done = run_python(tmp_path, SCRIPT, json.dumps(EXACT), json.dumps(settings))
    assert done.returncode == 1 and "OSError: [Errno 27] File too large" in done.stderr, done.stderr[-3000:]
    assert not (tmp_path / "log.json").exists() and not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.slow
def test_the_pass_that_is_left_out_would_change_no_weight(tmp_path: Path) -> None:
    import torch

    found = []
    for name in ("rollout", "recompute"):
        settings = {"weights": f"{name}.pt", "max_steps": 2}
        for line in steps_of(train(tmp_path, {**EXACT, "old_log_probs": name}, settings), 2):
            assert_exact(line)
        found.append(torch.load(tmp_path / f"{name}.pt"))
    assert found[0].keys() == found[1].keys() and all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8-rollout", "int8-rollout"])
def test_a_rollout_in_another_precision_is_measured(tmp_path: Path, precision: str) -> None:
    for line in steps_of(train(tmp_path, {"precision": precision}, {"max_steps": 2}), 2):
        assert line["jetrl/bit_equal_fraction"] < 0.1 and 1e-3 < line["jetrl/logp_abs_diff_mean"] < 0.5
        assert line["jetrl/logp_abs_diff_mean"] == pytest.approx(line["sampling/sampling_logp_difference/mean"], rel=1e-4)


@needs_their_head
@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        pytest.param({"beta": 0.04, "lora": LORA}, 1, marks=pytest.mark.slow),
        ({"fsdp2": {}, "gradient_checkpointing": False}, 2),
        pytest.param({"deepspeed": {**ZERO3, "bf16": {"enabled": False}, "fp16": {"enabled": True}}}, 2, marks=pytest.mark.slow),
    ],
)
def test_half_precision_is_closer_than_bf16(tmp_path: Path, settings: dict[str, Any], ranks: int) -> None:
    for line in steps_of(train(tmp_path, HALF, {"fp16": True, "max_steps": 2, **settings}, ranks), 2):
        assert 1e-5 < line["jetrl/logp_abs_diff_mean"] < 3e-3, "BF16 has 0.01"
        assert line["jetrl/loss_scale"] == 2.0**16 and line["jetrl/skipped_steps"] == 0.0 and line["grad_norm"] > 0


@needs_their_head
def test_skipped_steps_of_a_fused_optimizer_are_counted(tmp_path: Path) -> None:
    """A loss of 1e6 overflows FP16's gradients, at a scale of 2^16 and many below it. The weights stay as they were."""
    settings = {"fp16": True, "rloo": True, "beta": 1e6, "learning_rate": 1.0, "num_iterations": 2, "max_steps": 4}
    found = steps_of(train(tmp_path, HALF, settings), 4)
    skipped = [line["jetrl/skipped_steps"] for line in found]
    assert skipped[-1] >= 1 and found[-1]["jetrl/loss_scale"] == 2.0 ** (16 - skipped[-1]), skipped


@pytest.mark.slow
def test_a_weight_that_does_not_fit_stops_the_run(tmp_path: Path) -> None:
    done = run_python(tmp_path, SCRIPT, json.dumps(HALF), json.dumps({"fp16": True, "change": 1e5}))
    assert done.returncode == 1 and "SyncError: model.norm.weight has " in done.stderr, done.stderr[-3000:]


@pytest.mark.slow
def test_corrections_that_trl_lacks_and_has(tmp_path: Path) -> None:
    """TRL's own figures confirm the plugin's; ``geo-mis``, whose bounds no sample of this model keeps, drops everything."""
    plugin = {"precision": "fp8-rollout", "correction": "tis", "correction_bounds": 1.2}
    for line in steps_of(train(tmp_path, plugin, {"max_steps": 2}), 2):
        assert line["sampling/importance_sampling_ratio/max"] == pytest.approx(1.2) and line["jetrl/clipped_fraction"] > 0
        assert line["jetrl/correction_weight_max"] == pytest.approx(1.2) and line["grad_norm"] > 0
        weights = (line["jetrl/correction_weight_mean"], line["sampling/importance_sampling_ratio/mean"])
        assert weights[0] == pytest.approx(weights[1], rel=1e-5)
    for line in steps_of(train(tmp_path, {**plugin, "acr": True}, {"max_steps": 2, "num_iterations": 2}), 2):
        assert line["grad_norm"] > 0
    for line in steps_of(train(tmp_path, {"precision": "fp8-rollout", "correction": "geo-mis"}, {"max_steps": 2}), 2):
        assert line["jetrl/masked_fraction"] == 1.0 and line["grad_norm"] == 0.0


@needs_their_head
def test_linear_alignment_is_measured(tmp_path: Path) -> None:
    """TRL's pass runs, and both see the same difference."""
    for line in steps_of(train(tmp_path, {**EXACT, "align": "linear"}, {"max_steps": 2}), 2):
        assert line["jetrl/bit_equal_fraction"] < 0.1 and 1e-3 < line["jetrl/logp_abs_diff_mean"] < 0.5
        assert line["jetrl/logp_abs_diff_mean"] == pytest.approx(line["sampling/sampling_logp_difference/mean"], rel=1e-4)
        assert "jetrl/audited_tokens" not in line
