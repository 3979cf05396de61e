"""Random experts for tests: a layer with tokens routed to it, and the matrices of one expert of a stack."""

from __future__ import annotations

import torch

from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.exact import ops
from jetrl_patch.fp8.experts import Experts, ExpertWeights, experts_forward
from jetrl_patch.fp8.mixture import groups_of

BF16 = torch.bfloat16


def matrices_of(stacks):
    """What ``run_experts`` asks for, from the stacks that ``run_grouped`` takes."""

    def matrices(expert):
        places = ((stacks.gate_up, 2 * expert), (stacks.gate_up, 2 * expert + 1), (stacks.down, expert))
        return ExpertWeights(*(Quantized(w.q[i], w.s[i], "blocks", w.scale_format) for w, i in places))

    return matrices


class Layer:
    """Random experts, and tokens routed to ``k`` of them."""

    def __init__(self, tokens, experts=6, hidden=320, width=200, k=3, dtype=BF16, scale_format="pow2", backend="native"):
        g = torch.Generator().manual_seed(0)
        self.gate_up = (torch.randn(experts, 2 * width, hidden, generator=g) * hidden**-0.5).to(dtype).requires_grad_()
        self.down = (torch.randn(experts, hidden, width, generator=g) * width**-0.5).to(dtype).requires_grad_()
        self.x = torch.randn(tokens, hidden, generator=g).to(dtype).requires_grad_()
        self.weights, self.ids = ops.route(torch.randn(tokens, experts, generator=g), k, True)
        self.weights = self.weights.detach().requires_grad_()
        self.own = Experts(experts, scale_format, backend)

    def run(self, rows=slice(None)):
        return experts_forward(self.x[rows], self.gate_up, self.down, self.weights[rows], self.ids[rows], self.own)

    def exact(self, x, gate_up, down, weights):
        """The same sum over experts in FP64, from unquantized operands."""
        width, y = down.shape[2], torch.zeros_like(x)
        for group in groups_of(self.ids, down.shape[0]):
            a, b = (x[group.tokens] @ gate_up[group.expert].t()).split(width, -1)
            out = (torch.nn.functional.silu(a) * b) @ down[group.expert].t()
            y = y.index_add(0, group.tokens, weights[group.tokens, group.slots, None] * out)
        return y
