"""A linear layer in FP8 against FP64, with whatever backend computes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .thresholds import SQNR_UNQUANTIZED, sqnr


def run_and_compare(layer: nn.Linear, x: Tensor, g: Tensor, scale_format: str) -> Tensor:
    """Run an ``Fp8Linear`` forward and backward from the gradient ``g``; compare y, dX and dW with FP64. Returns y."""
    y: Tensor = layer(x)
    torch.autograd.backward(y, g)
    x64, w64, g64 = (t.detach().double() for t in (x, layer.weight, g))
    expected = {
        "fprop": x64 @ w64.t() + layer.bias.detach().double(),
        "dgrad": g64 @ w64,
        "wgrad": g64.flatten(0, -2).t() @ x64.flatten(0, -2),
    }
    for name, value in {"fprop": y, "dgrad": x.grad, "wgrad": layer.weight.grad}.items():
        assert sqnr(value.detach(), expected[name]) > SQNR_UNQUANTIZED[name, scale_format], name
    return y
