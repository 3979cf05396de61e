"""A linear of the rollout in a compiled graph, on dummy weights: nothing was quantized before the first call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jetrl_patch import Config, backends
from jetrl_patch.adapters.vllm import formats
from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod
from jetrl_patch.backends.gpu import GpuBackend
from jetrl_patch.backends.quantize import Quantized, fprop
from jetrl_patch.kernels.formats import check_fprop


class Untraceable(GpuBackend):
    """The code path of the GPU backends, with a product that fails inside a graph, as the libraries' do."""

    name = "untraceable"

    def gemm(self, x: Quantized, w: Quantized, out_dtype: torch.dtype, splits: int = 1) -> torch.Tensor:
        check_fprop(x.q, x.s_rows, w.q, w.s_rows, out_dtype)
        assert not torch.compiler.is_compiling(), "a library call in a graph"
        return fprop(x.q, x.s_rows, w.q, w.s_rows, out_dtype, splits)

    def dgrad_product(self, *args: Any) -> torch.Tensor:
        raise NotImplementedError

    wgrad_product = dgrad_product


@pytest.mark.parametrize(
    ("config", "operator"),
    [
        (Config(precision="fp8-rollout"), "jetrl_patch.fp8_fprop.default"),
        (Config(precision="fp8-rollout", rollout_granularity="channel"), "jetrl_patch.fp8_fprop.default"),
    ],
    ids=["block", "channel"],
)
def test_it_is_one_operator(config: Config, operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = formats.choose_backend
    monkeypatch.setitem(backends._LOADED, "untraceable", Untraceable())
    monkeypatch.setattr(formats, "choose_backend", lambda *asked: (real(*asked), "untraceable")[1])
    method = QuantizedLinearMethod(
        config, "model.layers.0.mlp.down_proj", packed={}, cut=[]
    )
    g = torch.Generator().manual_seed(0)
    N, K = 128, 256
    width = 1 if config.channelwise else K // 128
    layer: Any = SimpleNamespace(
        weight=torch.randn(N, K, generator=g).to(torch.float8_e4m3fn),
        weight_scale_inv=torch.rand(N, width, generator=g),
    )
    method.process_weights_after_loading(layer)  # vLLM calls it after every load, dummy weights too
    nodes: list[str] = []

    def look(graph: Any, inputs: Any) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    run = torch.compile(lambda x: method.apply(layer, x), backend=look, fullgraph=True)
    with torch.inference_mode():
        x = torch.randn(5, K, generator=g).to(torch.bfloat16)
        compiled = run(x)
        assert torch.equal(compiled, method.apply(layer, x))
    assert operator in nodes and not any("float8" in node for node in nodes), nodes
