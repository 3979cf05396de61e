"""The experts of a mixture on a GPU in a fixed number of launches, and their trial on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetrl_patch.backends import Backend, get_backend
from jetrl_patch.backends.gpu import written
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.backends.row_equality import Verdict, as_verdict, require_equal
from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.errors import UNQUANTIZED, ModelError, explain
from jetrl_patch.exact import ops
from jetrl_patch.fp8.mixture import WHOLE, ExpertSplit, added
from jetrl_patch.kernels.formats import BLOCK, groups

# ---- What ``experts`` computes expert by expert, in a fixed number of launches -------------------
# No count is read back to the host, so the stream never waits and CUDA graphs can hold it. All experts' bytes are in two tensors:
#
#     gate_up  e4m3 [2E, I, H], scales [2E, ceil(I / 128), ceil(H / 128)]      gate and up of each expert, alternating
#     down     e4m3 [E, H, I],  scales [E, ceil(H / 128), ceil(I / 128)]
#
# A row has the bits of the dense Triton product, and the sum over experts is that of ``mixture``. A pair is a token and one of
# its experts; pairs are sorted by expert (``kernels.mixture``). Shape legend as in ``experts``; F = 2I.

class Stacks(NamedTuple):
    """All experts' matrices in blocks: e4m3 [S, N, K], FP32 scales [S, ceil(N/128), ceil(K/128)]. Gate and up: S = 2E."""

    gate_up: Quantized
    down: Quantized


class Saved(NamedTuple):
    """What the forward pass saves of each pair: gate and up side by side, and their quantized product."""

    ab_PF: Tensor
    h: Quantized


class Gradients(NamedTuple):
    """Of the tokens and the parameters (None if not wanted), of the routing weights in FP32, of gate and up in BF16 [P, 2I]."""

    dx_TH: Tensor | None
    dgate_up: Tensor | None
    ddown: Tensor | None
    dweights_Tk: Tensor
    dab_PF: Tensor | None


def run_grouped(
    kernels: Any,
    x: Quantized,
    weights_Tk: Tensor,
    ids_Tk: Tensor,
    stacks: Stacks,
    split: ExpertSplit = WHOLE,
    part: torch.dtype | None = None,
) -> tuple[Tensor, Any, Saved]:
    """FProp of the experts: the trainer's forward and the rollout's, in six launches with the quantization of the tokens.

    A split by columns adds two launches and a copy of the matrices for each part; a split by experts, one launch for each part.

    Args:
        kernels: ``Backend.grouped``.
        x: the tokens, e4m3 [T, H] with scales [T, G].
        split: the parts of the sum. All are computed here and added as a rollout's ranks add theirs, in BF16.
        part: compute one rank's part, in BF16 or as the unrounded sum in FP32. Indices beyond the experts are other ranks'.

    Returns:
        [T, H]; NaN for a token with an index beyond the experts, unless it is a part. The plan of the pairs. What backward needs.
    """
    experts, _, width = stacks.down.shape
    plan = kernels.plan(ids_Tk, experts)
    ab_PF = kernels.grouped(*x, *stacks.gate_up, plan, tokens=True)
    qh_PI, sh_PG, _ = kernels.silu_mul_quantize_rows(ab_PF[:, :width], ab_PF[:, width:], x.scale_format)
    saved, weights = Saved(ab_PF, Quantized(qh_PI, sh_PG, "rows", x.scale_format)), weights_Tk.float().contiguous()
    if split.ranks > 1:
        return added(torch.stack([*_parts(kernels, saved.h, weights, stacks.down, plan, split)])), plan, saved
    out_PH = kernels.grouped(*saved.h, *stacks.down, plan, torch.float32)
    return kernels.combine(out_PH, plan, weights, part or torch.bfloat16, part is not None), plan, saved


