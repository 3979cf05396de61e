"""Norms and activations that hand bytes and scales to the FP8 linear behind them: in real engines, and where they must not.

On a CPU no kernel writes them: here the C kernels do, in two steps, in the place of a GPU's one. ``tests/kernels`` has the
kernels themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch import backends
from jetrl_patch.adapters.vllm import formats, install, ranks
from jetrl_patch.adapters.vllm.ops import FusedNorm, FusedSiluAndMul, keep_equal
from jetrl_patch.backends import gpu
from jetrl_patch.backends.cpu import NativeBackend
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.exact import ops
from jetrl_patch.measure.parity import Job

from .test_exact import assert_equal, run
from .test_weights import worker_of

pytestmark = pytest.mark.e2e


class Producing(NativeBackend):
    """The CPU's backend, with producers and with scales in the layout of DeepGEMM's."""

    columns = True

    def __init__(self) -> None:
        self.rows: list[int] = []

    def producers(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(WIDEST=16384)

    def norm_rows(self, x: Any, residual: Any, weight: Any, eps: float, form: Any) -> Any:
        total = x if residual is None else x + residual
        return self._rows(ops.rms_norm(total, weight, eps), form), None if residual is None else total

    def silu_mul_rows(self, gate: torch.Tensor, up: torch.Tensor, form: Any) -> Any:
        return self._rows(ops.silu_mul(gate, up), form)

    def _rows(self, y: torch.Tensor, form: Any) -> Quantized:
        self.rows.append(y.shape[0])
        x = self.quantize_activation(y, form)
        M, G = x.s.shape
        return replace(x, s=torch.empty(G, -(-M // 4) * 4)[:, :M].t().copy_(x.s))

    def gemm(self, x: Quantized, *rest: Any, **named: Any) -> torch.Tensor:
        return super().gemm(replace(x, s=x.s.contiguous()), *rest, **named)

    def fprop(self, x_MK: Any, w: Any, out_dtype: Any = torch.bfloat16, splits: int = 1) -> torch.Tensor:
        """One operator in a graph, as ``GpuBackend.fprop`` is."""
        if torch.compiler.is_compiling():
            return gpu.opaque_fprop("native", x_MK, w, out_dtype, splits)
        return super().fprop(x_MK, w, out_dtype, splits)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Producing:
    found = Producing()
    monkeypatch.setitem(backends._LOADED, "native", found)
    monkeypatch.setattr(formats, "available", lambda name, device_type: True)
    return found


def fused(model: torch.nn.Module) -> set[str]:
    return {name for name, m in model.named_modules() if isinstance(m, FusedNorm | FusedSiluAndMul)}


def model_of(llm: Any) -> Any:
    return worker_of(llm).model_runner.get_model()


LEAVES = ("input_layernorm", "post_attention_layernorm", "mlp.act_fn")


@pytest.mark.parametrize(
    "variant", ["qwen2", "qwen3", *(pytest.param(v, marks=pytest.mark.slow) for v in ("llama", "mistral", "granite"))]
)
def test_every_token_is_that_of_the_trainer(
    checkpoint: Callable[..., str], engine: Callable[..., Any], backend: Producing, variant: str
) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    job = Job(model=checkpoint(variant), config=jetrl_patch.status().config)
    llm = engine(job)
    model = model_of(llm)
    layers = len(model.model.layers)
    assert fused(model) == {f"model.layers.{i}.{leaf}" for i in range(layers) for leaf in LEAVES}
    assert not keep_equal(model)
    backend.rows.clear()
    assert_equal(job, run(lambda _: llm, job, [(1, 1), (7, 1)], 12), tokens=96)
    assert backend.rows.count(7) >= 3 * layers  # a decoding step of seven


@pytest.mark.parametrize(
    ("variant", "settings", "left"),
    [
        ("qwen3", {"align": "linear", "exclude": ("down_proj", "layers.1.self_attn")}, {"mlp.act_fn", "1.input_layernorm"}),
        ("smollm3", {}, set(LEAVES)),  # transformers' model, whose code asks hidden states for their shape
    ],
)
def test_what_feeds_something_else_stays(
    checkpoint: Callable[..., str], engine: Callable[..., Any], backend: Producing, variant: str, settings: Any, left: set[str]
) -> None:
    jetrl_patch.enable(precision="fp8-unified", **settings)
    job = Job(model=checkpoint(variant), config=jetrl_patch.status().config)
    llm = engine(job)
    model = model_of(llm)
    expected = {f"model.layers.{i}.{leaf}" for i in range(len(model.model.layers)) for leaf in LEAVES}
    assert fused(model) == {name for name in expected if not name.endswith(tuple(left))}
    run(lambda _: llm, job, [(2, 1)], 4)
    assert bool(backend.rows) == bool(fused(model))


def test_a_layer_that_leaves_fp8_gets_a_tensor_again(
    checkpoint: Callable[..., str], engine: Callable[..., Any], backend: Producing
) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    model = model_of(engine(Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config)))
    block = model.model.layers[0]
    norm, x = block.input_layernorm, torch.randn(5, 256).bfloat16()
    with torch.inference_mode():
        assert isinstance(norm(x), Quantized)
        install.VllmInstaller(model).to_bf16([f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv"])
        assert torch.equal(norm(x), ops.rms_norm(x, norm.weight, norm.variance_epsilon))
        y, total = norm(x, x)
        assert torch.equal(y, ops.rms_norm(x + x, norm.weight, norm.variance_epsilon)) and torch.equal(total, x + x)
        other = block.mlp.act_fn
        assert isinstance(other(torch.randn(5, 2 * block.mlp.down_proj.weight.shape[1]).bfloat16()), Quantized)
        assert other(torch.randn(1, 5, 2 * block.mlp.down_proj.weight.shape[1]).bfloat16()).dim() == 3  # not what kernels take


def test_where_other_bytes_come_out_two_steps_stay(
    checkpoint: Callable[..., str], engine: Callable[..., Any], backend: Producing, monkeypatch: pytest.MonkeyPatch
) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    model = model_of(engine(Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config)))
    right, norms = backend.silu_mul_rows, {name for name in fused(model) if "norm" in name}
    monkeypatch.setattr(backend, "silu_mul_rows", lambda gate, up, form: right(gate, up.neg(), form))
    before = fused(model)
    assert set(keep_equal(model)) == before - norms and fused(model) == norms
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp.act_fn(torch.randn(5, 2 * mlp.down_proj.weight.shape[1]).bfloat16()), torch.Tensor)


def test_blocks_in_a_compiled_graph(
    checkpoint: Callable[..., str], engine: Callable[..., Any], backend: Producing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One opaque operator for each, by inductor too."""
    jetrl_patch.enable(precision="fp8-unified", align="linear")
    model = model_of(engine(Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config)))
    mlp, norm = model.model.layers[0].mlp, model.model.layers[0].post_attention_layernorm
    nodes: list[str] = []

    def look(graph: Any, inputs: Any) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def block(x: torch.Tensor, residual: torch.Tensor) -> Any:
        rows, total = norm(x, residual)
        return mlp(rows), total

    for name in ("inductor", look):
        torch._dynamo.reset()
        with monkeypatch.context() as patch:
            patch.delenv("TORCHDYNAMO_DISABLE")  # which a CPU sets
            compiled = torch.compile(block, backend=name, fullgraph=True, dynamic=True)
        with torch.inference_mode():
            for M in (5, 8):
                x, residual = torch.randn(2, M, 256).bfloat16()
                for found, expected in zip(compiled(x, residual), block(x, residual), strict=True):
                    assert torch.equal(found, expected)
    ours = [node for node in nodes if node.startswith("jetrl_patch")]
    assert ours == [
        f"jetrl_patch.{name}.default" for name in ("norm_rows", "fp8_fprop", "silu_mul_rows", "fp8_fprop")
    ]


