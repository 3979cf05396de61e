"""The Triton backend in the interpreter: a layer, its gradients at once, the trials of rows, and held weights."""

from __future__ import annotations

import pytest
import torch
import triton
from torch import nn

from jetrl_patch.backends import get_backend
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.backends.row_equality import Layout, Part, compare_parts, compare_rows
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.fp8.unchanged import unchanged_weights
from jetrl_patch.kernels import gemm, gemm_common

from ..fp8.layer import run_and_compare
from ..fp8.thresholds import KERNEL_EQUALS_ORACLE, SQNR_KERNEL_FP32, sqnr
from .interpreted_gemm import FORMATS

assert triton.knobs.runtime.interpret


@pytest.mark.parametrize("scale_format", FORMATS)
def test_a_linear_layer_on_this_backend(scale_format):
    torch.manual_seed(0)
    layer = nn.Linear(320, 130).to(torch.bfloat16)
    layer.__class__ = Fp8Linear
    layer.fp8 = Fp8State(scale_format, "triton")
    x = torch.randn(3, 7, 320, requires_grad=True)
    g = torch.randn(3, 7, 130).to(torch.bfloat16)
    run_and_compare(layer, x, g, scale_format)


@pytest.mark.parametrize("rows", [0, 5])
def test_gradients_and_inputs_with_any_strides(rows):
    """The gradient of a sum has strides of 0, and ``contiguous`` leaves them if there are no rows."""
    torch.manual_seed(0)
    layer = nn.Linear(160, 96, bias=False).to(torch.bfloat16)
    layer.__class__, layer.fp8 = Fp8Linear, Fp8State("pow2", "triton")
    x = torch.randn(160, rows, dtype=torch.bfloat16, requires_grad=True)
    layer(x.t()).sum().backward()
    assert x.grad.shape == x.shape and layer.weight.grad.any() == (rows > 0)
    ours, w = get_backend("triton"), layer.fp8.quantized(layer.weight)
    assert torch.equal(ours.fprop(x.t(), w), ours.fprop(x.t().contiguous(), w))


@pytest.mark.parametrize("scale_format", FORMATS)
def test_gradients_at_once_equal_those_one_by_one(scale_format):
    ours, torch_backend = get_backend("triton"), get_backend("torch")
    gen = torch.Generator().manual_seed(0)
    x, g = (torch.randn(130, width, generator=gen).to(torch.bfloat16) for width in (200, 257))
    w = ours.quantize_weight(torch.randn(257, 200, generator=gen), scale_format)
    x = ours.quantize_activation(x, scale_format)
    dtypes = torch.float32, torch.bfloat16
    dx, dw = ours.gradients(g, x, w, dtypes)
    assert torch.equal(dx, ours.dgrad(g, w, dtypes[0])) and dx.dtype == dtypes[0]
    assert torch.equal(dw, ours.wgrad(g, x, dtypes[1])) and dw.dtype == dtypes[1]
    main = torch.randn(257, 200, generator=gen)
    for layout in (main.clone(), main.t().contiguous().t()):  # the kernel adds, or torch does
        same_dx, added = ours.gradients(g, x, w, dtypes, main=layout)
        assert added is None and torch.equal(same_dx, dx)
        assert torch.equal(layout, main + ours.wgrad(g, x, torch.float32))
    expected = torch_backend.gradients(g, x, w, dtypes)
    assert sqnr(dx, expected[0]) > SQNR_KERNEL_FP32 and (dw == expected[1]).float().mean() >= KERNEL_EQUALS_ORACLE
    # and the backend's quantizers equal the reference
    for mine, theirs in zip(ours.quantize_tokens(g, scale_format), torch_backend.quantize_tokens(g, scale_format)):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_the_row_comparison_passes_here():
    verdict = compare_rows(get_backend("triton"), (64, 256), "cpu", trained=140, decoded=(1, 7))
    assert verdict.ok, verdict.found


#: a fused weight in the wide tile, whose parts come in the narrow one; the reverse; and a range of K on each of two ranks
FUSED = {
    "qkv": ((384, 256), Layout((Part(256, 0, 256, 0), Part(64, 0, 64, 256), Part(64, 0, 64, 320)))),
    "qkv of rank 1": ((224, 256), Layout((Part(320, 160, 320, 0), Part(64, 32, 64, 160), Part(64, 32, 64, 192)))),
    "down of 2": ((64, 128), Layout((Part(64, 0, 64, 0),), 2)),
}


@pytest.fixture
def tiles(monkeypatch):
    """Widths of the tiles that were launched; the wide one begins at 300 columns here."""
    seen, original = [], gemm.fprop_kernel
    monkeypatch.setattr(gemm_common, "WIDE_FROM", 300)

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: seen.append(options["COLUMNS"]) or original[grid](*args, **options)

    monkeypatch.setattr(gemm, "fprop_kernel", Kernel())
    return seen


@pytest.mark.parametrize("name", FUSED)
def test_the_trial_of_fused_weights_passes_in_both_tiles(name, tiles):
    verdict = compare_parts(get_backend("triton"), *FUSED[name], "cpu", batches=(1, 40, 70))
    assert verdict.ok, verdict.found
    assert set(tiles) == ({32, 64} if "down" in name else {32, 64, 128})


def test_the_trial_of_fused_weights_sees_a_tile_that_rounds_otherwise(tiles, monkeypatch):
    original = gemm.launch

    def launch(q, s, w, sw, y, tile, *how):
        original(q, s * (1 + 2**-7 * (tile.columns == 128)), w, sw, y, tile, *how)

    monkeypatch.setattr(gemm, "launch", launch)
    verdict = compare_parts(get_backend("triton"), *FUSED["qkv"], "cpu", batches=(70,))
    assert not verdict.ok and "at M = 70 differ between rows 0 to 256 of a weight [256, 256]" in verdict.found


@pytest.mark.parametrize("shape", [(16, 16), (48, 272), (272, 144)])
def test_w_transposed_by_tiles_is_its_transpose(shape):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = get_backend("triton").transposed(Quantized(codes.view(torch.float8_e4m3fn), torch.ones(1, 1), "blocks", "pow2"))
    assert found.is_contiguous() and torch.equal(found.view(torch.uint8), codes.t())


def test_a_held_weight_is_not_transposed_again(monkeypatch):
    """Its quantizer wrote W^T, from which DGrad has the same bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(144, 272), nn.Linear(272, 130))
    for layer in model:
        layer.__class__, layer.fp8 = Fp8Linear, Fp8State("pow2", "triton")
    x = torch.randn(2, 70, 144).to(torch.bfloat16).requires_grad_()

    def step():
        model.zero_grad()
        return [torch.autograd.grad(model(part).float().pow(2).sum(), part)[0] for part in x.unbind()]

    monkeypatch.setattr("jetrl_patch.backends.quantize.expand_weight_scale", None)  # nor are scales per row made
    expected = step()
    monkeypatch.setattr("jetrl_patch.kernels.gemm_backward.transposed", None)
    with pytest.raises(TypeError):
        step()
    with unchanged_weights(model):
        found = step()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
