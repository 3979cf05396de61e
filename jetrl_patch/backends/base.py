"""The interface of a backend: the quantizers and the three GEMMs of a linear layer.

Shape legend: M tokens, N output features, K input features, G = ceil(K / 128). Operands are row-major and of type
``Quantized``. ``backends.quantize`` lists the layouts of their scales.

| GEMM  | output  | left operand              | right operand             | contracts over |
| FProp | Y [M,N] | X e4m3 [M,K], s [M,G]     | W e4m3 [N,K], s [N,G]     | K              |
| DGrad | dX[M,K] | dY e4m3 [M,N], s [M,N/128]| W e4m3 [N,K], s blocks    | N              |
| WGrad | dW[N,K] | dY e4m3 [M,N], s [M/128,N]| X e4m3 [M,K], s [M/128,K] | M (tokens)     |

In a scale format without square blocks every 128 is the format's block B. FProp reads W with scales [N, K/B], and DGrad reads W
quantized once more from BF16, with scales [N/B, K]. Every operand then has its blocks along the contraction, as the tensor cores
of Blackwell require (arXiv 2506.08027; TransformerEngine's recipe MXFP8BlockScaling).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jetrl_patch.backends import quantize
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.backends.rowwise import quantize_fp8_rows
from jetrl_patch.config.formats import FORMATS, ScaleFormat

#: dY as DGrad reads it, layout "rows", and as WGrad reads it, layout "transposed"
BothLayouts = tuple[Quantized, Quantized]


class Backend:
    """The reference formulas, in FP64 on any device: slow, but always available. Faster backends replace its methods.

    They must keep the bits of the quantizers, and each row of FProp must depend only on its own input row. DGrad and WGrad run
    only in the trainer. They quantize dY in the scale format of their other operand.
    """

    name = "torch"
    #: whether FProp can read a weight's scales per block
    blocks = False
    #: whether the products read activation scales [M, G] with adjacent rows, strides (1, M rounded up to 4)
    columns = False
    #: whether DGrad reads W^T. It transposes W if the weight has no W^T
    reads_transposed = False

    def quantize_activation(self, x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        """BF16 [M, K] in 1x128 groups, layout "rows". See ``quantize.quantize_activation``."""
        return quantize.quantize_activation(x_MK, scale_format)

    def quantize_tokens(self, x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        """BF16 [M, K] in 128x1 groups, layout "tokens". See ``quantize.quantize_tokens``."""
        return quantize.quantize_tokens(x_MK, scale_format)

    def quantize_weight(self, w_NK: Tensor, scale_format: ScaleFormat) -> Quantized:
        """[N, K], by its BF16 value, in 128x128 blocks, layout "blocks". See ``quantize.quantize_weight``."""
        return quantize.quantize_weight(w_NK, scale_format)

    def quantize_weight_transposed(self, w_NK: Tensor, scale_format: ScaleFormat) -> Quantized:
        """``quantize_weight``, with the W that ``dgrad`` reads: ``for_dgrad``, or of square blocks W^T."""
        if FORMATS[scale_format].square:
            raise NotImplementedError
        w = self.quantize_weight(w_NK, scale_format)
        w.for_dgrad = self.quantize_tokens(w_NK.to(torch.bfloat16), w.gradients)
        return w

    def gemm(self, x: Quantized, w: Quantized, out_dtype: torch.dtype, splits: int = 1) -> Tensor:
        """FProp: Y [M, N] in BF16 or FP32 (an unrounded partial sum). See ``quantize.fprop``.

        The bits do not depend on whether the scales of W are per block or per row, or on whether W is packed.

        Args:
            splits: ranges of K whose FP32 sums are added in ascending order.
        """
        return quantize.fprop(x.q, x.s_rows, w.q, w.s_rows, out_dtype, splits, w.block)

    def fprop(
        self, x_MK: Tensor | Quantized, w: Quantized, out_dtype: torch.dtype = torch.bfloat16, splits: int = 1
    ) -> Tensor:
        """``gemm`` of an activation [M, K]. A BF16 one is quantized first, in the scale format and granularity of the weight."""
        if isinstance(x_MK, Tensor):
            quantizer = quantize_fp8_rows if w.layout == "channels" else self.quantize_activation
            x_MK = quantizer(x_MK, w.scale_format)
        return self.gemm(x_MK, w, out_dtype, splits)

    def pack(self, w: Quantized) -> Tensor | None:
        """A copy of W laid out as FProp reads it fastest, for ``Quantized.packed``. It does not follow later writes to W.

        None if W already has this layout, or holds NaN.
        """
        return None

    def exact_dtype(self, scale_format: ScaleFormat, out_dtype: torch.dtype) -> torch.dtype:
        """The dtype of q * s in DGrad and WGrad, whose product torch rounds to the same dtype."""
        return torch.float64

    def dequantized(self, x: Quantized, dtype: torch.dtype) -> Tensor:
        """q * s, in layout "rows", "tokens" or "blocks"."""
        if x.layout == "tokens":
            return quantize.dequantize_tokens(x.q, x.s, dtype, x.block)
        return quantize.dequantize_activation(x.q, x.s_rows, dtype, x.block)

    def dgrad(self, dy_MN: Tensor, w: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dX [M, K] from the BF16 output gradient, which this method quantizes in 1x128 groups along N."""
        assert w.for_dgrad is not None or w.form.square  # see ``quantize_weight_transposed``
        read = w.for_dgrad or w
        dtype = self.exact_dtype(read.scale_format, out_dtype)
        dy = self.quantize_activation(dy_MN, read.scale_format)
        return (self.dequantized(dy, dtype) @ self.dequantized(read, dtype)).to(out_dtype)

    def wgrad(self, dy_MN: Tensor, x: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dW [N, K]. Requantizes the saved activation from 1x128 to 128x1 groups and quantizes dY in 128x1 groups."""
        dtype, x_MK = self.exact_dtype(x.gradients, out_dtype), self.dequantized(x, torch.bfloat16)
        dy, again = (self.quantize_tokens(t, x.gradients) for t in (dy_MN, x_MK))
        return (self.dequantized(dy, dtype).t() @ self.dequantized(again, dtype)).to(out_dtype)

    def gradients(
        self,
        dy_MN: Tensor,
        x: Quantized,
        w: Quantized | None,
        dtypes: tuple[torch.dtype, torch.dtype | None],
        main: Tensor | None = None,
        both: BothLayouts | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """dX and dW. A backend may override this to read dY only once.

        Args:
            w: None if dX is not wanted.
            dtypes: of dX and dW; None if dW is not wanted.
            main: a main gradient, FP32 [N, K]. dW is added to it in FP32, and None is returned for dW.
            both: dY in both layouts, if the operation that made dY quantized it. A backend that cannot use it quantizes dY.
        """
        dx = None if w is None else self.dgrad(dy_MN, w, dtypes[0])
        if dtypes[1] is None or main is None:
            return dx, None if dtypes[1] is None else self.wgrad(dy_MN, x, dtypes[1])
        main.add_(self.wgrad(dy_MN, x, torch.float32))
        return dx, None

    def fingerprint(self, w_NK: Tensor) -> int | None:
        """A value that changes with the weight's bytes. None (the default) if it would cost more than quantizing.

        On a GPU, reading it back would stall the stream, and no key on the host is safe: FSDP2 gathers new values into the same
        parameter and storage without a new version (``_unsafe_preserve_version_counter``), and ``.data`` writes the same way.
        So every pass quantizes the weight, which moves 3 bytes per element, unless ``fp8.unchanged`` applies.
        """
        return None

    def grouped(self, x: Tensor) -> Any:
        """``jetrl_patch.kernels.gemm_grouped`` if all experts of a mixture can run in one launch on the device of ``x``."""
        return None

    def block_scales(self, s_NG: Tensor) -> Tensor:
        """See ``quantize.block_scales``. Only if ``blocks``."""
        return quantize.block_scales(s_NG)

    def give_up_few_rows(self) -> bool:
        """Stop using the kernels for few rows, because a trial found other bits. Returns whether any were in use."""
        return False

    def compiled_rows(self, most: int) -> Sequence[int]:
        """Batch sizes up to ``most`` that together make FProp compile every kernel it may need. None by default.

        In the order in which this process should compile them: ranks that share a cache each take a part.
        """
        return ()

    def compile_ahead(self, rows: int, w: Quantized, splits: int) -> None:
        """Called by a trainer before FProp of ``rows`` rows. A backend that compiles for each number of rows does so here."""
