"""Quantization statistics of tensors, the share of codes that a step leaves unchanged, and the hooks that measure a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jetrl_patch.backends.quantize import LARGEST
from jetrl_patch.config.formats import POW2, Format
from jetrl_patch.fp8.convert import expert_modules, experts_of, whole_shape
from jetrl_patch.fp8.experts import Experts
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.kernels.formats import AMAX_FLOOR, FP8_MAX
from jetrl_patch.models.structure import PROJECTIONS

# ---- Share of a weight's FP8 codes that an optimizer step leaves unchanged -----------------------
# The rollout does not see an update much smaller than the spacing of the codes (QuRL's weight-update problem, arXiv 2602.13953).
# Two weight syncs are compared on a fixed sample of the codes, without a second copy of the weights.

MOST = 1 << 16  # codes kept per layer; the experts of a block count as one layer


def sample(q_NK: Tensor, most: int = MOST) -> Tensor:
    """About ``most`` bytes of ``q`` [N, K] at fixed, evenly spaced positions; every byte of a small tensor."""
    flat = q_NK.detach().contiguous().view(torch.uint8).flatten()
    step = flat.numel() // most | 1  # odd: the sample visits every column of a weight of even width
    return flat[::step].clone()


class Codes:
    """Samples of the last sync, keyed by layer."""

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}

    def compare(self, layer: str, q_NK: Tensor, most: int = MOST) -> Tensor | None:
        """Remember the codes. Returns the share unchanged since the last call, FP64; None the first time."""
        last, now = self._last.get(layer), sample(q_NK, most)
        self._last[layer] = now
        return None if last is None else (last.to(now.device) == now).double().mean()


# ---- Quantization statistics of one tensor, measured on the output of the run's own quantizer ----
# For values x [M, K], codes q and scales s, let y = q * s (what the GEMM multiplies) and e = x - y:
#
#     sqnr       = 10 log10( Σ x² / Σ e² )                        over the whole tensor
#     slice_sqnr = -10 log10( mean over slices of Σ e² / Σ x² )   over rows and over columns; the lower of the two
#
# A few outliers carry nearly all of a tensor's power and quantize well, so ``sqnr`` stays near 31 dB while their neighbors in the
# same block are lost. ``slice_sqnr`` gives every row (column) equal weight, and drops. NaN and Inf are counted; the sums skip
# them and the groups that they turn into NaN.
#
# The experts of a block count as one layer. Each of its statistics is the worst over the experts' matrices, with that matrix's
# number.

Reduce = Callable[[Sequence[float]], float]
#: dB of a tensor that FP8 represents exactly; infinity would break a chart's axis
MOST_DB = 200.0
_CHUNK = 1 << 20  # values per pass, which bounds the extra memory (four times as many on a GPU)
_BEYOND = 1 + 2.0**-10  # amax / 448 is rounded, so the largest value may exceed 448 scales by an ulp


@dataclass(frozen=True)
class Figures:
    """Statistics of one tensor of one layer, or the worst over ranks.

    Attributes:
        amax: largest finite magnitude.
        saturated: share of values beyond 448 scales, which were clamped.
        underflow: share of nonzero values that became zero.
        sqnr: signal to quantization noise in dB over the whole tensor; NaN for an all-zero tensor.
        slice_sqnr: the same with every row (column) weighted equally; the lower of the two. NaN as above, and
            for gradients, whose rows differ in magnitude by nature.
        scale_min, scale_max: over nonempty groups; NaN if there are none.
        nonfinite: number of NaN and Inf values.
        at: for the experts of a block: statistic -> number of the matrix with the worst value (``matrix_name``).
    """

    amax: float
    saturated: float
    underflow: float
    sqnr: float
    slice_sqnr: float
    scale_min: float
    scale_max: float
    nonfinite: float
    at: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Sequence[float]) -> Figures:
        """Figures from a row of ``measure`` or ``worst_of``."""
        values, places = row[: len(FIELDS)], row[len(FIELDS) :]
        at = {name: int(place) for name, place, value in zip(FIELDS, places, values, strict=False) if not math.isnan(value)}
        return cls(**dict(zip(FIELDS, values, strict=True)), at=at)

    @property
    def worst_figure(self) -> str:
        """The name of the lower of ``sqnr`` and ``slice_sqnr``."""
        return "slice_sqnr" if self.slice_sqnr == self.worst_db else "sqnr"

    @property
    def worst_db(self) -> float:
        """The lower of ``sqnr`` and ``slice_sqnr``; NaN if both are."""
        known = [value for value in (self.sqnr, self.slice_sqnr) if not math.isnan(value)]
        return min(known, default=math.nan)


#: the statistics, in the order of a row
FIELDS = ("amax", "saturated", "underflow", "sqnr", "slice_sqnr", "scale_min", "scale_max", "nonfinite")
#: picks the worst of each; for the range of scales, both ends
_PICK: tuple[Reduce, ...] = (max, max, max, min, min, min, max, max)


def measure(x_MK: Tensor, q_MK: Tensor, s_MG: Tensor, slices: bool = True, form: Format = POW2) -> Tensor:
    """The fields of ``Figures`` as FP64 [8] on the tensor's device, without a GPU synchronization.

    Args:
        x_MK: the quantizer's input, BF16 [M, K].
        q_MK: e4m3 [M, K].
        s_MG: FP32 scales of 1 x ``form.block`` groups [M, ceil(K/block)]; a weight's block scales repeated for every row.
        slices: whether to compute ``slice_sqnr``.
    """
    M, K = x_MK.shape
    sums = torch.zeros(3, dtype=torch.float64, device=x_MK.device)  # saturated, underflow, non-finite
    amax = torch.zeros((), dtype=torch.float64, device=x_MK.device)
    rows = torch.zeros(2, M, dtype=torch.float64, device=x_MK.device)  # error, signal
    columns = torch.zeros(2, K, dtype=torch.float64, device=x_MK.device)
    for part in _chunks(x_MK):
        found = _Chunk.of(x_MK[part], q_MK[part], s_MG[part], form)
        if found.amax_m.numel():
            amax = torch.maximum(amax, found.amax_m.amax())
        sums += found.counts_3m.sum(1)
        rows[:, part] = found.squares_2mk.sum(2)
        columns += found.squares_2mk.sum(1)
    count = max(1, M * K)
    error, signal = rows.sum(1)
    nan = torch.full_like(amax, math.nan)
    lowest = torch.minimum(_of_slices(rows), _of_slices(columns)) if slices else nan
    return torch.stack([amax, sums[0] / count, sums[1] / count, _db(error / signal), lowest, *_scale_range(s_MG), sums[2]])


def measure_each(x_MK: Tensor, q_MK: Tensor, s_MG: Tensor, expert_M: Tensor, experts: int, slices: bool = True) -> Tensor:
    """``measure`` for each expert's rows, FP64 [E, 8], without moving rows or synchronizing with the host.

    An expert without rows gets zeros and NaN, as ``measure`` returns for an empty tensor.

    Args:
        x_MK, q_MK, s_MG, slices: as for ``measure``.
        expert_M: the expert of each row, int64.
    """
    (M, K), device = x_MK.shape, x_MK.device
    sums = torch.zeros(3, experts, dtype=torch.float64, device=device)
    amax = torch.zeros(experts, dtype=torch.float64, device=device)
    rows = torch.zeros(2, M, dtype=torch.float64, device=device)
    columns = torch.zeros(2, experts, K, dtype=torch.float64, device=device)
    for part in _chunks(x_MK):
        found, expert = _Chunk.of(x_MK[part], q_MK[part], s_MG[part]), expert_M[part]
        amax.scatter_reduce_(0, expert, found.amax_m, "amax")
        sums.index_add_(1, expert, found.counts_3m)
        rows[:, part] = found.squares_2mk.sum(2)
        columns.index_add_(1, expert, found.squares_2mk)
    values = K * torch.zeros(experts, dtype=torch.float64, device=device).index_add_(0, expert_M, torch.ones_like(rows[0]))
    shares = sums[:2] / values.clamp(min=1)
    error, signal = columns.sum(2)
    lowest = torch.full_like(amax, math.nan)
    if slices:
        ratios, held = _ratios(rows)
        mean = torch.zeros_like(amax).index_add_(0, expert_M, ratios)
        mean = mean / torch.zeros_like(amax).index_add_(0, expert_M, held.double())
        ratios, held = _ratios(columns)
        lowest = torch.minimum(_db(mean), _db(ratios.sum(1) / held.sum(1)))
    low, high = _row_scales(s_MG)
    scale_min = torch.full_like(amax, math.inf).scatter_reduce_(0, expert_M, low, "amin")
    scale_max = torch.full_like(amax, -math.inf).scatter_reduce_(0, expert_M, high, "amax")
    some = scale_min <= scale_max
    ends = (torch.where(some, end, math.nan) for end in (scale_min, scale_max))
    return torch.stack([amax, *shares, _db(error / signal), lowest, *ends, sums[2]], 1)


def worst_of(rows_S8: Tensor, numbers: Sequence[int] | Tensor) -> Tensor:
    """The worst of each statistic over S matrices, and the numbers of those matrices, FP64 [16], on the device.

    Args:
        rows_S8: rows of ``measure``. numbers: the matrices' numbers, [S].
    """
    unknown = rows_S8.isnan()
    lowest = torch.tensor([pick is min for pick in _PICK], device=rows_S8.device)
    signed = torch.where(lowest, -rows_S8, rows_S8).masked_fill(unknown, -math.inf)
    index = signed.argmax(0)
    values = rows_S8.gather(0, index.unsqueeze(0)).squeeze(0)
    return torch.cat([values, torch.as_tensor(numbers, device=rows_S8.device)[index].double()])


def worst(found: Sequence[Figures]) -> Figures:
    """The worst of each statistic over ranks; NaN only if every rank has NaN."""
    values, at = dict.fromkeys(FIELDS, math.nan), dict[str, int]()
    for name, pick in zip(FIELDS, _PICK, strict=True):
        known = {value: figures.at for figures in found if not math.isnan(value := getattr(figures, name))}
        if known:
            values[name] = pick(list(known))
            place = known[values[name]].get(name)
            if place is not None:
                at[name] = place
    return Figures(**values, at=at)


def _chunks(x_MK: Tensor) -> Iterator[slice]:
    M, K = x_MK.shape
    step = max(1, (4 * _CHUNK if x_MK.is_cuda else _CHUNK) // max(1, K))
    yield from (slice(start, start + step) for start in range(0, M, step))


class _Chunk(NamedTuple):
    """FP64 figures of m rows: largest magnitude, counts (saturated, underflow, non-finite), and squares (error, signal)."""

    amax_m: Tensor
    counts_3m: Tensor
    squares_2mk: Tensor

    @classmethod
    def of(cls, x_mK: Tensor, q_mK: Tensor, s_mG: Tensor, form: Format = POW2) -> _Chunk:
        x, q = x_mK.double(), q_mK.double()
        s = s_mG.double().repeat_interleave(form.block, 1)[:, : x.shape[1]]
        y = q * s
        finite = torch.isfinite(x)
        ok = finite & torch.isfinite(y)
        amax = x.abs().where(finite, 0.0).amax(1)
        counts = torch.stack([ok & (x.abs() > s * LARGEST[form.elements] * _BEYOND), ok & (x != 0) & (q == 0), ~finite])
        x, y = torch.where(ok, x, 0.0), torch.where(ok, y, 0.0)
        return cls(amax, counts.sum(2).double(), torch.stack([(x - y).square(), x.square()]))


def _of_slices(sums: Tensor) -> Tensor:
    """dB of the mean error-to-signal ratio over the slices that have a signal."""
    ratios, held = _ratios(sums)
    return _db(ratios.sum() / held.sum())


def _ratios(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Error over signal of each slice (0 without a signal), and whether it has a signal."""
    error, signal = sums
    held = signal > 0
    return torch.where(held, error / signal, 0.0), held


