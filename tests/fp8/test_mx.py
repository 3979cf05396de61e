"""MXFP8: quantizers, products and gradients against independent formulas, and what the setting refuses."""

from __future__ import annotations

import math

import pytest
import torch

from jetrl_patch.backends import capability, choose_backend, get_backend, quantize
from jetrl_patch.cli.checkpoint import choose
from jetrl_patch.config import Config
from jetrl_patch.config.formats import FORMATS
from jetrl_patch.errors import ConfigError, ModelError
from jetrl_patch.fp8.convert import swap_linears
from jetrl_patch.kernels.formats import FP8
from jetrl_patch.measure.monitor import Monitor
from jetrl_patch.measure.statistics import Figures
from jetrl_patch.models.layers import is_cut

from . import oracle
from .test_gemm import operands
from .test_other_blocks import quantized
from .thresholds import SQNR_GEMM, SQNR_KERNEL_FP32, SQNR_UNQUANTIZED, sqnr

BF16 = torch.bfloat16
SHAPES = [(1, 32, 32), (5, 64, 320), (33, 320, 1000), (130, 1000, 257), (200, 17, 33), (257, 31, 65)]  # M, N, K
BACKENDS = ["native", "torch"]


def by_element(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP8 along K from Python numbers: the smallest power of two for which no value exceeds 448, per 32 elements."""
    M, K = x_MK.shape
    codes, scales = torch.empty(M, K), torch.empty(M, -(-K // 32))
    for m in range(M):
        for g in range(scales.shape[1]):
            part = x_MK[m, 32 * g : 32 * g + 32].double()
            amax = max(float(part.abs().max()), 1e-10)
            exponent = math.frexp(amax)[1] - 9
            exponent += amax > 448 * 2.0**exponent
            scales[m, g] = 2.0**exponent
            codes[m, 32 * g : 32 * g + 32] = part / 2.0**exponent
    return codes.to(FP8), scales


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(3, 31), (4, 32), (5, 100), (2, 257), (70, 9)])
def test_scales_are_powers_of_two_rounded_up(backend, shape):
    g = torch.Generator().manual_seed(sum(shape))
    x = (torch.randn(shape, generator=g) * torch.exp2(torch.randint(-60, 60, shape, generator=g).float())).to(BF16)
    x[0, :3] = torch.tensor([448.0, -449.0, 0.0])
    x[1] = 0.0
    b = get_backend(backend)
    for made, of in ((b.quantize_activation(x, "mxfp8"), x), (b.quantize_weight(x, "mxfp8"), x)):
        q, s = by_element(of)
        assert made.layout == "rows" and torch.equal(made.s, s)
        assert torch.equal(made.q.view(torch.uint8), q.view(torch.uint8))
    tokens = b.quantize_tokens(x, "mxfp8")
    q, s = by_element(x.t())
    assert torch.equal(tokens.s, s.t()) and torch.equal(tokens.q.view(torch.uint8), q.t().contiguous().view(torch.uint8))
    assert torch.equal(b.quantize_weight_transposed(x, "mxfp8").for_dgrad.s, s.t())


def test_nothing_saturates():
    """The conversion of the MX specification, floor(log2(amax)) - 8, would clamp 479 to 448."""
    x = torch.full((1, 32), 479.0, dtype=BF16)
    q, s = quantize.quantize_activation(x, "mxfp8")
    assert s.item() == 2.0 and (q.float() * s).unique().item() == 480.0


def test_blocks_are_added_in_ascending_order():
    """2^24 in the first block absorbs the ones of later blocks one by one; a single sum over K would keep them."""
    q = torch.zeros(1, 160)
    q[0, 0], q[0, 32::32] = 64.0, 1.0
    s = torch.tensor([[64.0, 1.0, 1.0, 1.0, 1.0]])
    w, sw = q.clone().to(FP8), s.clone()
    for backend in BACKENDS:
        x = quantize.Quantized(q.to(FP8), s, "rows", "mxfp8")
        y = get_backend(backend).gemm(x, quantize.Quantized(w, sw, "rows", "mxfp8"), torch.float32)
        assert y.item() == 2.0**24


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_gradients(shape, backend, dtype):
    M, N, K = shape
    least = SQNR_GEMM if dtype == BF16 else SQNR_KERNEL_FP32
    x, w = operands(M, N, K)
    g = (torch.randn(M, N, generator=torch.Generator().manual_seed(5)) * 1e-6).to(BF16)
    b = get_backend(backend)
    wq, xq = b.quantize_weight_transposed(w, "mxfp8"), b.quantize_activation(x, "mxfp8")
    dx, dw = b.dgrad(g, wq, dtype), b.wgrad(g, xq, dtype)
    assert dx.dtype == dw.dtype == dtype
    assert sqnr(dx, g.double() @ w.double()) > SQNR_UNQUANTIZED["dgrad", "mxfp8"]
    by_n = quantize.quantize_tokens(w, "mxfp8")  # from the BF16 weight, not from FProp's bytes
    assert sqnr(dx, oracle.dgrad_mx(*quantize.quantize_activation(g, "mxfp8"), *by_n)) > least
    assert sqnr(dw, g.double().t() @ x.double()) > SQNR_UNQUANTIZED["wgrad", "mxfp8"]
    back = quantize.quantize_tokens(quantized(xq).to(BF16), "mxfp8")
    exact = oracle.wgrad(*quantize.quantize_tokens(g, "mxfp8"), *back, 32)
    assert sqnr(dw, exact) > least


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_splits_equal_what_tensor_parallel_ranks_add(backend, ranks):
    x, w = operands(9, 130, 96 * ranks)  # 96 is no multiple of 128
    b = get_backend(backend)
    wq, total = b.quantize_weight(w, "mxfp8"), None
    for start in range(0, 96 * ranks, 96):
        part = b.fprop(x[:, start : start + 96].contiguous(), wq.columns(start, start + 96), torch.float32)
        total = part if total is None else total + part
    assert torch.equal(b.fprop(x, wq, torch.float32, splits=ranks), total)
    assert torch.equal(b.fprop(x, wq, splits=ranks), total.to(BF16))
    with pytest.raises(ValueError, match="without cutting a block of 32"):
        b.fprop(x, wq, splits=6 * ranks)


def test_the_monitor_reads_blocks_of_32():
    monitor = Monitor(Config(scale_format="mxfp8"), ["model.layers.0.mlp.down_proj"], {})
    _, w = operands(1, 40, 160)
    wq = quantize.quantize_weight(w, "mxfp8")
    monitor.see_weight("model.layers.0.mlp.down_proj", w, *wq)
    figures = Figures.of(monitor._weights["model.layers.0.mlp.down_proj"].tolist())
    assert figures.sqnr == pytest.approx(sqnr(quantized(wq), w)) and figures.saturated == 0.0


# ---- What is refused -----------------------------------------------------------------------------

@pytest.mark.parametrize("found", [(9, 0), (8, 9), (12, 0)])
def test_other_gpus_are_refused(found, monkeypatch):
    monkeypatch.setattr(capability, "check_exact_cuda", lambda *sm: (True, "a GPU"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found)
    says = rf"scale_format='mxfp8': required a CPU, or a Blackwell.*found .*{found[0]}\.{found[1]}"
    for backend in ("auto", "torch"):
        with pytest.raises(ConfigError, match=says):
            choose_backend(backend, "cuda", "mxfp8")
    assert choose_backend("torch", "cpu", "mxfp8") == "torch"


def test_blackwell_gets_its_own_backend(monkeypatch):
    monkeypatch.setattr(capability, "check_exact_cuda", lambda *sm: (True, "a GPU"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert choose_backend("auto", "cuda", "mxfp8") == "mx"


def test_the_export_is_refused():
    with pytest.raises(ConfigError, match="Give --scale-format pow2"):
        choose(None, "fp8", "mxfp8", ())


def test_only_a_split_that_cuts_32_is_refused():
    name = "model.layers.0.mlp.down_proj"
    assert is_cut(name, 192, 2) and not is_cut(name, 192, 2, FORMATS["mxfp8"]) and is_cut(name, 96, 2, FORMATS["mxfp8"])
    block = torch.nn.ModuleDict({"down_proj": torch.nn.Linear(96, 32)})
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([block])})
    swap_linears(model, scale_format="mxfp8", k_splits=3, exact=True)
    assert block["down_proj"].fp8.splits == 3
    with pytest.raises(ModelError, match="cuts a block of 32"):
        swap_linears(model, scale_format="mxfp8", k_splits=2)
