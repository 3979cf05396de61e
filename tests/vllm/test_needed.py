"""Each change to vLLM is still needed: a test fails when upstream makes one of ours removable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import jetrl_patch


@pytest.fixture
def vllm_config() -> Iterator[Any]:
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def linear(n: int = 64, k: int = 32) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(n, k, dtype=torch.bfloat16), requires_grad=False)
    layer.bias = None
    layer.weight.weight_loader = lambda param, loaded: param.data.copy_(loaded)
    return layer


def test_cpu_linears_lose_their_weight_without_us() -> None:
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    layer = linear()
    try:
        _custom_ops.create_onednn_mm(layer.weight.t(), 32)
        packs = True
    except RuntimeError:  # its oneDNN has no BF16 product without AVX-512; vLLM then multiplies the weight in place
        packs = False
    utils.dispatch_cpu_unquantized_gemm(layer, True)
    assert (layer.weight.numel() == 0) == packs


def test_cpu_linears_keep_weight_and_bits_with_us() -> None:
    from vllm.model_executor.layers import utils

    x, layer = torch.randn(5, 32, dtype=torch.bfloat16), linear()
    new, stock = torch.randn(64, 32, dtype=torch.bfloat16), linear()
    stock.weight.data.copy_(new)
    utils.dispatch_cpu_unquantized_gemm(stock, False)

    jetrl_patch.enable(precision="bf16")
    utils.dispatch_cpu_unquantized_gemm(layer, True)
    layer.weight.weight_loader(layer.weight, new)
    assert torch.equal(layer.weight, new)
    ours = layer.cpu_linear(x, layer.weight, None)
    assert torch.equal(ours, stock.cpu_linear(x, stock.weight, None))
    utils.dispatch_cpu_unquantized_gemm(layer, True)  # as verl does after a sync
    assert torch.equal(layer.cpu_linear(x, layer.weight, None), ours)


def test_the_norm_rounds_otherwise_without_us(vllm_config: Any) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    from jetrl_patch.adapters.vllm.ops import ExactRMSNorm

    torch.manual_seed(0)
    x, residual = torch.randn(2, 64, 256, dtype=torch.bfloat16)
    norms = [kind(256).to(torch.bfloat16) for kind in (RMSNorm, ExactRMSNorm)]
    stock, ours = (norm(x.clone(), residual.clone())[0] for norm in norms)
    total = (x + residual).float()
    reference = (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
    assert not torch.equal(stock, ours)
    assert (ours == reference).float().mean() > 0.999 > (stock == reference).float().mean()


def test_the_rotary_embedding_rounds_otherwise_without_us(vllm_config: Any) -> None:
    from types import SimpleNamespace

    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from jetrl_patch.adapters.vllm.ops import ExactRotaryEmbedding

    vllm_config.model_config = SimpleNamespace(  # what the embedding reads of it
        max_model_len=128,
        hf_config=SimpleNamespace(model_type="qwen3"),
        hf_text_config=SimpleNamespace(head_dim=64, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}),
    )
    arguments = (64, 64, 128, 10000.0, True, torch.bfloat16)
    query = torch.randn(32, 128, dtype=torch.bfloat16)
    positions = torch.arange(32)
    stock = RotaryEmbedding(*arguments).forward_cpu(positions, query.clone(), query.clone())[0]
    ours = ExactRotaryEmbedding(*arguments)(positions, query.clone(), query.clone())[0]
    assert not torch.equal(stock, ours)
    assert torch.allclose(stock.float(), ours.float(), atol=0.05)
    with torch.device("meta"):  # vLLM builds a model for a GPU within the GPU's device
        assert [kind(*arguments).cos_sin_cache.device.type for kind in (RotaryEmbedding, ExactRotaryEmbedding)] == ["meta"] * 2


def test_a_cpu_misreads_queries_of_three_dimensions_without_us(vllm_config: Any) -> None:
    """As in latent attention: the rotated part of each head of a query, and of a compressed key."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotary = RotaryEmbedding(64, 64, 128, 10000.0, False, torch.bfloat16)
    positions = torch.arange(12)
    queries, compressed = torch.randn(12, 4, 128, dtype=torch.bfloat16), torch.randn(12, 576, dtype=torch.bfloat16)

    def off() -> float:
        query, key = queries.clone()[..., 64:], compressed.clone()[:, 512:].unsqueeze(1)
        expected = rotary.forward_native(positions, query.clone(), key.clone())
        found = rotary.forward_cpu(positions, query, key)
        assert all(a.shape == b.shape for a, b in zip(found, expected, strict=True))
        return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))

    assert off() > 1
    jetrl_patch.enable(precision="bf16", upstream_fixes=True)
    assert off() < 0.05


def test_amx_takes_the_weight_of_latent_attention_away_without_us() -> None:
    import inspect

    from vllm.model_executor.layers.attention import MLAAttention

    source = inspect.getsource(MLAAttention.process_weights_after_loading)
    assert "self.kv_b_proj.weight = torch.nn.Parameter(" in source and "torch.empty(0)" in source


def test_vllm_rounds_partial_sums_without_us() -> None:
    import inspect

    from vllm.model_executor.layers.linear import RowParallelLinear

    assert "tensor_model_parallel_all_reduce(output_parallel)" in inspect.getsource(RowParallelLinear.forward)


def test_transformers_classes_are_changed_for_compilation_without_us() -> None:
    from types import SimpleNamespace

    from vllm.config import CompilationMode
    from vllm.model_executor.models.transformers.base import Base

    changed: list[Any] = []
    engine = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=True),
        compilation_config=SimpleNamespace(mode=CompilationMode.VLLM_COMPILE),
        _pre_trained_model_classes=SimpleNamespace(decoder="the trainer's class too"),
        _decorate_cls_for_torch_compile=lambda cls, **_: changed.append(cls),
    )
    Base._decorate_for_torch_compile(engine)
    assert changed == ["the trainer's class too"]
    for settings in ({"precision": "bf16"}, {"precision": "fp8-rollout"}, {"precision": "fp8-unified"}):
        jetrl_patch.disable()
        jetrl_patch.enable(**settings)
        Base._decorate_for_torch_compile(engine)
        assert len(changed) == 1
    engine.model_config.enforce_eager = False
    Base._decorate_for_torch_compile(engine)
    assert len(changed) == 2
    engine.compilation_config.mode = CompilationMode.NONE  # with decode_graphs
    Base._decorate_for_torch_compile(engine)
    assert len(changed) == 2


def test_scaled_logits_round_otherwise_without_us(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    from jetrl_patch.adapters.vllm import ops

    hf_config = SimpleNamespace(model_type="granite", logits_scaling=1.2)
    current = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=hf_config, head_dtype=None))
    monkeypatch.setattr(ops, "get_current_vllm_config", lambda: current)
    logits = torch.randn(64, 384, dtype=torch.bfloat16)  # few divisors show it in BF16, nearly all in FP32
    trainers = logits / 1.2
    stock = LogitsProcessor(384, scale=1 / 1.2, logits_as_input=True)
    ours = ops.ExactLogitsProcessor(384, scale=1 / 1.2, logits_as_input=True)
    assert torch.equal(ours(None, logits.clone()), trainers)
    assert not torch.equal(stock(None, logits.clone()), trainers)