def test_ranks_add_the_products_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row-parallel layer on two ranks gets this rank's columns, quantized, and adds up FP32 sums as before."""
    seen: list[Any] = []

    class Method(ranks.QuantizedLinearMethod):
        def __init__(self) -> None:
            pass

        def partial_sum(self, layer: Any, x: Any) -> torch.Tensor:
            seen.append(x)
            return torch.full((3, 4), 1.5)

        def apply(self, layer: Any, x: Any, bias: Any = None) -> torch.Tensor:
            seen.append(x)
            return torch.full((3, 4), 1.5).bfloat16()

    monkeypatch.setattr(ranks, "sum_over_ranks", lambda partial: (2 * partial).bfloat16())
    layer: Any = SimpleNamespace(
        quant_method=Method(), tp_size=2, tp_rank=0, reduce_results=True, input_is_parallel=True, bias=None,
        skip_bias_add=False, return_bias=True,
    )  # fmt: skip
    rows = Quantized(torch.zeros(3, 128, dtype=torch.float8_e4m3fn), torch.ones(3, 1), "rows", "pow2")
    for given in (rows, torch.zeros(1, 3, 128).bfloat16()):
        output, bias = ranks.ExactRowParallelLinear.forward(layer, given)
        assert bias is None and output.shape == (*([] if given is rows else [1]), 3, 4) and (output == 3).all()
    assert seen[0] is rows and seen[1].shape == (3, 128)
    # without exact mode vLLM's own layer hands them on, and adds in BF16
    monkeypatch.setattr("vllm.model_executor.layers.linear.tensor_model_parallel_all_reduce", lambda partial: 2 * partial)
    output, _ = ranks.RowParallelLinear.forward(layer, rows)
    assert seen[2] is rows and output.dtype == torch.bfloat16 and (output == 3).all()
