"""The counts of launches and bytes: the page is up to date, and the counter agrees with counts by hand."""

from __future__ import annotations

import types

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.counted.__main__ import LENGTH, MODES, PAGE, count_block, empty, moved, page, table
from benchmarks.counted.counter import Counter, Launch, hopper, size
from benchmarks.shapes import MODELS, PUBLISHED, Model
from jetrl_patch import backends
from jetrl_patch.backends import get_backend
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.config import Config
from jetrl_patch.fp8 import linear as fp8_linear
from jetrl_patch.kernels.formats import groups

#: its name makes it a "llama"
TINY = Model("Llama-3.1-8B", hidden=256, intermediate=512, heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def found():
    return table()


def test_the_page_is_what_the_code_launches(found):
    assert PAGE.read_text() == page(found), "python -m benchmarks.counted --write, and look at what changed"


def test_fp8_moves_less_and_exact_as_much_as_linear(found):
    """FP8's bytes and products allow 1.4 times the speed."""
    assert len(found) == 9
    for model in MODELS:
        linear, exact = (next(row for row in found if (row["model"], row["mode"]) == (model.name, mode)) for mode in MODES[1:])
        assert linear["BF16 / this"] >= 1.4 <= exact["BF16 / this"]
        for columns in (("launches, forward", "backward"), ("GB, forward", "GB, backward")):
            assert sum(exact[column] for column in columns) <= 1.05 * sum(linear[column] for column in columns)


def test_bytes_of_other_launches_than_products():
    """Per token. An FP8 cache reads and writes each key and value once more, in BF16, and its gradient passes unchanged."""
    bf16, linear, exact, cached = (moved(TINY, mode) for mode in (*MODES, "exact, FP8 KV cache"))
    assert all(sum(a) > sum(b) for a, b in ((bf16, linear), (linear, exact)))
    assert cached == (exact[0] + 2 * 2 * 2 * TINY.kv_heads * TINY.head_dim, exact[1])
    launches = count_block(TINY, "exact", LENGTH).forward
    assert sum(launch.bytes for launch in launches) / LENGTH - exact[0] == sum(x.bytes for x in launches if x.flops) / LENGTH > 0


def test_operators_by_hand():
    a, b, c = empty(4, 8), empty(8, 16), empty(4, 16)
    with Counter() as counted:
        y = a @ b
        y.add_(c)
        c.copy_(y.view(16, 4).view(4, 16))
        a.float()
        empty(8).expand(4, 8) + a
    assert counted.launches == [
        Launch("mm", 2 * (32 + 128 + 64), 2.0 * 4 * 8 * 16), Launch("add_", 2 * 3 * 64), Launch("copy_", 2 * 2 * 64),
        Launch("_to_copy", 2 * 32 + 4 * 32), Launch("add", 2 * (8 + 32 + 32)),
    ]  # fmt: skip
    assert size(empty(1, 8).expand(4, 8)) == 16


@pytest.mark.parametrize("best", ["deep_gemm", "triton"])
def test_kernels_by_hand(best):
    M, N, K = 256, 128, 384
    loaded = dict(backends._LOADED)
    with hopper(best), Counter() as counted:
        x = get_backend(best).quantize_activation(empty(M, K), "pow2")
        w = Quantized(empty(N, K, dtype=torch.float8_e4m3fn), empty(1, 3, dtype=torch.float32), "blocks", "pow2")
        get_backend(best).gemm(x, w, torch.bfloat16)
    product = "deep_gemm 1D2D" if best == "deep_gemm" else "fprop_kernel"
    assert counted.launches == [
        Launch("rows_kernel", M * K * 3 + 4 * M * 3),
        Launch(product, M * K + 4 * M * 3 + N * K + 4 * 3 + 2 * M * N, 2.0 * M * N * K, "fp8"),
    ]
    assert loaded == backends._LOADED  # everything is restored


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("main", [True, False])
def test_a_weight_gradient_by_hand(rounds, main):
    M, N, K = 256, 128, 384
    FP32, FP8 = torch.float32, torch.float8_e4m3fn
    with hopper(rounds=rounds):
        given = [
            Quantized(empty(width, M, dtype=FP8), empty(2, width, dtype=FP32), "transposed", "pow2") for width in (N, K)
        ]
        with Counter() as counted:
            backend = get_backend("deep_gemm")
            if main:
                backend.add_wgrad_product(*given, empty(N, K, dtype=FP32))
            else:
                backend.wgrad_product(*given, torch.bfloat16)
    operands, flops = M * (N + K) + 4 * 2 * (N + K), 2.0 * M * N * K
    adds = Launch("deep_gemm 1D1D", operands + 8 * N * K, flops, "fp8_wgrad")
    if main:  # no zeros, no sum, no cast
        assert counted.launches == [adds]
    elif rounds:
        assert counted.launches == [Launch("cublaslt 1x128", operands + 2 * N * K, flops, "fp8_wgrad")]
    else:
        assert counted.launches == [Launch("zeros", 4 * N * K), adds, Launch("_to_copy", 6 * N * K)]


def test_a_time_is_that_of_bytes_or_of_products():
    peaks = PUBLISHED._replace(bandwidth=1.0, fp8=1.0)
    assert Launch("", 8, 2.0, "fp8").seconds(peaks) == 8e-9 and Launch("", 8, 1e6, "fp8").seconds(peaks) == 1e-6


def test_an_added_cast_shows(monkeypatch):
    before = count_block(TINY, "linear", tokens=LENGTH)
    fprop = fp8_linear.fprop
    monkeypatch.setattr(fp8_linear, "fprop", lambda x, *rest: fprop(x.float().to(torch.bfloat16), *rest))
    after = count_block(TINY, "linear", tokens=LENGTH)
    casts = [[launch.name for launch in passes.forward].count("_to_copy") for passes in (before, after)]
    assert casts == [0, 14] and len(after.forward) >= len(before.forward) + 14
    more = [launch.name for launch in after.backward if launch.name == "requantize_kernel"]
    assert len(more) == 7 and len(after.backward) == len(before.backward) + 3  # the layers no longer share an input


@pytest.mark.parametrize("best", ["deep_gemm", "triton"])
@pytest.mark.parametrize("align", MODES[1:])
def test_a_decoding_step_of_vllm_quantizes_once(best, align):
    """Norms and activation return quantized rows, which the linears read as they are, in both modes."""
    ops, method = (pytest.importorskip(f"jetrl_patch.adapters.vllm.{name}") for name in ("ops", "method"))
    from jetrl_patch.adapters.vllm.formats import BLOCKS

    config = Config(precision="fp8-unified", align=align).resolved()

    def layer(linear):
        rows, blocks = (empty(height, groups(linear.K), dtype=torch.float32) for height in (linear.N, groups(linear.N)))
        by = method.QuantizedLinearMethod(config, linear.name, packed={}, cut=[])
        weight = empty(linear.N, linear.K, dtype=torch.float8_e4m3fn)
        return types.SimpleNamespace(weight=weight, weight_scale_inv=rows, quant_method=by, **{BLOCKS: blocks})

    def fused(kind, reader, *inputs, **own):
        made = kind()
        made.__dict__.update(jetrl_reader=reader, jetrl_backend=get_backend(best), **own)
        return made.forward(*inputs)

    norm = {"variance_epsilon": 1e-6, "variance_size_override": None, "has_weight": True, "weight": empty(TINY.hidden)}
    with hopper(best), torch.no_grad(), Counter() as counted:
        qkv, o, gate_up, down = map(layer, TINY.linears)
        x, residual = fused(ops.FusedNorm, qkv, empty(64, TINY.hidden), empty(64, TINY.hidden), **norm)
        qkv.quant_method.apply(qkv, x, None)
        x = o.quant_method.apply(o, empty(64, TINY.heads * TINY.head_dim), None)
        x, residual = fused(ops.FusedNorm, gate_up, x, residual, **norm)
        y = fused(ops.FusedSiluAndMul, down, gate_up.quant_method.apply(gate_up, x, None))
        down.quant_method.apply(down, y, None)
    assert len(counted.launches) == 8, [launch.name for launch in counted.launches]
