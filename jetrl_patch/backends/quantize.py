"""``Quantized``, the type of every quantized matrix; the reference quantizers; the reference of FProp in FP64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.config.formats import FORMATS, Format, ScaleFormat
from jetrl_patch.kernels.formats import AMAX_FLOOR, BLOCK, FP8, FP8_MAX, check_fprop, groups, split_width

# ---- Quantized: bytes, their scales, and the layout of both -------------------------------------
# Shape legend: M tokens, N output features, K input features, G = ceil(K / 128). In a scale format without square blocks every
# 128 below is the format's block, and a weight has layout "rows": no scale spans several of its rows.

#: | layout       | bytes           | FP32 scales          | one scale for              | what it is                          |
#: | "rows"       | [M, K]          | [M, ceil(K/128)]     | 128 columns of a row       | X of FProp, dY of DGrad             |
#: | "tokens"     | [M, K]          | [ceil(M/128), K]     | 128 rows of a column       | the operands of WGrad               |
#: | "transposed" | [K, M padded]   | [ceil(M/128), K]     | as "tokens"                | the operands of WGrad on a GPU      |
#: | "blocks"     | [N, K]          | [ceil(N/128), G]     | 128 rows of 128 columns    | a weight, or a stack [S, N, K]      |
#: | "channels"   | [N, K]          | [N, 1]               | a row                      | a weight or X of a per-row format   |
ScaleLayout = Literal["rows", "tokens", "transposed", "blocks", "channels"]


@dataclass(slots=True, eq=False)
class Quantized:
    """A quantized matrix. It unpacks into its bytes and its scales: ``q, s = quantized``.

    Attributes:
        q: e4m3 bytes, or int8 in the INT8 format.
        s: FP32 scales.
        layout: which bytes share a scale; see the table above.
        scale_format: how the scales were rounded. A product quantizes its other operand the same way.
        transposed: W^T, e4m3 [K, N], for a DGrad that reads it.
        for_dgrad: without square blocks the weight quantized once more, in groups along N, layout "tokens".
        packed: a copy of W laid out for FProp; see ``Backend.pack``.
        s_blocks: a weight's scales per block. In layout "rows" it has them only if every 128 rows share a scale.
        shared: what the layers that read this input share in backward.
    """

    q: Tensor
    s: Tensor
    layout: ScaleLayout
    scale_format: ScaleFormat
    transposed: Tensor | None = None
    for_dgrad: Quantized | None = None
    packed: Tensor | None = None
    s_blocks: Tensor | None = None
    shared: Regrouped | None = None
    _s_rows: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.layout == "blocks":
            self.s_blocks = self.s

    def __iter__(self) -> Iterator[Tensor]:
        yield self.q
        yield self.s

    @property
    def shape(self) -> torch.Size:
        """That of the bytes."""
        return self.q.shape

    @property
    def form(self) -> Format:
        """Which elements share a scale."""
        return FORMATS[self.scale_format]

    @property
    def block(self) -> int:
        """How many columns share a scale per row."""
        return self.form.block

    @property
    def gradients(self) -> ScaleFormat:
        """The scale format of DGrad's and WGrad's operands."""
        return self.form.gradients or self.scale_format

    @property
    def s_rows(self) -> Tensor:
        """Scales per row and 128 columns, [rows, G]. Made from blocks or channels when a product first reads them."""
        if self.layout == "rows":
            return self.s
        if self._s_rows is None:
            if self.layout == "blocks":
                self._s_rows = expand_weight_scale(self.s, self.q.shape[0])
            elif self.layout == "channels":
                self._s_rows = self.s.expand(-1, groups(self.q.shape[1])).contiguous()
            else:
                raise ValueError(f'scales per row: required layout "rows", "blocks" or "channels", found {self.layout!r}')
        return self._s_rows

    def rows(self, at: Tensor | slice) -> Quantized:
        """These rows with their scales per row."""
        return Quantized(self.q[at], self.s_rows[at], "rows", self.scale_format)

    def columns(self, start: int, stop: int) -> Quantized:
        """Columns from ``start``, a multiple of the block, to before ``stop``, with their scales per row."""
        s_rows = self.s_rows[:, start // self.block : groups(stop, self.block)]
        return Quantized(self.q[:, start:stop], s_rows, "rows", self.scale_format)


class Regrouped:
    """An input in groups of 128 tokens, as WGrad reads it. Kept from its first reader in a backward pass to its last.

    The layers q, k and v read one input, as do gate and up. It is quantized and saved once, and the WGrad of each layer needs
    the same regrouped operand. Making that moves 2 bytes per element.
    """

    def __init__(self) -> None:
        self._readers: set[int] = set()
        self._left = 0
        self._made: tuple[int, Quantized] | None = None

    def add_reader(self, layer: object) -> Regrouped:
        """Expect ``get`` from this layer's backward. Recomputing the forward does not count again."""
        self._readers.add(id(layer))
        return self

    def get(self, make: Callable[[], Quantized]) -> Quantized:
        """The operand, in layout "tokens" or "transposed". Outside a backward pass, ``make`` runs every time."""
        number = torch._C._current_graph_task_id()
        if self._made is None or self._made[0] != number or number == -1:  # an earlier pass may have been aborted
            self._made, self._left = (number, make()), len(self._readers)
        value = self._made[1]
        self._left -= 1
        if self._left <= 0:
            self._made = None
        return value


