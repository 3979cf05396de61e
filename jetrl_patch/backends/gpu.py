"""Code shared by the GPU backends: the quantizers, and the operands of the DGrad and WGrad products.

Subclasses multiply quantized operands. Nothing here synchronizes with the device. Shape legend as in ``base``.
"""

from __future__ import annotations

import functools
import importlib
from abc import abstractmethod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.backends import get_backend, quantize
from jetrl_patch.backends.base import Backend
from jetrl_patch.backends.capability import check_triton
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.kernels.formats import BLOCK, FP8, Both, Regrouped, ScaleFormat, groups


class GpuBackend(Backend):
    """Quantizes; subclasses implement ``gemm``, ``dgrad_product`` and ``wgrad_product``."""

    #: whether the products read activation scales [M, G] with adjacent rows, strides (1, M rounded up to 4)
    columns = False

    reads_transposed = True

    @abstractmethod
    def dgrad_product(
        self,
        g_MN: Tensor,
        s_MG: Tensor,
        w_NK: Tensor,
        s_blocks: Tensor,
        out_dtype: torch.dtype,
        w_KN: Tensor | None = None,
    ) -> Tensor:
        """dX [M, K], BF16 or FP32, from e4m3 dY with groups along N and the weight in its blocks, also transposed if at hand."""

    @abstractmethod
    def wgrad_product(self, g_NM: Tensor, sg: Tensor, x_KM: Tensor, sx: Tensor, out_dtype: torch.dtype) -> Tensor:
        """dW [N, K], BF16 or FP32, from transposed operands with M a multiple of 128 and scales [M/128, N] and [M/128, K]."""

    def add_wgrad_product(self, g_NM: Tensor, sg: Tensor, x_KM: Tensor, sx: Tensor, main: Tensor) -> None:
        """Add the FP32 product to a main gradient, FP32 [N, K]. A product that adds by itself needs no buffer."""
        main.add_(self.wgrad_product(g_NM, sg, x_KM, sx, torch.float32))

    def quantizers(self, x: Tensor) -> Any:
        """``jetrl_patch.kernels.quantize`` if it can run for ``x``; None selects the formulas of ``backends.quantize``."""
        return _kernels() if x.device.type == "cuda" else None

    def producers(self, x: Tensor) -> Any:
        """``jetrl_patch.kernels.norm`` if the quantizers can run for ``x``; None leaves norm and activation unfused."""
        return None if self.quantizers(x) is None else importlib.import_module("jetrl_patch.kernels.norm")

    def norm_rows(
        self, x_MK: Tensor, residual_MK: Tensor | None, weight_K: Tensor, eps: float, scale_format: ScaleFormat
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """``kernels.norm.norm_quantize_rows``, with scales in the layout that the product reads."""
        from jetrl_patch.kernels.norm import norm_quantize_rows

        return norm_quantize_rows(x_MK, residual_MK, weight_K, eps, scale_format, self.columns)

    def silu_mul_rows(self, gate_MK: Tensor, up_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        """The bytes and scales of ``kernels.silu.silu_mul_quantize_rows``, likewise."""
        from jetrl_patch.kernels.silu import silu_mul_quantize_rows

        made = silu_mul_quantize_rows(gate_MK, up_MK, scale_format, self.columns)
        return made.q_MK, made.s_MG

    def grouped(self, x: Tensor) -> Any:
        """With every GPU backend the project's own: the libraries' grouped products read counts back, or choose by them."""
        return None if self.quantizers(x) is None else importlib.import_module("jetrl_patch.kernels.gemm_grouped")

    def quantize_activation(self, x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        kernels = self.quantizers(x_MK)
        if kernels is None:
            return quantize.quantize_activation(x_MK, scale_format)
        if x_MK.stride(-1) != 1:
            x_MK = x_MK.contiguous()
        return kernels.quantize_rows(x_MK, scale_format, columns=self.columns)

    def quantize_tokens(self, x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        kernels = self.quantizers(x_MK)
        return (kernels or quantize).quantize_tokens(x_MK, scale_format)

    def quantize_weight(self, w_NK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        kernels = self.quantizers(w_NK)
        if kernels is None:
            return quantize.quantize_weight(w_NK, scale_format)
        if w_NK.dtype not in (torch.bfloat16, torch.float32):
            w_NK = w_NK.to(torch.bfloat16)
        return kernels.quantize_weight(w_NK, scale_format)  # or each matrix of a stack [S, N, K]

    def quantize_weight_transposed(self, w_NK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor, Tensor]:
        kernels = self.quantizers(w_NK)
        if kernels is None:
            q, s = self.quantize_weight(w_NK, scale_format)
            return q, s, transposed(q)
        return kernels.quantize_weight_transposed(w_NK, scale_format)

    def quantize_transposed(self, x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        """As ``quantize_tokens``, but in WGrad's layout: e4m3 [K, M], with M zero-padded to whole groups."""
        kernels = self.quantizers(x_MK)
        if kernels is not None:
            return kernels.quantize_tokens(x_MK, scale_format, transposed=True, pad=True)
        x_KM = F.pad(x_MK.t(), (0, groups(x_MK.shape[0]) * BLOCK - x_MK.shape[0]))
        q_KM, s_KG = quantize.quantize_activation(x_KM.contiguous(), scale_format)
        return q_KM, s_KG.t().contiguous()

    def transposed(self, w_NK: Tensor) -> Tensor:
        """W^T, e4m3 [K, N]: the libraries need a contiguous contraction dimension. By tiles where the kernel can run."""
        if self.quantizers(w_NK) is None:
            return transposed(w_NK)
        from jetrl_patch.kernels.gemm_backward import transposed as by_tiles

        return by_tiles(w_NK)

    def fprop(
        self,
        x_MK: Tensor,
        w_NK: Tensor,
        s_NG: Tensor,
        scale_format: ScaleFormat,
        out_dtype: torch.dtype = torch.bfloat16,
        splits: int = 1,
        s_blocks: Tensor | None = None,
    ) -> Tensor:
        """As the base class, but one opaque operator in a compiled graph: library calls and TMA descriptors cannot be traced."""
        if torch.compiler.is_compiling():
            return _fprop(x_MK, w_NK, s_NG, self.name, scale_format, out_dtype, splits, s_blocks)
        return super().fprop(x_MK, w_NK, s_NG, scale_format, out_dtype, splits, s_blocks)

    def dgrad(
        self,
        g_MN: Tensor,
        w_NK: Tensor,
        s_blocks: Tensor,
        scale_format: ScaleFormat,
        out_dtype: torch.dtype,
        w_KN: Tensor | None = None,
    ) -> Tensor:
        q, s = self.quantize_activation(g_MN, scale_format)
        return self.dgrad_product(q, s, w_NK, s_blocks, written(out_dtype), w_KN).to(out_dtype)

    def wgrad(
        self, g_MN: Tensor, q_MK: Tensor, s_MG: Tensor, scale_format: ScaleFormat, out_dtype: torch.dtype
    ) -> Tensor:
        dw = self.weight_gradient(g_MN, q_MK, s_MG, scale_format, out_dtype)
        assert dw is not None  # there is no main gradient
        return dw

    def weight_gradient(
        self,
        g_MN: Tensor,
        q_MK: Tensor,
        s_MG: Tensor,
        scale_format: ScaleFormat,
        out_dtype: torch.dtype,
        shared: Regrouped | None = None,
        main: Tensor | None = None,
    ) -> Tensor | None:
        g = self.quantize_transposed(g_MN, scale_format)
        return self._wgrad(*g, q_MK, s_MG, scale_format, out_dtype, shared, main)

    def gradients(
        self,
        g_MN: Tensor,
        w_NK: Tensor,
        s_blocks: Tensor,
        q_MK: Tensor,
        s_MG: Tensor,
        scale_format: ScaleFormat,
        dtypes: tuple[torch.dtype, torch.dtype],
        shared: Regrouped | None = None,
        main: Tensor | None = None,
        both: Both | None = None,
        w_KN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As the base class, but reads dY once and writes both of its layouts, or reads the bytes of its producer."""
        kernels = self.quantizers(g_MN)
        if kernels is None:
            return super().gradients(g_MN, w_NK, s_blocks, q_MK, s_MG, scale_format, dtypes, shared, main, w_KN=w_KN)
        q, s, q_NM, sg = both or kernels.quantize_both(g_MN, scale_format, columns=self.columns, pad=True)
        dx = self.dgrad_product(q, s, w_NK, s_blocks, written(dtypes[0]), w_KN).to(dtypes[0])
        return dx, self._wgrad(q_NM, sg, q_MK, s_MG, scale_format, dtypes[1], shared, main)

    def _wgrad(
        self,
        g_NM: Tensor,
        sg: Tensor,
        q_MK: Tensor,
        s_MG: Tensor,
        scale_format: ScaleFormat,
        out_dtype: torch.dtype,
        shared: Regrouped | None,
        main: Tensor | None,
    ) -> Tensor | None:
        def regroup() -> tuple[Tensor, Tensor]:
            return self.regrouped(q_MK, s_MG, scale_format)

        x = regroup() if shared is None else shared.get(regroup)
        if main is None:
            return self.wgrad_product(g_NM, sg, *x, written(out_dtype)).to(out_dtype)
        self.add_wgrad_product(g_NM, sg, *x, main)
        return None

    def regrouped(self, q_MK: Tensor, s_MG: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        """WGrad's right operand, e4m3 [K, M] (M padded) and scales [M/128, K], from a saved activation in 1x128 groups."""
        if self.quantizers(q_MK) is None:
            return self.quantize_transposed(quantize.dequantize_activation(q_MK, s_MG, torch.bfloat16), scale_format)
        found: tuple[Tensor, Tensor] = importlib.import_module("jetrl_patch.kernels.quantize").requantize_tokens(
            q_MK, s_MG, scale_format, pad=True
        )
        return found

    def fingerprint(self, w_NK: Tensor) -> int | None:
        """None: each pass quantizes the weight, which moves 3 bytes per element, unless it is promised to stay (``unchanged``).

        Reading a fingerprint back would stall the stream, and no host-side key is safe: FSDP2 gathers new values into the
        same parameter and storage without a new version (``_unsafe_preserve_version_counter``), and so do writes by ``.data``.
        """
        return None


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("jetrl_patch.kernels.quantize") if check_triton()[0] else None


def written(out_dtype: torch.dtype) -> torch.dtype:
    """The dtype that a kernel writes for a result in ``out_dtype``: BF16 for BF16, otherwise FP32."""
    return torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32


def transposed(q: Tensor) -> Tensor:
    """The transpose of an e4m3 matrix, or of each of a stack, copied row-major."""
    return q.view(torch.uint8).mT.contiguous().view(FP8)


def check_widths(backend: str, *widths: int) -> None:
    """Raise ModelError for widths that are not multiples of 16: TMA loads need rows that start at multiples of 16 bytes."""
    wrong = [width for width in widths if width % 16]
    if wrong:
        raise ModelError(
            explain(
                f"backend={backend!r}",
                required="widths that are multiples of 16",
                found=", ".join(map(str, wrong)),
                fix='use backend="triton", or keep the layer in BF16 with exclude=',
            )
        )


@torch.library.custom_op("jetrl_patch::fp8_fprop", mutates_args=())
def _fprop(
    x_MK: Tensor,
    w_NK: Tensor,
    s_NG: Tensor,
    backend: str,
    scale_format: str,
    out_dtype: torch.dtype,
    splits: int,
    s_blocks: Tensor | None,
) -> Tensor:
    return get_backend(backend).fprop(x_MK, w_NK, s_NG, cast(ScaleFormat, scale_format), out_dtype, splits, s_blocks)


@_fprop.register_fake
def _(
    x_MK: Tensor,
    w_NK: Tensor,
    s_NG: Tensor,
    backend: str,
    scale_format: str,
    out_dtype: torch.dtype,
    splits: int,
    s_blocks: Tensor | None,
) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], w_NK.shape[0], dtype=out_dtype)
