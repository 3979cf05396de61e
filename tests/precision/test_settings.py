"""The settings of verl, OpenRLHF and vLLM for FP16, for an FP8 KV cache and for an FP32 head."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from jetrl_patch.adapters.openrlhf import settings as openrlhf
from jetrl_patch.adapters.verl import settings as verl
from jetrl_patch.adapters.vllm import arguments as vllm_arguments
from jetrl_patch.adapters.vllm import engine
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, ModelError
from tests.openrlhf.test_settings import arguments
from tests.verl.conftest import base  # noqa: F401

A, F, R = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
FP16 = Config(precision="fp16")
BF16 = Config(precision="bf16")
LINEAR_HEAD = Config(align="linear", head_dtype="float32")
BF16_HEAD = Config(precision="bf16", head_dtype="float32")
KV = Config(precision="bf16", kv_cache="fp8")


def test_verl_is_set_to_fp16_on_both_sides(base):  # noqa: F811
    found = base()
    verl.prepare(found, FP16)
    ours = found.actor_rollout_ref
    assert ours.rollout.dtype == "float16"
    for side in (ours.actor, ours.ref):
        assert dict(side.fsdp_config.mixed_precision) == {
            "param_dtype": "fp16", "reduce_dtype": "fp32", "buffer_dtype": "fp32",
        }  # fmt: skip
        assert side.fsdp_config.model_dtype == "fp32"
    verl.check(found, FP16)
    assert verl.complete(found, FP16) == []


@pytest.mark.parametrize(
    ("override", "config", "error", "says"),
    [
        (f"{R}.dtype=float16", BF16, ConfigError, "required BF16 on both sides"),
        (f"+{A}.fsdp_config.mixed_precision={{param_dtype: fp16}}", BF16, ConfigError, "required BF16 .*param_dtype=fp16"),
        (f"+{F}.fsdp_config.mixed_precision={{param_dtype: fp16}}", BF16, ConfigError, "required BF16 .*ref.*param_dtype=fp16"),
        (f"+{A}.megatron.dtype=float16", BF16, ConfigError, "required BF16 .*megatron.dtype=float16"),
        (f"+{R}.engine_kwargs.vllm.dtype=half", BF16, ConfigError, "required BF16 on both sides"),
        (f"+{R}.engine_kwargs.vllm.dtype=bfloat16", FP16, ConflictError, "engine_kwargs.vllm.dtype.* Remove it"),
        ("actor_rollout_ref.model.lora_rank=8", FP16, ConfigError, "verl merges adapters in BF16"),
        (f"{A}.strategy=megatron", FP16, ConfigError, "fsdp or fsdp2"),
        (f"{A}.fsdp_config.model_dtype=bf16", FP16, ConfigError, "casts FP32 parameters"),
        (f"{A}.strategy=megatron", BF16_HEAD, ConfigError, "fsdp or fsdp2"),
        ("actor_rollout_ref.model.use_fused_kernels=True", LINEAR_HEAD, ConfigError, "which fused kernels bypass"),
        (f"+{R}.engine_kwargs.vllm.kv_cache_dtype=fp8_e5m2", KV, ConflictError, "kv_cache='fp8'"),
    ],
)
def test_verl_settings_that_are_refused(base, override, config, error, says):  # noqa: F811
    with pytest.raises(error, match=says):
        verl.check(base(override), config)


def test_openrlhf_is_set_to_fp16():
    args = arguments()
    openrlhf.check(args, FP16)
    assert openrlhf.complete(args, FP16) == ["--ds.param_dtype fp16: precision='fp16' uses FP16 on both sides"]
    assert args.ds.param_dtype == "fp16" and openrlhf.complete(args, FP16) == []


@pytest.mark.parametrize(
    ("changes", "config", "says"),
    [
        ({"ds__param_dtype": "fp16"}, BF16, "OpenRLHF's vLLM engines stay in BF16"),
        ({"ds__tensor_parallel_size": 2}, FP16, "supports only BF16"),
        ({"ds__load_in_4bit": True}, FP16, "weights in FP16"),
        ({"ds__ring_attn_size": 2}, FP16, "whole sequences on each rank"),
        ({"ds__use_liger_kernel": True}, LINEAR_HEAD, "logits from lm_head's forward"),
        ({"ds__tensor_parallel_size": 2}, BF16_HEAD, "a whole lm_head on each rank"),
    ],
)
def test_openrlhf_arguments_that_are_refused(changes, config, says):
    with pytest.raises(ConfigError, match=says):
        openrlhf.check(arguments(**changes), config)


def test_a_device_without_an_fp8_kv_cache_stops_the_driver(base, monkeypatch):  # noqa: F811
    monkeypatch.setattr(vllm_arguments, "kv_cache_problem", lambda exact: "a GPU below compute capability 8.9")
    for check in (lambda: verl.check(base(), KV), lambda: openrlhf.check(arguments(), KV), lambda: set_arguments(KV)):
        with pytest.raises(ConfigError, match=r"kv_cache='fp8': .*found a GPU below .* 8\.9. Drop kv_cache"):
            check()


def set_arguments(config: Config, **changes: object) -> SimpleNamespace:
    args = SimpleNamespace(**({"dtype": "bfloat16", "kv_cache_dtype": "auto", "hf_overrides": {}} | changes))
    engine.set_arguments(args, config)
    return args


def test_vllm_arguments(monkeypatch):
    monkeypatch.setattr(vllm_arguments, "kv_cache_problem", lambda exact: "")
    assert vars(set_arguments(BF16)) == {"dtype": "bfloat16", "kv_cache_dtype": "auto", "hf_overrides": {}}
    assert set_arguments(FP16).dtype == "float16"
    assert set_arguments(KV).kv_cache_dtype == "fp8"
    exact = Config(kv_cache="fp8")
    assert set_arguments(exact).kv_cache_dtype == "auto"  # on a CPU the cache holds rounded values
    monkeypatch.setattr(engine, "_on_cpu", lambda: False)
    assert set_arguments(exact, kv_cache_dtype="fp8").kv_cache_dtype == "fp8_per_token_head"
    wide = set_arguments(LINEAR_HEAD, hf_overrides={"a": 1})
    assert wide.hf_overrides == {"a": 1, "head_dtype": "float32"}
    assert set_arguments(Config(head_dtype="float32")).hf_overrides == {}  # exact mode has its own head
    for config, changes in (
        (KV, {"kv_cache_dtype": "fp8_e5m2"}),
        (LINEAR_HEAD, {"hf_overrides": {"head_dtype": "model"}}),
        (LINEAR_HEAD, {"hf_overrides": print}),
    ):
        with pytest.raises(ConflictError):
            set_arguments(config, **changes)


def resolved(dtype: torch.dtype, head: torch.dtype, width: int = 64) -> SimpleNamespace:
    model = SimpleNamespace(dtype=dtype, head_dtype=head, get_head_size=lambda: width)
    return SimpleNamespace(model_config=model)


def test_what_vllm_made_of_them():
    half, brain, full = torch.float16, torch.bfloat16, torch.float32
    engine.check_resolved(resolved(half, half), FP16)
    engine.check_resolved(resolved(brain, full), LINEAR_HEAD)
    with pytest.raises(ConfigError, match=r"required bfloat16, found torch\.float16. FP16 on one side alone"):
        engine.check_resolved(resolved(half, half), BF16)
    with pytest.raises(ConfigError, match=r"required float16, found torch\.bfloat16"):
        engine.check_resolved(resolved(brain, brain), FP16)
    with pytest.raises(ModelError, match="head_dtype='float32' in vLLM"):
        engine.check_resolved(resolved(brain, brain), LINEAR_HEAD)
    with pytest.raises(ModelError, match="heads of a multiple of 32, found 80"):
        engine.check_resolved(resolved(brain, brain, 80), KV)
