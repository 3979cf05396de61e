"""Engine arguments that are refused: real EngineArgs, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch import Config, ConfigError, ConflictError, ModelError
from jetrl_patch.adapters.vllm import engine

from .. import models, vision_models


def build(model: str, **settings: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=model, skip_tokenizer_init=True, max_model_len=128, **settings)
    return arguments.create_engine_config()


def test_quantization_and_eager_mode_are_chosen(checkpoint: Callable[..., str]) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    found = build(checkpoint("qwen3"))
    assert found.model_config.quantization == "jetrl_fp8"
    assert found.model_config.enforce_eager
    assert type(found.quant_config).__module__.startswith("jetrl_patch")


def test_bf16_changes_no_setting(checkpoint: Callable[..., str]) -> None:
    jetrl_patch.enable(precision="bf16")
    found = build(checkpoint("qwen3"))
    assert found.model_config.quantization is None
    assert not found.model_config.enforce_eager


def test_the_config_travels_pickled(checkpoint: Callable[..., str]) -> None:
    import pickle

    jetrl_patch.enable(precision="fp8-unified", exclude=("layers.0",))
    found = pickle.loads(pickle.dumps(build(checkpoint("qwen3"))))
    assert found.quant_config.config == jetrl_patch.status().config


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quantization": "fp8"}, "quantization"),
        ({"quantization_config": {"ignore": ["lm_head"]}}, "quantization"),
        ({"enable_lora": True}, "enable_lora"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"limit_mm_per_prompt": {"video": 1}}, "limit_mm_per_prompt for videos"),
    ],
)
def test_conflicts_are_named(checkpoint: Callable[..., str], settings: dict[str, Any], said: str) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    with pytest.raises(ConflictError, match=said):
        build(checkpoint("qwen3"), **settings)


@pytest.mark.parametrize("name", ["cudagraph_mm_encoder", "mm_device_do_normalize", "enable_mm_embeds"])
def test_what_bypasses_the_trainers_tower_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for problems in ("device_problems", "sequence_parallel"):
        monkeypatch.setattr(engine, problems, lambda *_: [])
    asked = SimpleNamespace(**{name: True}, cudagraph_mode=None)
    model = SimpleNamespace(head_dtype=torch.bfloat16, using_transformers_backend=lambda: False, multimodal_config=asked)
    given: Any = SimpleNamespace(
        model_config=model, use_v2_model_runner=False, compilation_config=asked, parallel_config=SimpleNamespace()
    )
    engine._check_exact(given, models.config_of("qwen3"), Config())  # which has no tower
    with pytest.raises(ModelError, match=rf"align='exact' does not support .*{name}"):
        engine._check_exact(given, vision_models.config_of("qwen2_5_vl"), Config())


def test_latent_attention_that_vllm_expands_is_refused(checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    build(checkpoint("deepseek_v3"))
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    with pytest.raises(ModelError, match="align='exact' does not support VLLM_MLA_DISABLE"):
        build(checkpoint("deepseek_v3"))


def test_a_backend_that_the_device_lacks_is_refused_before_a_worker_starts(checkpoint: Callable[..., str]) -> None:
    jetrl_patch.enable(precision="fp8-unified", backend="deep_gemm")
    with pytest.raises(ConfigError, match="backend='deep_gemm'"):
        build(checkpoint("qwen3"))


def test_only_lora_conflicts_without_exactness(checkpoint: Callable[..., str]) -> None:
    jetrl_patch.enable(precision="fp8-rollout")
    build(checkpoint("qwen3"), kv_cache_dtype="fp8")
    with pytest.raises(ConflictError, match="enable_lora"):
        build(checkpoint("qwen3"), enable_lora=True)


def test_float32_is_refused(checkpoint: Callable[..., str]) -> None:
    jetrl_patch.enable(precision="fp8-rollout")
    with pytest.raises(Exception, match=r"(?i)float32.*bfloat16|bfloat16.*float32"):
        build(checkpoint("qwen3"), dtype="float32")


def test_a_cut_block_names_the_layers_and_the_way_out(checkpoint: Callable[..., str]) -> None:
    jetrl_patch.enable(precision="fp8-unified", exclude=("layers.1.mlp",))
    with pytest.raises(ModelError) as caught:  # o_proj: K = 256 over 4 ranks; down_proj: K = 512 is whole
        build(checkpoint("qwen3"), tensor_parallel_size=4)
    text = str(caught.value)
    named = ", ".join(f"model.layers.{i}.self_attn.o_proj" for i in range(2))
    assert f"tensor parallel size 4 cuts a block of 128 in 3 layers: {named} and 1 more" in text
    assert "down_proj" not in text
    assert "JETRL_ON_CUT=bf16" in text


def test_cut_layers_may_stay_in_bf16(checkpoint: Callable[..., str]) -> None:
    jetrl_patch.enable(precision="fp8-unified", on_cut="bf16")
    build(checkpoint("qwen3"), tensor_parallel_size=4)


def test_what_is_excluded_cannot_be_cut(checkpoint: Callable[..., str]) -> None:
    jetrl_patch.enable(precision="fp8-unified", exclude=("o_proj",))
    build(checkpoint("qwen3"), tensor_parallel_size=4)


def test_a_foreign_family_names_the_supported_ones(tmp_path: Any) -> None:
    from transformers import GemmaConfig

    GemmaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        head_dim=64, vocab_size=384, architectures=["GemmaForCausalLM"], dtype="bfloat16",
    ).save_pretrained(tmp_path)  # fmt: skip
    jetrl_patch.enable(precision="fp8-unified")
    with pytest.raises(ModelError, match=r"(?s)qwen2, qwen3, llama.*gemma.*linear"):
        build(str(tmp_path))
    jetrl_patch.disable()
    jetrl_patch.enable(precision="fp8-unified", align="linear")
    build(str(tmp_path))


def test_a_bias_that_vllm_leaves_out_is_refused(tmp_path: Any) -> None:
    models.config_of("qwen3", attention_bias=True, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    jetrl_patch.enable(precision="fp8-unified")
    with pytest.raises(ModelError, match=r"required attention_bias=False .*o_proj\), found attention_bias=True"):
        build(str(tmp_path))


def test_a_quantized_checkpoint_conflicts(tmp_path: Any) -> None:
    config = models.config_of("qwen3", architectures=["Qwen3ForCausalLM"])
    config.quantization_config = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    config.save_pretrained(tmp_path)
    jetrl_patch.enable(precision="fp8-rollout")
    with pytest.raises(ConflictError, match=r"quant_method='fp8'"):
        build(str(tmp_path))


def test_disable_gives_the_registries_back(checkpoint: Callable[..., str]) -> None:
    import vllm.model_executor.custom_op as custom_op
    import vllm.model_executor.layers.quantization as quantization
    import vllm.model_executor.layers.rotary_embedding as rotary
    import vllm.v1.attention.selector as selector
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def state() -> tuple[Any, ...]:
        return (
            dict(custom_op.op_registry_oot),
            dict(quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG),
            list(quantization.QUANTIZATION_METHODS),
            AttentionBackendEnum.CPU_ATTN.get_path(),
            EngineArgs.__dict__["create_engine_config"],
        )

    before, ropes, chosen = state(), rotary._ROPE_DICT, selector._cached_get_attn_backend
    for _ in range(2):
        jetrl_patch.enable(precision="fp8-unified")
        build(checkpoint("qwen3"))
        assert AttentionBackendEnum.CPU_ATTN.is_overridden()
        assert "RMSNorm" in custom_op.op_registry_oot
        assert rotary._ROPE_DICT is not ropes and selector._cached_get_attn_backend is not chosen
        jetrl_patch.disable()
        assert state() == before
        assert rotary._ROPE_DICT is ropes and selector._cached_get_attn_backend is chosen


def test_somebody_elses_op_is_a_conflict(checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.model_executor.custom_op as custom_op

    monkeypatch.setitem(custom_op.op_registry_oot, "SiluAndMul", object)
    jetrl_patch.enable(precision="fp8-unified")
    with pytest.raises(ConflictError, match="SiluAndMul"):
        build(checkpoint("qwen3"))


def test_exact_mode_on_a_gpu_without_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    from jetrl_patch.backends.capability import refuse_exact_on

    refuse_exact_on("cpu")
    with pytest.raises(ConfigError, match=r", found torch .* sees no CUDA device. Use align='linear' if"):
        refuse_exact_on("cuda")
    with pytest.raises(ConfigError, match="device type 'xpu'"):
        refuse_exact_on("xpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"found compute capability 8\.0\. Use align='linear' if vLLM serves FP8 on it"):
        refuse_exact_on("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the triton package is not installed"):
        refuse_exact_on("cuda")
