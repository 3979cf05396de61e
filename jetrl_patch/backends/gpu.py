"""The GPU backends: what they share, and this project's Triton kernels for Hopper and Blackwell.

Nothing here synchronizes with the device. Shape legend as in ``base``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.backends import get_backend, quantize
from jetrl_patch.backends.base import Backend, BothLayouts
from jetrl_patch.backends.capability import check_cublaslt, check_triton
from jetrl_patch.backends.quantize import Quantized, ScaleLayout
from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.kernels.formats import BLOCK, FP8, groups, split_width

# ---- What the GPU backends share: the quantizers, and the operands of DGrad and WGrad ------------

class GpuBackend(Backend):
    """Quantizes. Subclasses implement ``gemm``, ``dgrad_product`` and ``wgrad_product``."""

    reads_transposed = True

    def dgrad_product(self, dy: Quantized, w: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dX [M, K], BF16 or FP32, from dY in layout "rows" and W in blocks; reads W^T if W has it."""
        raise NotImplementedError

    def wgrad_product(self, dy: Quantized, x: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dW [N, K], BF16 or FP32, from both operands in layout "transposed"."""
        raise NotImplementedError

    def add_wgrad_product(self, dy: Quantized, x: Quantized, main: Tensor) -> None:
        """Add the FP32 product to a main gradient, FP32 [N, K]. A kernel that adds needs no buffer."""
        main.add_(self.wgrad_product(dy, x, torch.float32))

    def quantizers(self, x: Tensor) -> Any:
        """``jetrl_patch.kernels.quantize`` if it can run on the device of ``x``. None selects the formulas of the base class."""
        return _kernels() if x.device.type == "cuda" else None

    def producers(self, x: Tensor) -> Any:
        """``jetrl_patch.kernels.norm`` if the quantizers can run on the device of ``x``. None: no fused norms and activations."""
        return None if self.quantizers(x) is None else importlib.import_module("jetrl_patch.kernels.norm")

    def norm_rows(
        self, x_MK: Tensor, residual_MK: Tensor | None, weight_K: Tensor, eps: float, scale_format: ScaleFormat
    ) -> tuple[Quantized, Tensor | None]:
        """``kernels.norm.norm_quantize_rows`` with scales as the product reads them, and the sum with the residual."""
        from jetrl_patch.kernels.norm import norm_quantize_rows

        made = norm_quantize_rows(x_MK, residual_MK, weight_K, eps, scale_format, self.columns)
        return Quantized(made.q_MK, made.s_MG, "rows", scale_format), made.total_MK

    def silu_mul_rows(self, gate_MK: Tensor, up_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        """``kernels.silu.silu_mul_quantize_rows`` with scales as the product reads them."""
        from jetrl_patch.kernels.silu import silu_mul_quantize_rows

        made = silu_mul_quantize_rows(gate_MK, up_MK, scale_format, self.columns)
        return Quantized(made.q_MK, made.s_MG, "rows", scale_format)

    def grouped(self, x: Tensor) -> Any:
        """This project's kernels in every GPU backend. The libraries' grouped products read counts back, or choose by them."""
        return None if self.quantizers(x) is None else importlib.import_module("jetrl_patch.kernels.gemm_grouped")

    def quantize_activation(self, x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        kernels = self.quantizers(x_MK)
        if kernels is None:
            return super().quantize_activation(x_MK, scale_format)
        if x_MK.stride(-1) != 1:
            x_MK = x_MK.contiguous()
        q, s = kernels.quantize_rows(x_MK, scale_format, columns=self.columns)
        return Quantized(q, s, "rows", scale_format)

    def quantize_weight(self, w_NK: Tensor, scale_format: ScaleFormat) -> Quantized:
        """Also of a stack [S, N, K] where the kernels run."""
        kernels = self.quantizers(w_NK)
        if kernels is None:
            return super().quantize_weight(w_NK, scale_format)
        if w_NK.dtype not in (torch.bfloat16, torch.float32):
            w_NK = w_NK.to(torch.bfloat16)
        q, s = kernels.quantize_weight(w_NK, scale_format)
        return Quantized(q, s, "blocks", scale_format)

    def quantize_weight_transposed(self, w_NK: Tensor, scale_format: ScaleFormat) -> Quantized:
        kernels = self.quantizers(w_NK)
        if kernels is not None:
            q, s, q_KN = kernels.quantize_weight_transposed(w_NK, scale_format)
            return Quantized(q, s, "blocks", scale_format, transposed=q_KN)
        w = self.quantize_weight(w_NK, scale_format)
        w.transposed = transposed(w.q)
        return w

    def quantize_transposed(self, x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        """As ``quantize_tokens``, but in WGrad's layout: e4m3 [K, M], with M zero-padded to whole groups."""
        kernels = self.quantizers(x_MK)
        if kernels is not None:
            q_KM, s_GK = kernels.quantize_transposed(x_MK, scale_format)
        else:
            x_KM = F.pad(x_MK.t(), (0, groups(x_MK.shape[0]) * BLOCK - x_MK.shape[0]))
            q_KM, s_KG = quantize.quantize_activation(x_KM.contiguous(), scale_format)
            s_GK = s_KG.t().contiguous()
        return Quantized(q_KM, s_GK, "transposed", scale_format)

    def transposed(self, w: Quantized) -> Tensor:
        """W^T, e4m3 [K, N]: the libraries need a contiguous contraction dimension. Makes it if W does not have it."""
        if w.transposed is not None:
            return w.transposed
        if self.quantizers(w.q) is None:
            return transposed(w.q)
        from jetrl_patch.kernels.gemm_backward import transposed as by_tiles

        return by_tiles(w.q)

    def block_scales(self, s_NG: Tensor) -> Tensor:
        """In one launch where the kernels run."""
        if self.quantizers(s_NG) is None:
            return super().block_scales(s_NG)
        from jetrl_patch.kernels.gemm_common import block_scales

        return block_scales(s_NG)

    def fprop(
        self, x_MK: Tensor | Quantized, w: Quantized, out_dtype: torch.dtype = torch.bfloat16, splits: int = 1
    ) -> Tensor:
        """As the base class, but one opaque operator in a compiled graph: library calls and TMA descriptors cannot be traced."""
        if not torch.compiler.is_compiling():
            return super().fprop(x_MK, w, out_dtype, splits)
        return opaque_fprop(self.name, x_MK, w, out_dtype, splits)

    def dgrad(self, dy_MN: Tensor, w: Quantized, out_dtype: torch.dtype) -> Tensor:
        dy = self.quantize_activation(dy_MN, w.scale_format)
        return self.dgrad_product(dy, w, written(out_dtype)).to(out_dtype)

    def wgrad(self, dy_MN: Tensor, x: Quantized, out_dtype: torch.dtype) -> Tensor:
        _, dw = self.gradients(dy_MN, x, None, (out_dtype, out_dtype))
        assert dw is not None  # there is no main gradient
        return dw

    def gradients(
        self,
        dy_MN: Tensor,
        x: Quantized,
        w: Quantized | None,
        dtypes: tuple[torch.dtype, torch.dtype | None],
        main: Tensor | None = None,
        both: BothLayouts | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """As the base class, but reads dY once and writes both of its layouts, or uses the bytes it is given."""
        dx = dw = None
        kernels, (x_dtype, w_dtype) = self.quantizers(dy_MN), dtypes
        if kernels is None or w is None or w_dtype is None:
            both = None
        elif both is None:
            both = both_layouts(kernels.quantize_both(dy_MN, w.scale_format, self.columns), w.scale_format)
        if w is not None:
            dy = both[0] if both else self.quantize_activation(dy_MN, w.scale_format)
            dx = self.dgrad_product(dy, w, written(x_dtype)).to(x_dtype)
        if w_dtype is not None:
            dy = both[1] if both else self.quantize_transposed(dy_MN, x.scale_format)
            operand = self.regrouped(x) if x.shared is None else x.shared.get(lambda: self.regrouped(x))
            if main is not None:
                self.add_wgrad_product(dy, operand, main)
            else:
                dw = self.wgrad_product(dy, operand, written(w_dtype)).to(w_dtype)
        return dx, dw

    def regrouped(self, x: Quantized) -> Quantized:
        """WGrad's right operand, layout "transposed", from a saved activation in layout "rows"."""
        kernels = self.quantizers(x.q)
        if kernels is None:
            return self.quantize_transposed(quantize.dequantize_activation(x.q, x.s, torch.bfloat16), x.scale_format)
        q_KM, s_GK = kernels.requantize_tokens(x.q, x.s, x.scale_format)
        return Quantized(q_KM, s_GK, "transposed", x.scale_format)


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("jetrl_patch.kernels.quantize") if check_triton()[0] else None


def both_layouts(made: tuple[Tensor, Tensor, Tensor, Tensor], scale_format: ScaleFormat) -> BothLayouts:
    """The result of ``kernels.quantize.quantize_both``: (q [M, N], s [M, N/128], q [N, M padded], s [M/128, N])."""
    q, s, q_NM, s_GN = made
    return Quantized(q, s, "rows", scale_format), Quantized(q_NM, s_GN, "transposed", scale_format)


def written(out_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel writes a result that is wanted in ``out_dtype``: BF16 or FP32."""
    return torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32


def transposed(q: Tensor) -> Tensor:
    """The transpose of an e4m3 matrix, or of each of a stack, copied row-major."""
    return q.view(torch.uint8).mT.contiguous().view(FP8)


def check_widths(backend: str, *widths: int) -> None:
    """Raise ModelError for widths that are not multiples of 16: TMA loads need rows that start at multiples of 16 bytes."""
    wrong = [width for width in widths if width % 16]
    if wrong:
        found, fix = ", ".join(map(str, wrong)), 'use backend="triton", or keep the layer in BF16 with exclude='
        raise ModelError(explain(f"backend={backend!r}", required="widths that are multiples of 16", found=found, fix=fix))


def opaque_fprop(
    backend: str, x_MK: Tensor | Quantized, w: Quantized, out_dtype: torch.dtype = torch.bfloat16, splits: int = 1
) -> Tensor:
    """``Backend.fprop`` as one operator of a compiled graph."""
    sx: Tensor | None = None
    if isinstance(x_MK, Quantized):
        x_MK, sx = x_MK.q, x_MK.s
    layout, sw = ("channels", w.s) if w.layout == "channels" else ("rows", w.s_rows)
    y: Tensor = _fprop(x_MK, sx, w.q, sw, layout, backend, w.scale_format, out_dtype, splits, w.s_blocks)
    return y


@torch.library.custom_op("jetrl_patch::fp8_fprop", mutates_args=())
def _fprop(
    x_MK: Tensor, sx: Tensor | None, w_NK: Tensor, sw: Tensor, layout: str, backend: str, scale_format: str,
    out_dtype: torch.dtype, splits: int, s_blocks: Tensor | None,
) -> Tensor:  # fmt: skip
    form = cast(ScaleFormat, scale_format)
    x = x_MK if sx is None else Quantized(x_MK, sx, "rows", form)
    w = Quantized(w_NK, sw, cast(ScaleLayout, layout), form, s_blocks=s_blocks)
    return get_backend(backend).fprop(x, w, out_dtype, splits)


@_fprop.register_fake
def _(x_MK: Tensor, sx: Tensor | None, w_NK: Tensor, sw: Tensor, *others: Any) -> Tensor:
    out_dtype: torch.dtype = others[3]
    return x_MK.new_empty(x_MK.shape[0], w_NK.shape[0], dtype=out_dtype)


# ---- This project's Triton kernels: the contract's formula in FP8 ``wgmma`` ----------------------

class TritonBackend(GpuBackend):
    """Rows are independent by construction (see ``kernels.gemm``). The first product imports triton.

    If torch offers cuBLASLt's products with block scales, they compute the gradients in BF16: no other process has to match them.
    """

    name = "triton"
    blocks = True
    #: whether few rows use tiles of their own; not after a trial on this machine has found that these give other bits
    few_rows = True

    def __init__(self) -> None:
        self._cublaslt = check_cublaslt()[0]

    def quantizers(self, x: Tensor) -> Any:
        return importlib.import_module("jetrl_patch.kernels.quantize")  # never the formulas

    def gemm(self, x: Quantized, w: Quantized, out_dtype: torch.dtype, splits: int = 1) -> Tensor:
        from jetrl_patch.kernels.gemm import fprop

        sw = w.s_rows if w.s_blocks is None else w.s_blocks
        return fprop(x.q, x.s_rows, w.q, sw, out_dtype, splits, self.few_rows)

    def few(self) -> int:
        """The largest M for which one launch quantizes and multiplies."""
        from jetrl_patch.kernels import gemm

        return gemm.FEW_TOKENS if self.few_rows else 0

    def give_up_few_rows(self) -> bool:
        """No tiles of their own for up to 64 rows."""
        had, self.few_rows = self.few_rows, False
        return had

    def compiled_rows(self, most: int) -> Sequence[int]:
        """One batch that the product quantizes itself, and one for each tile of the quantizer and of the product."""
        from jetrl_patch.kernels import gemm_common, quantize

        return sorted({rows for rows in (1, self.few() + 1, gemm_common.FEW_ROWS + 1, quantize.FEW + 1) if rows <= most} | {most})

    def fprop(
        self, x_MK: Tensor | Quantized, w: Quantized, out_dtype: torch.dtype = torch.bfloat16, splits: int = 1
    ) -> Tensor:
        """As the base class. The product quantizes few rows itself: one launch, the same bits (``kernels.gemm``)."""
        # Only the trainer has splits > 1. Each rank of a rollout holds one range of K.
        apart = torch.compiler.is_compiling() or splits > 1 or w.layout == "channels"
        if apart or isinstance(x_MK, Quantized) or x_MK.shape[0] > self.few():
            return super().fprop(x_MK, w, out_dtype, splits)
        from jetrl_patch.kernels import gemm

        sw = w.s_rows if w.s_blocks is None else w.s_blocks
        x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
        return gemm.fprop_few(x_MK, w.q, sw, w.scale_format, out_dtype)

    def _by_cublaslt(self, out_dtype: torch.dtype, *widths: int) -> bool:
        return self._cublaslt and out_dtype == torch.bfloat16 and not any(width % 16 for width in widths)

    def dgrad_product(self, dy: Quantized, w: Quantized, out_dtype: torch.dtype) -> Tensor:
        if self._by_cublaslt(out_dtype, *w.shape):
            return cast("GpuBackend", get_backend("cublaslt")).dgrad_product(dy, w, out_dtype)
        from jetrl_patch.kernels.gemm_backward import dgrad

        return dgrad(dy.q, dy.s, w.q, w.s, out_dtype, w.transposed)

    def wgrad_product(self, dy: Quantized, x: Quantized, out_dtype: torch.dtype) -> Tensor:
        if self._by_cublaslt(out_dtype, dy.shape[0], x.shape[0]):
            return cast("GpuBackend", get_backend("cublaslt")).wgrad_product(dy, x, out_dtype)
        from jetrl_patch.kernels.gemm_backward import wgrad

        return wgrad(dy.q, dy.s, x.q, x.s, out_dtype)

    def add_wgrad_product(self, dy: Quantized, x: Quantized, main: Tensor) -> None:
        """The kernel adds where it would write."""
        if not main.is_contiguous():
            return super().add_wgrad_product(dy, x, main)
        from jetrl_patch.kernels.gemm_backward import wgrad

        wgrad(dy.q, dy.s, x.q, x.s, add_to=main)

# ---- MXFP8 on Blackwell: a Triton FProp, and torch for the rest. Compiled and interpreted, not yet run on a GPU

class MxBackend(Backend):
    """The quantizers are the reference formulas. The gradients are torch's products of q * s, which BF16 holds exactly."""

    name = "mx"

    def gemm(self, x: Quantized, w: Quantized, out_dtype: torch.dtype, splits: int = 1) -> Tensor:
        from jetrl_patch.kernels.gemm_mx import fprop

        if splits == 1:
            return fprop(x.q, x.s_rows, w.q, w.s_rows, out_dtype)
        K = x.shape[1]
        step = split_width(K, splits, w.block)
        ranges = ((x.columns(k, k + step), w.columns(k, k + step)) for k in range(0, K, step))
        parts = (fprop(a.q, a.s, b.q, b.s, torch.float32) for a, b in ranges)
        return functools.reduce(torch.add, parts).to(out_dtype)

    def fprop(
        self, x_MK: Tensor | Quantized, w: Quantized, out_dtype: torch.dtype = torch.bfloat16, splits: int = 1
    ) -> Tensor:
        """As the base class, but one opaque operator in a compiled graph."""
        if torch.compiler.is_compiling():
            return opaque_fprop(self.name, x_MK, w, out_dtype, splits)
        return super().fprop(x_MK, w, out_dtype, splits)

    def exact_dtype(self, scale_format: ScaleFormat, out_dtype: torch.dtype) -> torch.dtype:
        return written(out_dtype)
