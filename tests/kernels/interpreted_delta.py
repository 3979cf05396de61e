"""Gated delta nets in Triton's interpreter: the tests of the C kernels, the trial of an engine, and norms with 1 + weight."""

from __future__ import annotations

import pytest
import torch
import triton

from jetrl_patch.exact import dispatch, ops, trial
from jetrl_patch.kernels import delta_net
from jetrl_patch.native import ops as native

from ..exact.test_delta_net import (
    LENGTHS,
    SIZES,
    given,
    starts_of,
    test_a_sequence_has_the_same_bits_alone,  # noqa: F401
    test_chunks_of_a_rollout_have_the_trainers_bits,  # noqa: F401
    test_values_and_gradients_are_those_of_fp64,  # noqa: F401
)
from ..fp8.thresholds import SQNR_KERNEL_FP32, sqnr

assert triton.knobs.runtime.interpret
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setitem(dispatch._chosen, "cpu", "triton")


def test_each_kernel_is_that_of_a_cpu():
    sizes, starts = SIZES["shared"], starts_of(LENGTHS)
    x, gates, (w, *others) = given(sizes, int(starts[-1]))
    y = delta_net.conv(x, w, starts)
    expected = native.conv(x, w, starts)
    assert (y == expected).float().mean() > 0.999 and sqnr(y, expected) > SQNR_KERNEL_FP32 / 2
    inputs = delta_net.delta_inputs(y, *gates, *others, sizes)
    for ours, theirs in zip(inputs, native.delta_inputs(y, *gates, *others, sizes), strict=True):
        assert sqnr(ours, theirs) > SQNR_KERNEL_FP32
    grad = torch.randn(len(x), sizes[1], sizes[3], generator=torch.Generator().manual_seed(1))
    found, dv = delta_net.delta_gradients(inputs, y, starts, sizes, grad)
    expected, expected_dv = native.delta_gradients(native.DeltaInputs(*inputs), y, starts, sizes, grad)
    for ours, theirs in zip((*found, dv), (*expected, expected_dv), strict=True):
        assert sqnr(ours, theirs) > SQNR_KERNEL_FP32


@pytest.mark.parametrize("broken", [False, True])
def test_the_trial_of_an_engine(broken, monkeypatch):
    if broken:  # one step continues from no state
        monkeypatch.setattr(delta_net, "_held", lambda *given, held=delta_net._held: (*held(*given)[:2], 0))
    sizes = trial.Sizes(64, 0, 0, 0, 64, 0)
    monkeypatch.setattr(trial, "PARTS", ((0, 1), (3, 2)))
    found = trial._tried(lambda: trial._Trial(sizes, "cpu", (1, 9, 4)).delta_net((1, 2, 16, 16)))
    assert found.ok is not broken and ("a step of" in found.found) is broken, found


@pytest.mark.parametrize("width", [64, 200])
def test_norms_that_multiply_by_one_plus_their_weight(width, monkeypatch):
    x, w = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16() for shape in ((19, width), (width,)))
    found = []
    for chosen in ("triton", "torch"):
        monkeypatch.setitem(dispatch._chosen, "cpu", chosen)
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        y = ops.rms_norm(*leaves, 1e-6, one_plus=True)
        found.append((y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)))
    (y, dx, dw), (expected, *gradients) = found
    assert torch.equal(y, expected) and all(sqnr(a, b) > 40 for a, b in zip((dx, dw), gradients, strict=True))