def _db(ratio: Tensor) -> Tensor:
    """-10 log10; NaN stays NaN."""
    return (-10 * torch.log10(ratio)).clamp(max=MOST_DB)


def _scale_range(s_MG: Tensor) -> tuple[Tensor, Tensor]:
    if s_MG.numel() == 0:
        nan = s_MG.new_full((), math.nan, dtype=torch.float64)
        return nan, nan
    low, high = _row_scales(s_MG)
    low, high = low.amin(), high.amax()
    return torch.where(low <= high, low, math.nan), torch.where(low <= high, high, math.nan)


def _row_scales(s_MG: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and largest scale of each row's nonempty groups; Inf and -Inf if it has none."""
    s = s_MG.double()
    held = torch.isfinite(s) & (s > 2 * AMAX_FLOOR / FP8_MAX)  # at the floor, a group is empty or nearly so
    return torch.where(held, s, math.inf).amin(1), torch.where(held, s, -math.inf).amax(1)


# ---- Statistics of the FP8 layers' activations and output gradients, from hooks that last one sampled step
# A hook measures its layer's first forward that autograd records, on at most ``MOST_ROWS`` tokens, and removes itself. It does
# not change the layer's results.
#
# Experts count as one layer. A callback inside them (``Experts.watch``) gets the operands of their GEMMs, for at most
# ``MOST_ROWS`` pairs of token and expert. If only the rollout is FP8, the trainer's experts are Hugging Face's, and a hook gets
# their tokens.

MOST_ROWS = 4096


class Observer:
    """Statistics of one rank, keyed by (kind, layer); the kinds are "activation" and "gradient".

    Args:
        modules: layers by name, experts by their module's name. Without ``rollout``, layers outside FP8 are skipped.
        rollout: the rollout's quantization, if the trainer's layers are BF16. Then only activations are measured.
    """

    def __init__(self, modules: Mapping[str, nn.Module], rollout: Fp8State | None = None) -> None:
        self._modules = modules
        self._rollout = rollout
        self._handles: dict[str, Any] = {}
        self._watched: list[Experts] = []
        self._figures: dict[tuple[str, str], Tensor] = {}
        self._of_experts: dict[tuple[str, str], list[Tensor]] = {}

    @property
    def figures(self) -> dict[tuple[str, str], Tensor]:
        """Rows of ``measure``; for experts, rows of ``worst_of``."""
        of_experts = {key: torch.cat(found) for key, found in self._of_experts.items()}
        return self._figures | {key: worst_of(rows[:, :8], rows[:, 8]) for key, rows in of_experts.items()}

    def clear(self) -> None:
        self._figures, self._of_experts = {}, {}

    def arm(self, names: Iterable[str]) -> None:
        """Forget the statistics and wait for the next forward of these layers."""
        self.disarm()
        self.clear()
        for name in names:
            module = self._modules.get(name)
            own = None if module is None else experts_of(module)
            if own is not None and own.plain is None:
                own.watch = self._watch(name, own)
                self._watched.append(own)
                continue
            state = module.fp8 if isinstance(module, Fp8Linear) else self._rollout
            if module is not None and state is not None and own is None:
                see = self._see_tokens if expert_modules(module) else self._see
                self._handles[name] = module.register_forward_hook(self._once(name, see, state))

    def disarm(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        for own in self._watched:
            own.watch = None
        self._handles, self._watched = {}, []

    def _once(self, name: str, see: Callable[..., None], state: Fp8State) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling() or name not in self._handles:
                return
            self._handles.pop(name).remove()
            see(name, state, module, arguments, output)

        return hook

    def _see(self, name: str, state: Fp8State, module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        self._figures["activation", name] = _figures(arguments[0], state, slices=True)
        if output.requires_grad and isinstance(module, Fp8Linear):

            def keep(grad: Tensor) -> None:  # as DGrad quantizes it, in groups along N
                self._figures["gradient", name] = _figures(grad, state, slices=False)

            output.register_hook(keep)

    @torch.no_grad()
    def _see_tokens(self, name: str, state: Fp8State, module: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
        """Measure each expert's tokens where the trainer computes experts in BF16: tokens [T, H], experts [T, k]."""
        x_TH, ids_Tk = arguments[:2]
        experts_P, order_P = ids_Tk.reshape(-1).sort(stable=True)
        tokens_P, count = order_P // ids_Tk.shape[1], whole_shape(module.down_proj)[0]
        rows = _each(lambda at: x_TH[tokens_P[at]], experts_P, count, 0, state, slices=True)
        self._of_experts.setdefault(("activation", name), []).append(rows)

    def _watch(self, name: str, own: Experts) -> Any:
        def see(kind: str, part: Any, experts_P: Tensor, take: Callable[[Tensor], Tensor]) -> None:
            rows = _each(take, experts_P, own.count, PROJECTIONS.index(part), own, slices=kind == "activation")
            self._of_experts.setdefault((kind, name), []).append(rows)

        return see


@torch.no_grad()
def _figures(x: Tensor, state: Fp8State, slices: bool) -> Tensor:
    x_MK = x.detach().reshape(-1, x.shape[-1])
    if x_MK.shape[0] > MOST_ROWS:  # a group never spans rows, so rows can be dropped
        x_MK = x_MK[_some(x_MK.shape[0], x.device)]
    x_MK = x_MK.to(torch.bfloat16).contiguous()
    x = state.backend.quantize_activation(x_MK, state.scale_format)
    return measure(x_MK, x.q, x.s, slices, x.form)


def _each(
    take: Callable[[Tensor], Tensor], experts_P: Tensor, count: int, part: int, state: Fp8State | Experts, slices: bool
) -> Tensor:
    """Rows of ``measure_each`` with the number of each expert's matrix, FP64 [E, 9]."""
    rows = _some(experts_P.shape[0], experts_P.device)
    x_MK = take(rows).detach().to(torch.bfloat16).contiguous()
    x = state.backend.quantize_activation(x_MK, state.scale_format)
    found = measure_each(x_MK, x.q, x.s, experts_P[rows].long(), count, slices)
    numbers = len(PROJECTIONS) * torch.arange(count, device=found.device, dtype=found.dtype) + part
    return torch.cat([found, numbers.unsqueeze(1)], 1)


def _some(rows: int, device: torch.device) -> Tensor:
    """At most ``MOST_ROWS`` evenly spaced rows."""
    return torch.linspace(0, rows - 1, min(rows, MOST_ROWS), device=device).round().long()