# ---- The reference quantizers. This code is the contract: every faster implementation must equal it bit for bit
# For a group of values x:  amax = max |x|;  s = max(amax, 1e-10) / 448;  q = RNE-saturate(x / s) to e4m3fn. For e2m1 elements
# 448 is 6. In most scale formats s is rounded up to a power of two; then q * s is exact in BF16. Rounded up, no value saturates.
# The conversion that the MX specification suggests, 2^(floor(log2(amax)) - 8), clamps values above 448 * s, and pre-training
# with it diverged (arXiv 2506.08027, which rounds up as this does).
# A NaN or Inf in a group makes its scale NaN or Inf, so it stays visible.

#: the largest e2m1 value
FP4_MAX = 6.0
#: type of the elements -> its largest value
LARGEST = {"e4m3": FP8_MAX, "e2m1": FP4_MAX}


def scale_from_amax(amax: Tensor, scale_format: ScaleFormat) -> Tensor:
    """FP32 scales of groups, in the shape of ``amax``.

    Powers of two come from rounding the exponent bits up, because ``exp2(ceil(log2(s)))`` is wrong next to them.
    """
    form, scale = FORMATS[scale_format], amax.float().clamp(min=AMAX_FLOOR)
    scale = scale / scale.new_full((), LARGEST[form.elements])  # CUDA multiplies by the rounded reciprocal of a number
    return power_of_two(scale) if form.powers_of_two else scale


def power_of_two(scale: Tensor) -> Tensor:
    """FP32 values rounded up to powers of two. NaN and Inf stay."""
    bits = scale.view(torch.int32)
    rounded = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(torch.isfinite(scale), rounded, scale)


def two_levels(scale_MG: Tensor, one: bool) -> tuple[Tensor, Tensor]:
    """Split FP32 scales into e4m3 ones [M, G] and a power of two for each row, [M, 1], or for all of them (``one``), [1, 1].

    The greatest e4m3 scale is between 224 and 448. None is 0, by which nothing could be divided.
    """
    most = scale_MG.amax((0, 1), keepdim=True) if one else scale_MG.amax(1, keepdim=True)
    outer = power_of_two(most / most.new_full((), FP8_MAX))
    return to_fp8((scale_MG / outer).clamp(min=2.0**-9)), outer


def to_fp8(scaled: Tensor) -> Tensor:
    """Round to e4m3, ties to even, saturating; NaN stays NaN."""
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8)  # older torch casts overflow to NaN, so always clamp


def to_fp4(scaled: Tensor) -> Tensor:
    """Round to e2m1 (0, 0.5, 1, 1.5, 2, 3, 4 and 6), ties to even, saturating, as e4m3 bytes; NaN stays NaN."""
    value = scaled.clamp(-FP4_MAX, FP4_MAX)
    step = torch.where(value.abs() < 2, 0.5, torch.where(value.abs() < 4, 1.0, 2.0))
    return torch.copysign((value / step).round() * step, value).to(FP8)


#: type of the elements -> the rounding to it
ROUNDING = {"e4m3": to_fp8, "e2m1": to_fp4}


