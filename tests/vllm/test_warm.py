"""A rollout on DeepGEMM: kernels are compiled before it serves, and block scales are kept with the weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jetrl_patch import Config
from jetrl_patch.adapters.vllm import worker
from jetrl_patch.adapters.vllm.formats import BLOCKS
from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod, layout_of
from jetrl_patch.adapters.vllm.shards import Shard
from jetrl_patch.backends import deep_gemm, get_backend, quantize
from jetrl_patch.backends.deep_gemm import DeepGemmBackend
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.backends.row_equality import Layout, Part
from tests.fp8.deep_gemm_double import DeepGemm

WHOLE = Layout((Part(256, 0, 256, 0),))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> DeepGemm:
    library = DeepGemm()
    monkeypatch.setattr(deep_gemm, "find_deep_gemm", lambda: (library, "deep_gemm"))
    return library


def linear(N: int, K: int, layout: Layout | None, backend: Any = None) -> tuple[Any, QuantizedLinearMethod]:
    method = QuantizedLinearMethod(Config(precision="fp8-rollout"), "model.layers.0.mlp.down_proj", packed={}, cut=[])
    method.format._backend = backend or DeepGemmBackend()
    layer: Any = torch.nn.Module()
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(N))
    layer.weight, blocks = quantize.quantize_weight(weight, "pow2")
    layer.weight_scale_inv = quantize.expand_weight_scale(blocks, N)
    method.format.prepare(layer, layout)
    return layer, method


def test_every_kernel_is_compiled_before_the_first_request(
    library: DeepGemm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layers = [linear(256, 128, WHOLE), linear(256, 128, WHOLE), linear(64, 256, None)]
    monkeypatch.setattr(worker, "quantized_modules", lambda model: layers)
    monkeypatch.setattr(worker.logger, "propagate", True, raising=False)
    with caplog.at_level("INFO", logger=worker.logger.name):
        done = worker.warm_up(torch.nn.Module(), 300)
    assert done == 2 * len(DeepGemmBackend().compiled_rows(300))  # two shapes
    compiled = set(library.compiled)
    assert {kernel[:3] for kernel in compiled} == {("1d2d", 256, 128), ("1d1d", 64, 256)}
    for layer, method in layers:
        for M in range(1, 301):
            method.apply(layer, torch.zeros(M, layer.weight.shape[1], dtype=torch.bfloat16))
    assert library.compiled == compiled


def test_a_backend_that_compiles_nothing_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [linear(256, 128, WHOLE, get_backend("torch")), linear(64, 256, None, get_backend("native"))]
    monkeypatch.setattr(worker, "quantized_modules", lambda model: layers)
    assert worker.warm_up(torch.nn.Module(), 300) == 0


def test_block_scales_follow_the_weight(library: DeepGemm) -> None:
    layer, method = linear(256, 128, WHOLE)
    held = getattr(layer, BLOCKS)
    assert torch.equal(held, layer.weight_scale_inv[::128]) and BLOCKS not in layer.state_dict()
    x = torch.randn(5, 128).to(torch.bfloat16)
    expected = get_backend("torch").fprop(x, Quantized(layer.weight, layer.weight_scale_inv, "rows", "pow2"))
    assert torch.equal(method.apply(layer, x), expected) and {kernel for kernel, *_ in library.calls} == {"1d2d"}
    # a weight sync writes through the loaders
    shard = Shard("model.layers.0.mlp.down_proj", None, 256, 0, 256, 0, 128, 0)
    method.shards = lambda layer: [shard]  # type: ignore[method-assign,assignment,misc]
    load = method._scale_loader(layer, lambda param, loaded, *shard: param.copy_(loaded))
    load(layer.weight_scale_inv, torch.tensor([[0.5], [2.0]]))
    assert getattr(layer, BLOCKS) is held and held.flatten().tolist() == [0.5, 2.0]
    method.format.prepare(layer, WHOLE)  # a second load
    assert getattr(layer, BLOCKS) is held


@pytest.mark.parametrize("N", [256, 250])
def test_products_copy_no_scales_of_the_weight(library: DeepGemm, N: int) -> None:
    """Partial sums, and weights whose blocks share no scale, read the scales per row by columns."""
    layer, method = linear(N, 128, None)
    layer.weight_scale_inv = torch.nn.Parameter(layer.weight_scale_inv)
    scale, values = layer.weight_scale_inv, layer.weight_scale_inv.data.clone()
    for _ in range(2):  # a second load
        method.format.prepare(layer)
    pitch = -(-N // 4) * 4
    assert layer.weight_scale_inv is scale and scale.stride() == (1, pitch) and torch.equal(scale.data, values)
    assert deep_gemm.pitched(scale.data).data_ptr() == scale.data_ptr()
    if N == 256:
        x = torch.randn(5, 128).to(torch.bfloat16)
        expected = get_backend("torch").fprop(x, Quantized(layer.weight, values, "rows", "pow2"), torch.float32)
        assert torch.equal(method.partial_sum(layer, x), expected) and {kernel for kernel, *_ in library.calls} == {"1d1d"}
    scale.data.narrow(0, 8, 16).copy_(torch.full((16, 1), 4.0))  # as vLLM's loaders write
    assert (layer.weight_scale_inv[8:24] == 4.0).all() and torch.equal(layer.weight_scale_inv[24:], values[24:])
    layer, method = linear(256, 128, WHOLE, get_backend("torch"))
    assert layer.weight_scale_inv.is_contiguous()


def test_rows_that_make_no_blocks_keep_none(library: DeepGemm) -> None:
    for layout in (None, Layout((Part(512, 64, 320, 0),)), Layout((Part(192, 0, 192, 0), Part(64, 0, 64, 192)))):
        layer, _ = linear(256, 128, layout)
        assert not hasattr(layer, BLOCKS)
    layer, method = linear(256, 128, WHOLE, get_backend("torch"))
    assert not hasattr(layer, BLOCKS) and method.apply(layer, torch.zeros(1, 128).bfloat16()).shape == (1, 256)


def test_the_layout_of_a_layer() -> None:
    shards = [Shard("q", "q", 896, 448, 896, 0, 896, 0), Shard("k", "k", 128, 64, 128, 0, 896, 448)]
    layer: Any = SimpleNamespace(input_size=896)
    assert layout_of(layer, shards) == Layout((Part(896, 448, 896, 0), Part(128, 64, 128, 448)), 1)
    layer.input_size = 1024
    assert layout_of(layer, [Shard("down", None, 96, 0, 96, 256, 512, 0)]) == Layout((Part(96, 0, 96, 0),), 4)


def test_vllm_waits_until_the_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import core_client

    from jetrl_patch.adapters.vllm import quant
    from jetrl_patch.patching.journal import Journal

    name = "VLLM_ENGINE_READY_TIMEOUT_S"
    monkeypatch.delenv(name, raising=False)
    before, journal = core_client.VLLM_ENGINE_READY_TIMEOUT_S, Journal()
    quant._wait_for_kernels(journal)
    assert core_client.VLLM_ENGINE_READY_TIMEOUT_S == quant.FIRST_START > before
    journal.rollback()
    assert before == core_client.VLLM_ENGINE_READY_TIMEOUT_S
    monkeypatch.setenv(name, "30")  # the user's own
    quant._wait_for_kernels(journal)
    assert before == core_client.VLLM_ENGINE_READY_TIMEOUT_S
