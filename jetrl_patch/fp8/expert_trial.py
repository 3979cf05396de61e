"""Test on this machine, before a rollout serves, that a token's experts do not depend on the other tokens of the batch.

A decoding step has a few tokens, a training batch thousands, in another order and with other neighbours at each expert. Each
row of the grouped products is compared with the dense product of the same row, and each token's sum with that of the token
alone. The test suite proves what a CPU runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_patch.backends import Backend
from jetrl_patch.backends.quantize import expand_weight_scale
from jetrl_patch.backends.row_equality import Verdict
from jetrl_patch.errors import UNQUANTIZED, ModelError, explain
from jetrl_patch.exact import ops
from jetrl_patch.fp8.grouped import Stacks, run_grouped
from jetrl_patch.kernels.formats import ScaleFormat

__all__ = ["compare_experts", "require_expert_equality"]

#: tokens of each expert: none, parts of a tile, whole tiles and one more, many
COUNTS = (0, 1, 127, 129, 900)
#: rows of the batch that are computed again by themselves
PARTS = ((0, 1), (129, 1), (5, 7), (64, 64))

_PROVEN: set[tuple[object, ...]] = set()


@torch.no_grad()
def compare_experts(
    backend: Backend,
    hidden: int,
    width: int,
    device: torch.device | str,
    scale_format: ScaleFormat = "pow2",
    counts: tuple[int, ...] = COUNTS,
) -> Verdict:
    """Compare experts with matrices [width, hidden] and [hidden, width], by a backend that has grouped products."""
    generator = torch.Generator(device).manual_seed(hidden + width)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16) * scale

    E, T = len(counts), sum(counts)
    weights = random(2 * E, width, hidden, scale=hidden**-0.5), random(E, hidden, width, scale=width**-0.5)
    stacks = Stacks(*(backend.quantize_weight(w, scale_format) for w in weights))
    first_T = torch.repeat_interleave(torch.tensor(counts)).to(device)
    shuffled_T = torch.randperm(T, generator=generator, device=device)
    ids_Tk = torch.stack((first_T, (first_T + 1) % E), 1)[shuffled_T]
    quantized = backend.quantize_activation(random(T, hidden), scale_format)
    verdict = _products(backend, quantized, stacks, ids_Tk[:, :1])
    if not verdict.ok:
        return verdict
    shares_Tk = random(T, 2).float().softmax(-1)

    def mix(rows: Tensor | slice) -> Tensor:
        tokens = (quantized[0][rows], quantized[1][rows])
        kernels = backend.grouped(tokens[0])
        return run_grouped(kernels, tokens, shares_Tk[rows], ids_Tk[rows], stacks, scale_format, part=torch.float32)[0]

    whole_TH, reversed_T = mix(slice(None)), torch.arange(T - 1, -1, -1, device=device)
    unequal = int((mix(reversed_T)[reversed_T] != whole_TH).sum())
    if unequal:
        return Verdict(False, f"{unequal} of {whole_TH.numel()} values differ when the tokens come in another order")
    for start, size in PARTS:
        rows = slice(start, start + size)
        unequal = int((mix(rows) != whole_TH[rows]).sum()) if start + size <= T else 0
        if unequal:
            return Verdict(False, f"{unequal} values of {size} tokens differ from those among {T}")
    return Verdict(True, f"tokens by themselves equal those among {T}, and rows those of dense products")


def _products(backend: Backend, quantized: tuple[Tensor, Tensor], stacks: Stacks, ids_T1: Tensor) -> Verdict:
    """Compare the rows of both grouped products with dense ones, expert by expert."""
    from jetrl_patch.kernels.gemm import fprop

    kernels = backend.grouped(quantized[0])
    plan = kernels.plan(ids_T1, stacks.down[0].shape[0])
    ab_PF = kernels.grouped(*quantized, *stacks.gate_up, plan, tokens=True)[plan.place.long()]
    a_TI, b_TI = ab_PF.chunk(2, 1)
    q_PI, s_PG, _ = kernels.silu_mul_quantize_rows(a_TI, b_TI, "pow2")
    sorted_P = plan.order.long()
    y_PH = kernels.grouped(q_PI[sorted_P], s_PG[sorted_P], *stacks.down, plan, torch.float32)[plan.place.long()]
    for expert in range(stacks.down[0].shape[0]):
        rows = (ids_T1[:, 0] == expert).nonzero()[:, 0]
        x, h = ((q[rows], s[rows]) for q, s in (quantized, (q_PI, s_PG)))
        found = (a_TI[rows], b_TI[rows], y_PH[rows])
        matrices = ((x, stacks.gate_up, 2 * expert), (x, stacks.gate_up, 2 * expert + 1), (h, stacks.down, expert))
        for ours, (operand, (w, s), index) in zip(found, matrices, strict=True):
            s_rows = expand_weight_scale(s[index], w.shape[1])
            dense = fprop(*operand, w[index], s_rows, ours.dtype, s_blocks=s[index])
            unequal = int((ours != dense).sum())
            if unequal:
                found_words = f"{unequal} of {dense.numel()} values of an expert with {len(rows)} tokens"
                return Verdict(False, f"{found_words} differ from the dense product")
    return Verdict(True, "rows equal those of dense products")


def require_expert_equality(
    backend: Backend,
    experts: int,
    chosen: int,
    sizes: tuple[int, int],
    device: torch.device,
    scale_format: ScaleFormat = "pow2",
) -> bool:
    """Run the comparison once per process for each kind of experts; never on a CPU. Reads results back to the host.

    Args:
        experts, chosen: how many there are, and how many a token has.
        sizes: (hidden, width).

    Returns:
        whether it ran now.

    Raises:
        ModelError: this backend has no grouped products here, or a token depends on its batch.
    """
    key = (backend.name, str(device), experts, chosen, *sizes, scale_format)
    if device.type == "cpu" or key in _PROVEN:
        return False
    if backend.grouped(torch.empty(0, device=device)) is None:
        verdict, required = Verdict(False, "none"), "grouped FP8 products, which need a Hopper GPU and the triton package"
    else:
        verdict = compare_experts(backend, *sizes, device, scale_format)
        verdict = verdict if not verdict.ok else _routes(experts, chosen, device)
        required = "tokens that do not depend on the batch"
    if not verdict.ok:
        what, fix = f"experts of {sizes[1]} x {sizes[0]} with backend={backend.name!r}", f"use a dense model, or {UNQUANTIZED}"
        raise ModelError(explain(what, required=required, found=verdict.found, fix=fix))
    torch.cuda.empty_cache()
    _PROVEN.add(key)
    return True


def _routes(experts: int, chosen: int, device: torch.device) -> Verdict:
    """Compare the choice of experts for tokens by themselves and in a batch, with equal logits among those of a token."""
    generator = torch.Generator(device).manual_seed(experts)
    logits = torch.randn(300, experts, generator=generator, device=device).to(torch.bfloat16)
    rule = ops.Sigmoid(torch.zeros(experts, device=device), 1, 1, 1.0)
    for each in (None, rule):
        whole = ops.route(logits, chosen, True, each)
        for rows in (slice(0, 1), slice(5, 12), slice(64, 300)):
            part = ops.route(logits[rows], chosen, True, each)
            if any(not torch.equal(ours, theirs[rows]) for ours, theirs in zip(part, whole, strict=True)):
                return Verdict(False, "routes that differ between tokens by themselves and in a batch")
    return Verdict(True, "routes of tokens by themselves equal those in a batch")
