"""NVFP4: quantizers, products and gradients against independent formulas, and what the setting refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from jetrl_patch.backends import choose_backend, get_backend, quantize
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ModelError
from jetrl_patch.fp8.convert import swap_linears
from jetrl_patch.kernels.formats import FP8
from jetrl_patch.measure.monitor import Monitor
from jetrl_patch.measure.statistics import Figures

from . import oracle
from .test_gemm import operands
from .test_other_blocks import quantized
from .thresholds import SQNR_GEMM, sqnr

BF16 = torch.bfloat16
SHAPES = [(1, 32, 32), (5, 64, 320), (33, 320, 1000), (130, 1000, 257), (200, 17, 33)]  # M, N, K
BACKENDS = ["native", "torch"]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = torch.arange(127, dtype=torch.uint8).view(FP8).double().tolist()


def nearest(value: float, grid: list[float]) -> float:
    """The nearest number of the grid, of two the one with the even index. Above its end, the end."""
    at = min(range(len(grid)), key=lambda i: (abs(grid[i] - abs(value)), i % 2))
    return math.copysign(grid[at], value)


def by_element(x_MK: torch.Tensor, one: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 along K from Python numbers: per 16 elements amax / 6, in e4m3 times a power of two for a row or for everything."""
    M, K = x_MK.shape
    x = x_MK.double().numpy()
    G = -(-K // 16)
    amax = [[max(np.abs(x[m, 16 * g : 16 * g + 16]).max(), 1e-10) for g in range(G)] for m in range(M)]
    scale = [[float(np.float32(np.float32(a) / np.float32(6))) for a in row] for row in amax]
    codes, scales = torch.empty(M, K), torch.empty(M, G)
    for m in range(M):
        most = max(map(max, scale)) if one else max(scale[m])
        outer = 2.0 ** math.ceil(math.log2(float(np.float32(most / 448))))
        for g in range(G):
            s = max(nearest(scale[m][g] / outer, E4M3), 2.0**-9) * outer
            scales[m, g] = s
            for k in range(16 * g, min(16 * g + 16, K)):
                codes[m, k] = nearest(float(np.float32(x[m, k]) / np.float32(s)), E2M1)
    return codes.to(FP8), scales


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(3, 15), (4, 16), (5, 100), (2, 257), (70, 9)])
@pytest.mark.parametrize("spread", [2, 60])
def test_two_levels_of_scales(backend, shape, spread):
    g = torch.Generator().manual_seed(sum(shape))
    x = (torch.randn(shape, generator=g) * torch.exp2(torch.randint(-spread, spread, shape, generator=g).float())).to(BF16)
    x[0, :3] = torch.tensor([6.0, -2.5, 0.0])
    x[1] = 0.0
    b = get_backend(backend)
    for made, one in ((b.quantize_activation(x, "nvfp4"), False), (b.quantize_weight(x, "nvfp4"), True)):
        q, s = by_element(x, one)
        assert made.layout == "rows" and torch.equal(made.s, s)
        assert torch.equal(made.q.view(torch.uint8), q.view(torch.uint8))


def test_ties_go_to_the_even_code():
    x = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0, 0.3, 7.0]])
    values = quantize.to_fp4(x).float()
    assert values.tolist() == [[0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -4.0, 0.5, 6.0]]
    assert torch.signbit(values[0, 8])


def test_a_nan_stays_visible():
    x = torch.ones(3, 40, dtype=BF16)
    x[1, 20] = torch.nan
    assert torch.isfinite(quantize.quantize_activation(x, "nvfp4").s).all(1).tolist() == [True, False, True]
    assert not torch.isfinite(quantize.quantize_weight(x, "nvfp4").s).any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_mxfp8(shape, backend):
    M, N, K = shape
    x, w = operands(M, N, K)
    g = (torch.randn(M, N, generator=torch.Generator().manual_seed(5)) * 1e-6).to(BF16)
    b = get_backend(backend)
    wq, xq = b.quantize_weight_transposed(w, "nvfp4"), b.quantize_activation(x, "nvfp4")
    by_n = quantize.quantize_tokens(w, "mxfp8")  # from the BF16 weight
    assert sqnr(b.dgrad(g, wq, BF16), oracle.dgrad_mx(*quantize.quantize_activation(g, "mxfp8"), *by_n)) > SQNR_GEMM
    back = quantize.quantize_tokens(quantized(xq).to(BF16), "mxfp8")  # from the saved four bits
    assert sqnr(b.wgrad(g, xq, BF16), oracle.wgrad(*quantize.quantize_tokens(g, "mxfp8"), *back, 32)) > SQNR_GEMM


def test_the_monitor_reads_blocks_of_16():
    name = "model.layers.0.mlp.down_proj"
    monitor = Monitor(Config(scale_format="nvfp4"), [name], {})
    _, w = operands(1, 40, 160)
    wq = quantize.quantize_weight(w, "nvfp4")
    monitor.see_weight(name, w, *wq)
    figures = Figures.of(monitor._weights[name].tolist())
    beyond = (w.double().abs() > 6.01 * wq.s.double().repeat_interleave(16, 1)).double().mean()
    assert figures.sqnr == pytest.approx(sqnr(quantized(wq), w)) and figures.saturated == pytest.approx(float(beyond)) != 0.0


# ---- What is refused -----------------------------------------------------------------------------

def test_every_gpu_is_refused():
    for sm in ((9, 0), (10, 0)):
        with pytest.raises(ConfigError, match=r"scale_format='nvfp4': required a CPU, found .*scale_format='pow2'"):
            choose_backend("auto", "cuda", "nvfp4", sm)


def test_no_split_of_a_row_is_accepted():
    block = torch.nn.ModuleDict({"down_proj": torch.nn.Linear(256, 32)})
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([block])})
    with pytest.raises(ModelError, match=r"size 2 cuts a row, which has a scale of its own, in 1 layers: .*Use size 1, or leave"):
        swap_linears(model, scale_format="nvfp4", k_splits=2)
