"""The GPU backends: what they share, and this project's Triton kernels for Hopper.

Nothing here synchronizes with the device. Shape legend as in ``base``.
"""

from __future__ import annotations

import functools
import importlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.backends import get_backend, quantize
from jetrl_patch.backends.base import Backend, BothLayouts
from jetrl_patch.backends.capability import check_triton
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.kernels.formats import BLOCK, FP8, ScaleFormat, groups

# ---- What the GPU backends share: the quantizers, and the operands of DGrad and WGrad ------------

class GpuBackend(Backend):
    """Quantizes; subclasses implement ``gemm``, ``dgrad_product`` and ``wgrad_product``."""

    #: whether the products read activation scales [M, G] with adjacent rows, strides (1, M rounded up to 4)
    columns = False

    reads_transposed = True

    @abstractmethod
    def dgrad_product(self, dy: Quantized, w: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dX [M, K], BF16 or FP32, from dY in layout "rows" and W in blocks, read transposed if it has that."""

    @abstractmethod
    def wgrad_product(self, dy: Quantized, x: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dW [N, K], BF16 or FP32, from both operands in layout "transposed"."""

    def add_wgrad_product(self, dy: Quantized, x: Quantized, main: Tensor) -> None:
        """Add the FP32 product to a main gradient, FP32 [N, K]. A product that adds by itself needs no buffer."""
        main.add_(self.wgrad_product(dy, x, torch.float32))

    def quantizers(self, x: Tensor) -> Any:
        """``jetrl_patch.kernels.quantize`` if it can run for ``x``; None selects the formulas of ``backends.quantize``."""
        return _kernels() if x.device.type == "cuda" else None

    def producers(self, x: Tensor) -> Any:
        """``jetrl_patch.kernels.norm`` if the quantizers can run for ``x``; None leaves norm and activation unfused."""
        return None if self.quantizers(x) is None else importlib.import_module("jetrl_patch.kernels.norm")

    def norm_rows(
        self, x_MK: Tensor, residual_MK: Tensor | None, weight_K: Tensor, eps: float, scale_format: ScaleFormat
    ) -> tuple[Quantized, Tensor | None]:
        """``kernels.norm.norm_quantize_rows``, with scales as the product reads them, and the sum with the residual."""
        from jetrl_patch.kernels.norm import norm_quantize_rows

        q, s, total = norm_quantize_rows(x_MK, residual_MK, weight_K, eps, scale_format, self.columns)
        return Quantized(q, s, "rows", scale_format), total

    def silu_mul_rows(self, gate_MK: Tensor, up_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        """``kernels.silu.silu_mul_quantize_rows``, likewise."""
        from jetrl_patch.kernels.silu import silu_mul_quantize_rows

        made = silu_mul_quantize_rows(gate_MK, up_MK, scale_format, self.columns)
        return Quantized(made.q_MK, made.s_MG, "rows", scale_format)

    def grouped(self, x: Tensor) -> Any:
        """This project's kernels in every GPU backend: the libraries' grouped products read counts back, or choose by them."""
        return None if self.quantizers(x) is None else importlib.import_module("jetrl_patch.kernels.gemm_grouped")

    def quantize_activation(self, x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        kernels = self.quantizers(x_MK)
        if kernels is None:
            return quantize.quantize_activation(x_MK, scale_format)
        if x_MK.stride(-1) != 1:
            x_MK = x_MK.contiguous()
        q, s = kernels.quantize_rows(x_MK, scale_format, columns=self.columns)
        return Quantized(q, s, "rows", scale_format)

    def quantize_tokens(self, x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        kernels = self.quantizers(x_MK)
        q, s = (kernels or quantize).quantize_tokens(x_MK, scale_format)
        return Quantized(q, s, "tokens", scale_format)

    def quantize_weight(self, w_NK: Tensor, scale_format: ScaleFormat) -> Quantized:
        kernels = self.quantizers(w_NK)
        if kernels is None:
            return quantize.quantize_weight(w_NK, scale_format)
        if w_NK.dtype not in (torch.bfloat16, torch.float32):
            w_NK = w_NK.to(torch.bfloat16)
        q, s = kernels.quantize_weight(w_NK, scale_format)  # or each of a stack [S, N, K]
        return Quantized(q, s, "blocks", scale_format)

    def quantize_weight_transposed(self, w_NK: Tensor, scale_format: ScaleFormat) -> Quantized:
        kernels = self.quantizers(w_NK)
        if kernels is None:
            w = self.quantize_weight(w_NK, scale_format)
            w.transposed = transposed(w.q)
            return w
        q, s, q_KN = kernels.quantize_weight_transposed(w_NK, scale_format)
        return Quantized(q, s, "blocks", scale_format, transposed=q_KN)

    def quantize_transposed(self, x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        """As ``quantize_tokens``, but in WGrad's layout: e4m3 [K, M], with M zero-padded to whole groups."""
        kernels = self.quantizers(x_MK)
        if kernels is not None:
            q_KM, s_GK = kernels.quantize_tokens(x_MK, scale_format, transposed=True, pad=True)
        else:
            x_KM = F.pad(x_MK.t(), (0, groups(x_MK.shape[0]) * BLOCK - x_MK.shape[0]))
            q_KM, s_KG = quantize.quantize_activation(x_KM.contiguous(), scale_format)
            s_GK = s_KG.t().contiguous()
        return Quantized(q_KM, s_GK, "transposed", scale_format)

    def transposed(self, w: Quantized) -> Tensor:
        """W^T, e4m3 [K, N], if W has none: the libraries need a contiguous contraction dimension."""
        if w.transposed is not None:
            return w.transposed
        if self.quantizers(w.q) is None:
            return transposed(w.q)
        from jetrl_patch.kernels.gemm_backward import transposed as by_tiles

        return by_tiles(w.q)

    def fprop(self, x_MK: Tensor, w: Quantized, out_dtype: torch.dtype = torch.bfloat16, splits: int = 1) -> Tensor:
        """As the base class, but one opaque operator in a compiled graph: library calls and TMA descriptors cannot be traced."""
        if torch.compiler.is_compiling():
            return _fprop(x_MK, w.q, w.s_rows, self.name, w.scale_format, out_dtype, splits, w.s_blocks)
        return super().fprop(x_MK, w, out_dtype, splits)

    def dgrad(self, dy_MN: Tensor, w: Quantized, out_dtype: torch.dtype) -> Tensor:
        dy = self.quantize_activation(dy_MN, w.scale_format)
        return self.dgrad_product(dy, w, written(out_dtype)).to(out_dtype)

    def wgrad(self, dy_MN: Tensor, x: Quantized, out_dtype: torch.dtype) -> Tensor:
        dw = self.weight_gradient(dy_MN, x, out_dtype, None)
        assert dw is not None  # there is no main gradient
        return dw

    def weight_gradient(self, dy_MN: Tensor, x: Quantized, out_dtype: torch.dtype, main: Tensor | None) -> Tensor | None:
        return self._weight_gradient(self.quantize_transposed(dy_MN, x.scale_format), x, out_dtype, main)

    def gradients(
        self,
        dy_MN: Tensor,
        x: Quantized,
        w: Quantized | None,
        dtypes: tuple[torch.dtype, torch.dtype | None],
        main: Tensor | None = None,
        both: BothLayouts | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """As the base class, but reads dY once and writes both of its layouts, or reads the bytes of its producer."""
        kernels = self.quantizers(dy_MN)
        if kernels is None or w is None or dtypes[1] is None:
            return super().gradients(dy_MN, x, w, dtypes, main)
        if both is None:
            made = kernels.quantize_both(dy_MN, w.scale_format, columns=self.columns, pad=True)
            both = both_layouts(made, w.scale_format)
        dx = self.dgrad_product(both[0], w, written(dtypes[0])).to(dtypes[0])
        return dx, self._weight_gradient(both[1], x, dtypes[1], main)

    def _weight_gradient(self, dy: Quantized, x: Quantized, out_dtype: torch.dtype, main: Tensor | None) -> Tensor | None:
        operand = self.regrouped(x) if x.shared is None else x.shared.get(lambda: self.regrouped(x))
        if main is None:
            return self.wgrad_product(dy, operand, written(out_dtype)).to(out_dtype)
        self.add_wgrad_product(dy, operand, main)
        return None

    def regrouped(self, x: Quantized) -> Quantized:
        """WGrad's right operand, layout "transposed", from a saved activation in layout "rows"."""
        if self.quantizers(x.q) is None:
            return self.quantize_transposed(quantize.dequantize_activation(x.q, x.s, torch.bfloat16), x.scale_format)
        kernels = importlib.import_module("jetrl_patch.kernels.quantize")
        q_KM, s_GK = kernels.requantize_tokens(x.q, x.s, x.scale_format, pad=True)
        return Quantized(q_KM, s_GK, "transposed", x.scale_format)

    def fingerprint(self, w_NK: Tensor) -> int | None:
        """None: each pass quantizes the weight, which moves 3 bytes per element, unless a promise holds (``fp8.unchanged``).

        Reading a fingerprint back would stall the stream, and no key on the host is safe. FSDP2 gathers new values into the same
        parameter and storage without a new version (``_unsafe_preserve_version_counter``), and ``.data`` writes the same way.
        """
        return None


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("jetrl_patch.kernels.quantize") if check_triton()[0] else None


def both_layouts(made: tuple[Tensor, Tensor, Tensor, Tensor], scale_format: ScaleFormat) -> BothLayouts:
    """What ``kernels.quantize.quantize_both`` made of dY: (q [M, N], s [M, N/128], q [N, M padded], s [M/128, N])."""
    q, s, q_NM, s_GN = made
    return Quantized(q, s, "rows", scale_format), Quantized(q_NM, s_GN, "transposed", scale_format)


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
    x_MK: Tensor, w_NK: Tensor, s_NG: Tensor, backend: str, scale_format: str, out_dtype: torch.dtype, splits: int,
    s_blocks: Tensor | None,
) -> Tensor:  # fmt: skip
    w = Quantized(w_NK, s_NG, "rows", cast(ScaleFormat, scale_format), s_blocks=s_blocks)
    return get_backend(backend).fprop(x_MK, w, out_dtype, splits)


@_fprop.register_fake
def _(
    x_MK: Tensor, w_NK: Tensor, s_NG: Tensor, backend: str, scale_format: str, out_dtype: torch.dtype, splits: int,
    s_blocks: Tensor | None,
) -> Tensor:  # fmt: skip
    return x_MK.new_empty(x_MK.shape[0], w_NK.shape[0], dtype=out_dtype)


# ---- This project's Triton kernels: the contract's formula in FP8 ``wgmma`` ----------------------

class TritonBackend(GpuBackend):
    """Rows are independent by construction (see ``kernels.gemm``). The first product imports triton."""

    name = "triton"
    blocks = True

    def quantizers(self, x: Tensor) -> Any:
        return importlib.import_module("jetrl_patch.kernels.quantize")  # always these kernels: no fallback to torch

    def gemm(self, x: Quantized, w: Quantized, out_dtype: torch.dtype, splits: int = 1) -> Tensor:
        from jetrl_patch.kernels.gemm import fprop

        s_rows = w.s_rows if w.s_blocks is None else None
        return fprop(x.q, x.s_rows, w.q, s_rows, out_dtype, splits, w.s_blocks)

    def block_scales(self, s_NG: Tensor) -> Tensor:
        """One launch; NaN for a block whose rows differ."""
        from jetrl_patch.kernels.gemm_common import block_scales

        return block_scales(s_NG)

    def few(self) -> int:
        """The largest M for which one launch quantizes and multiplies."""
        from jetrl_patch.kernels import gemm, gemm_common

        return min(gemm.FEW_TOKENS, gemm_common.few_rows())

    def give_up_few_rows(self) -> bool:
        """One tile for every number of rows."""
        from jetrl_patch.kernels import gemm_common

        return gemm_common.give_up_few_rows()

    def compiled_rows(self, most: int) -> Sequence[int]:
        """Quantized in the product; or before it, by the quantizer's two tiles, for one of the product's two."""
        from jetrl_patch.kernels import gemm_common, quantize

        return [rows for rows in (1, self.few() + 1, gemm_common.FEW_ROWS + 1, quantize.FEW + 1) if rows <= most]

    def fprop(self, x_MK: Tensor, w: Quantized, out_dtype: torch.dtype = torch.bfloat16, splits: int = 1) -> Tensor:
        """As the base class. Few rows are quantized inside the product: one launch, the same bits (``kernels.gemm``)."""
        # Only the trainer has splits > 1: each rank of a rollout holds one range of K.
        if splits == 1 and not torch.compiler.is_compiling() and x_MK.shape[0] <= self.few():
            from jetrl_patch.kernels import gemm

            s_rows = w.s_rows if w.s_blocks is None else None
            return gemm.fprop_few(x_MK, w.q, s_rows, w.scale_format, out_dtype, w.s_blocks)
        return super().fprop(x_MK, w, out_dtype, splits)

    def dgrad_product(self, dy: Quantized, w: Quantized, out_dtype: torch.dtype) -> Tensor:
        from jetrl_patch.kernels.gemm_backward import dgrad

        return dgrad(dy.q, dy.s, w.q, w.s, out_dtype, w.transposed)

    def wgrad_product(self, dy: Quantized, x: Quantized, out_dtype: torch.dtype) -> Tensor:
        from jetrl_patch.kernels.gemm_backward import wgrad

        return wgrad(dy.q, dy.s, x.q, x.s, out_dtype)

    def add_wgrad_product(self, dy: Quantized, x: Quantized, main: Tensor) -> None:
        """The kernel adds where it would write."""
        if not main.is_contiguous():
            return super().add_wgrad_product(dy, x, main)
        from jetrl_patch.kernels.gemm_backward import wgrad

        wgrad(dy.q, dy.s, x.q, x.s, add_to=main)