def _parts(
    kernels: Any, h: Quantized, weights_Tk: Tensor, down: Quantized, plan: Any, split: ExpertSplit
) -> Iterator[Tensor]:
    """Yield the FP32 sums [T, H] of a split."""
    experts, _, width = down.shape
    if split.by == "columns":
        for _, at in split.places(0, experts, width):
            q, s = h.columns(at.start, at.stop)
            matrices = down.q[:, :, at].contiguous(), down.s[:, :, at.start // BLOCK : groups(at.stop)]
            out_PH = kernels.grouped(q.contiguous(), s, *matrices, plan, torch.float32)
            yield kernels.combine(out_PH, plan, weights_Tk, torch.float32)
        return
    out_PH = kernels.grouped(*h, *down, plan, torch.float32)
    rank_Tk = plan.ids // (experts // split.ranks)
    for rank in range(split.ranks):
        yield kernels.combine(out_PH, plan, torch.where(rank_Tk == rank, weights_Tk, 0.0), torch.float32)


def grouped_backward(
    kernels: Any,
    dy_TH: Tensor,
    x: Quantized,
    saved: Saved,
    stacks: Stacks,
    weights_Tk: Tensor,
    plan: Any,
    wanted: Sequence[torch.dtype | None],
) -> Gradients:
    """The gradients of ``run_grouped`` from that of its result, BF16 [T, H].

    Args:
        wanted: dtypes of the gradients of the tokens, of gate and up, and of down; None for one that is not wanted.
    """
    dy_TH = dy_TH if dy_TH.stride(1) == 1 else dy_TH.contiguous()  # of a sum, for example
    form, weights, (x_dtype, gate_up_dtype, down_dtype) = x.scale_format, weights_Tk.float().contiguous(), wanted
    dy = kernels.quantize_rows(dy_TH, form)
    u_PI = kernels.grouped(*dy, *_transposed(kernels, stacks.down), plan, torch.float32, tokens=True)
    dab_PF, dweights_Tk = kernels.pair_backward(u_PI, saved.ab_PF, *saved.h, weights, plan)
    dx = dgate_up = ddown = None
    if down_dtype is not None:
        g = kernels.group_tokens(dy_TH, plan, form, weights)
        h = kernels.regroup(*saved.h, plan, form, tokens=False)
        ddown = kernels.grouped_wgrad(g, h, plan, written(down_dtype)).to(down_dtype)
    if x_dtype is not None:
        P, F = dab_PF.shape
        halves = kernels.quantize_rows(dab_PF.view(2 * P, F // 2), form)  # gate and up in groups of their own
        q, s = (t.view(P, 2 * t.shape[1]) for t in halves)
        dx_PH = kernels.grouped(q, s, *_transposed(kernels, stacks.gate_up), plan, torch.float32, summed=2)
        dx = kernels.combine(dx_PH, plan, None, written(x_dtype)).to(x_dtype)
    if gate_up_dtype is not None:
        g = kernels.group_tokens(dab_PF, plan, form)
        tokens = kernels.regroup(*x, plan, form, tokens=True)
        dgate_up = kernels.grouped_wgrad(g, tokens, plan, written(gate_up_dtype)).to(gate_up_dtype)
    return Gradients(dx, dgate_up, ddown, dweights_Tk, dab_PF)


def _transposed(kernels: Any, stack: Quantized) -> tuple[Tensor, Tensor]:
    """Each matrix transposed, with its scales."""
    q = kernels.transposed(stack.q) if stack.transposed is None else stack.transposed
    return q, stack.s.transpose(1, 2)


# ---- The trial, before a rollout serves: a token's experts must not depend on the other tokens of the batch
# A decoding step has a few tokens, a training batch thousands, in another order and with other neighbors at each expert. Each row
# of the grouped products is compared with the dense product of the same row, and each token's sum with that of the token alone.
# The test suite proves what a CPU runs.

#: tokens of each expert: none, parts of a tile, whole tiles and one more, many
COUNTS = (0, 1, 127, 129, 900)
#: rows of the batch that are computed again by themselves
PARTS = ((0, 1), (129, 1), (5, 7), (64, 64))

_PROVEN: set[tuple[object, ...]] = set()


@as_verdict
@torch.no_grad()
def compare_experts(
    backend: Backend,
    hidden: int,
    width: int,
    device: torch.device | str,
    scale_format: ScaleFormat = "pow2",
    counts: tuple[int, ...] = COUNTS,
) -> str:
    """Compare experts with matrices [width, hidden] and [hidden, width]. The backend must have grouped products."""
    generator = torch.Generator(device).manual_seed(hidden + width)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16) * scale

    E, T = len(counts), sum(counts)
    weights = random(2 * E, width, hidden, scale=hidden**-0.5), random(E, hidden, width, scale=width**-0.5)
    stacks = Stacks(*(backend.quantize_weight(w, scale_format) for w in weights))
    first_T = torch.repeat_interleave(torch.tensor(counts)).to(device)
    shuffled_T = torch.randperm(T, generator=generator, device=device)
    ids_Tk = torch.stack((first_T, (first_T + 1) % E), 1)[shuffled_T]
    x = backend.quantize_activation(random(T, hidden), scale_format)
    _compare_products(backend, x, stacks, ids_Tk[:, :1])
    shares_Tk = random(T, 2).float().softmax(-1)

    def mix(rows: Tensor | slice) -> Tensor:
        kernels = backend.grouped(x.q)
        return run_grouped(kernels, x.rows(rows), shares_Tk[rows], ids_Tk[rows], stacks, part=torch.float32)[0]

    whole_TH, reversed_T = mix(slice(None)), torch.arange(T - 1, -1, -1, device=device)
    require_equal(mix(reversed_T)[reversed_T], whole_TH, "values differ when the tokens come in another order")
    for start, size in PARTS:
        rows = slice(start, start + size)
        if rows.stop <= T:
            require_equal(mix(rows), whole_TH[rows], f"values of {size} tokens differ from those among {T}")
    return f"tokens by themselves equal those among {T}, and rows those of dense products"


def _compare_products(backend: Backend, x: Quantized, stacks: Stacks, ids_T1: Tensor) -> None:
    """Compare the rows of both grouped products with dense ones, expert by expert."""
    kernels, experts = backend.grouped(x.q), stacks.down.shape[0]
    plan = kernels.plan(ids_T1, experts)
    ab_PF = kernels.grouped(*x, *stacks.gate_up, plan, tokens=True)[plan.place.long()]
    a_TI, b_TI = ab_PF.chunk(2, 1)
    qh_PI, sh_PG, _ = kernels.silu_mul_quantize_rows(a_TI, b_TI, x.scale_format)
    h, sorted_P = Quantized(qh_PI, sh_PG, "rows", x.scale_format), plan.order.long()
    y_PH = kernels.grouped(*h.rows(sorted_P), *stacks.down, plan, torch.float32)[plan.place.long()]
    for expert in range(experts):
        rows = (ids_T1[:, 0] == expert).nonzero()[:, 0]
        products = (
            (a_TI, x, stacks.gate_up, 2 * expert),
            (b_TI, x, stacks.gate_up, 2 * expert + 1),
            (y_PH, h, stacks.down, expert),
        )
        for ours, operand, stack, index in products:
            w = Quantized(stack.q[index], stack.s[index], "blocks", stack.scale_format)
            dense = get_backend("triton").gemm(operand.rows(rows), w, ours.dtype)
            where = f"values of an expert with {len(rows)} tokens differ from the dense product"
            require_equal(ours[rows], dense, where)


def require_expert_equality(
    backend: Backend,
    experts: int,
    chosen: int,
    sizes: tuple[int, int],
    device: torch.device,
    scale_format: ScaleFormat = "pow2",
) -> bool:
    """Run the comparison once per process for each kind of experts; never on a CPU. Returns whether it ran now.

    Reads results back to the host. ``experts`` is their number, ``chosen`` how many a token has, ``sizes`` (hidden, width).

    Raises ModelError if this backend has no grouped products here, or a token depends on its batch.
    """
    key = (backend.name, str(device), experts, chosen, *sizes, scale_format)
    if device.type == "cpu" or key in _PROVEN:
        return False
    if backend.grouped(torch.empty(0, device=device)) is None:
        verdict, required = Verdict(False, "none"), "grouped FP8 products, which need a Hopper GPU and the triton package"
    else:
        verdict, required = compare_experts(backend, *sizes, device, scale_format), "tokens that do not depend on the batch"
        verdict = compare_routes(experts, chosen, device) if verdict.ok else verdict
    if not verdict.ok:
        what, fix = f"experts of {sizes[1]} x {sizes[0]} with backend={backend.name!r}", f"use a dense model, or {UNQUANTIZED}"
        raise ModelError(explain(what, required=required, found=verdict.found, fix=fix))
    _PROVEN.add(key)  # the cache is not emptied: vLLM loads from a pool of its own, in which torch cannot
    return True


@as_verdict
def compare_routes(experts: int, chosen: int, device: torch.device) -> str:
    """Compare the choice of experts for tokens by themselves and in a batch. Some logits of a token are equal."""
    generator = torch.Generator(device).manual_seed(experts)
    logits = torch.randn(300, experts, generator=generator, device=device).to(torch.bfloat16)
    bias = torch.zeros(experts, dtype=torch.float32, device=device)  # vLLM loads with BF16 as torch's default
    for rule in (None, ops.Sigmoid(bias, 1, 1, 1.0)):
        whole = ops.route(logits, chosen, True, rule)
        for rows in (slice(0, 1), slice(5, 12), slice(64, 300)):
            for ours, theirs in zip(ops.route(logits[rows], chosen, True, rule), whole, strict=True):
                require_equal(ours, theirs[rows], "values of routes differ between tokens by themselves and in a batch")
    return "routes of tokens by themselves equal those in a batch"