def quantize_activation(x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
    """Quantize BF16 [M, K] in 1x128 groups along the last dimension: x along K for FProp, output gradients along N for DGrad.

    Returns:
        Layout "rows": e4m3fn [M, K] and FP32 scales [M, G], for any K.
    """
    return _in_rows(x_MK, scale_format, one=False)


def _in_rows(x_MK: Tensor, scale_format: ScaleFormat, one: bool) -> Quantized:
    """``one``: the outer one of two levels of scales is that of the whole matrix, not of a row."""
    (M, K), form = x_MK.shape, FORMATS[scale_format]
    block, G = form.block, groups(K, form.block)
    x = F.pad(x_MK.float(), (0, G * block - K)).view(M, G, block)
    s_MG = scale_from_amax(x.abs().amax(-1), scale_format)
    if form.two_levels:
        inner, outer = two_levels(s_MG, one)
        s_MG = inner.float() * outer
    q_MK = ROUNDING[form.elements](x / s_MG.unsqueeze(-1)).view(M, G * block)[:, :K].contiguous()
    return Quantized(q_MK, s_MG, "rows", scale_format)


def quantize_tokens(x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
    """Quantize in 128x1 groups along M: the operands of WGrad, which contracts over tokens.

    Returns:
        Layout "tokens": e4m3fn [M, K] and FP32 scales [ceil(M / 128), K].
    """
    q_KM, s_KG = quantize_activation(x_MK.t(), scale_format)
    return Quantized(q_KM.t().contiguous(), s_KG.t().contiguous(), "tokens", scale_format)


def quantize_weight(w_NK: Tensor, scale_format: ScaleFormat) -> Quantized:
    """Quantize in 128x128 blocks. An FP32 master is rounded to BF16 first, so its bytes are those of the BF16 weight.

    Returns:
        Layout "blocks": e4m3fn [N, K] and FP32 scales [ceil(N / 128), G] (``weight_scale_inv`` of DeepSeek's checkpoints).
        Without square blocks layout "rows", with scales [N, ceil(K / block)].
    """
    if not FORMATS[scale_format].square:
        return _in_rows(w_NK.to(torch.bfloat16), scale_format, one=True)
    N, K = w_NK.shape
    w = w_NK.to(torch.bfloat16).float()
    w = F.pad(w, (0, groups(K) * BLOCK - K, 0, groups(N) * BLOCK - N)).view(groups(N), BLOCK, groups(K), BLOCK)
    s_blocks = scale_from_amax(w.abs().amax(dim=(1, 3)), scale_format)
    q = to_fp8(w / s_blocks[:, None, :, None]).view(groups(N) * BLOCK, groups(K) * BLOCK)
    return Quantized(q[:N, :K].contiguous(), s_blocks, "blocks", scale_format)


def expand_weight_scale(s_blocks: Tensor, rows: int) -> Tensor:
    """Expand block scales [ceil(N / 128), G] to per-row scales [N, G], so that any slice of rows keeps its scales."""
    return s_blocks.repeat_interleave(BLOCK, 0)[:rows].contiguous()


def block_scales(s_NG: Tensor) -> Tensor:
    """The reverse: block scales [ceil(N / 128), G] from per-row scales [N, G].

    A block whose rows differ (in a slice of rows that starts inside a block) gets NaN: an error that stays visible, and that the
    host need not wait for.
    """
    N, G = s_NG.shape
    whole = N // BLOCK * BLOCK
    low, high = s_NG[:whole].view(N // BLOCK, BLOCK, G).aminmax(dim=1)
    if whole < N:
        rest = s_NG[whole:].aminmax(dim=0)
        low, high = torch.cat((low, rest.min[None])), torch.cat((high, rest.max[None]))
    return torch.where(low == high, low, torch.nan)


def dequantize_activation(q_MK: Tensor, s_MG: Tensor, dtype: torch.dtype = torch.float32, block: int = BLOCK) -> Tensor:
    """q * s of 1x128 groups, [M, K] in ``dtype``, from e4m3 [M, K] and FP32 [M, G]."""
    return (q_MK.float() * s_MG.repeat_interleave(block, 1)[:, : q_MK.shape[1]]).to(dtype)


def dequantize_tokens(q_MK: Tensor, s_GK: Tensor, dtype: torch.dtype = torch.float32, block: int = BLOCK) -> Tensor:
    """q * s of 128x1 groups, [M, K] in ``dtype``, from e4m3 [M, K] and FP32 [ceil(M / 128), K]."""
    return (q_MK.float() * s_GK.repeat_interleave(block, 0)[: q_MK.shape[0]]).to(dtype)


def dequantize_weight(q_NK: Tensor, s_blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """q * s of 128x128 blocks, [N, K] in ``dtype``, from e4m3 [N, K] and FP32 [ceil(N / 128), G]."""
    return dequantize_activation(q_NK, expand_weight_scale(s_blocks, q_NK.shape[0]), dtype)


# ---- FProp in FP64, slow and independent of summation order ---------------------------------------
# A product of two e4m3fn values has 8 significant bits, and a dot product of 128 of them fits in FP64. So the dot product of a
# block is exact in any order.

def fprop(
    q_MK: Tensor, s_MG: Tensor, w_NK: Tensor, s_NG: Tensor, out_dtype: torch.dtype, splits: int = 1, block: int = BLOCK
) -> Tensor:
    """Y [M, N] = round(sum over blocks kb, ascending, of fma(dot128(qX, qW), sX * sW, acc)).

    ``s_NG`` holds the weight's scales per row. ``splits`` > 1 adds the FP32 partial sums of that many equal ranges of K in
    ascending order, as the all-reduce of a tensor-parallel rollout does. Raises as ``formats.check_fprop`` and ``split_width``.
    """
    check_fprop(q_MK, s_MG, w_NK, s_NG, out_dtype, block=block)
    (M, K), N = q_MK.shape, w_NK.shape[0]
    step = split_width(K, splits, block)
    x, w = q_MK.double(), w_NK.double()
    partials = []
    for start in range(0, K, step):
        acc = torch.zeros(M, N, dtype=torch.float64, device=q_MK.device)
        for k in range(start, min(start + step, K), block):
            dot = x[:, k : k + block] @ w[:, k : k + block].t()
            scale = (s_MG[:, k // block, None] * s_NG[None, :, k // block]).double()
            acc = (acc + dot * scale).float().double()  # FP32 accumulator, one rounding per block: an fma
        partials.append(acc.float())
    return functools.reduce(torch.add, partials).to(out_dtype)
