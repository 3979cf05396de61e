"""The interface of a backend: the quantizers and the three GEMMs of a linear layer.

Shape legend: M tokens, N output features, K input features, G = ceil(K / 128). Operands are row-major and of type
``Quantized``; the layouts of their scales are in ``backends.quantize``.

| GEMM  | output  | left operand              | right operand             | contracts over |
| FProp | Y [M,N] | X e4m3 [M,K], s [M,G]     | W e4m3 [N,K], s [N,G]     | K              |
| DGrad | dX[M,K] | dY e4m3 [M,N], s [M,N/128]| W e4m3 [N,K], s blocks    | N              |
| WGrad | dW[N,K] | dY e4m3 [M,N], s [M/128,N]| X e4m3 [M,K], s [M/128,K] | M (tokens)     |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.kernels.formats import ScaleFormat

#: dY as DGrad reads it, layout "rows", and as WGrad reads it, layout "transposed"
BothLayouts = tuple[Quantized, Quantized]


class Backend(ABC):
    """Base class. Each row of an FProp result must depend only on its own input row; DGrad and WGrad run only in the trainer.

    DGrad and WGrad quantize dY in the scale format of their other operand.
    """

    name: str
    #: whether FProp reads a weight's scales per block where it has them
    blocks = False
    #: whether DGrad reads W^T, and makes it from W unless the weight has it
    reads_transposed = False

    @abstractmethod
    def quantize_activation(self, x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        """As ``backends.quantize.quantize_activation``, bit for bit."""

    @abstractmethod
    def quantize_tokens(self, x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        """As ``backends.quantize.quantize_tokens``, bit for bit."""

    @abstractmethod
    def quantize_weight(self, w_NK: Tensor, scale_format: ScaleFormat) -> Quantized:
        """As ``backends.quantize.quantize_weight``, bit for bit."""

    def quantize_weight_transposed(self, w_NK: Tensor, scale_format: ScaleFormat) -> Quantized:
        """``quantize_weight`` with W^T as ``dgrad`` reads it; only if ``reads_transposed``."""
        raise NotImplementedError

    @abstractmethod
    def gemm(self, x: Quantized, w: Quantized, out_dtype: torch.dtype, splits: int = 1) -> Tensor:
        """FProp: Y [M, N] in BF16 or FP32 (an unrounded partial sum). See ``quantize.fprop``.

        Scales of W per block or a packed W give the same bits as scales per row and plain bytes.

        Args:
            splits: ranges of K whose FP32 sums are added in ascending order.
        """

    def pack(self, w: Quantized) -> Tensor | None:
        """A copy of W laid out as FProp reads it fastest, for ``Quantized.packed``. It does not follow later writes to W.

        None: W already lies so, or holds NaN.
        """
        return None

    @abstractmethod
    def dgrad(self, dy_MN: Tensor, w: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dX [M, K] from the BF16 output gradient, which this method quantizes in 1x128 groups along N."""

    @abstractmethod
    def wgrad(self, dy_MN: Tensor, x: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dW [N, K]. Requantizes the saved activation from 1x128 to 128x1 groups and quantizes dY in 128x1 groups."""

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
            main: as for ``weight_gradient``.
            both: dY in both layouts if its producer quantized it. A backend that does not read it quantizes dY.
        """
        dx = None if w is None else self.dgrad(dy_MN, w, dtypes[0])
        return dx, None if dtypes[1] is None else self.weight_gradient(dy_MN, x, dtypes[1], main)

    def weight_gradient(self, dy_MN: Tensor, x: Quantized, out_dtype: torch.dtype, main: Tensor | None) -> Tensor | None:
        """``wgrad``. With a main gradient, FP32 [N, K], dW is added to it in FP32, and the result is None."""
        if main is None:
            return self.wgrad(dy_MN, x, out_dtype)
        main.add_(self.wgrad(dy_MN, x, torch.float32))
        return None

    @abstractmethod
    def fingerprint(self, w_NK: Tensor) -> int | None:
        """A value that changes with the weight's bytes; None if it would cost more than quantizing, or stall the stream."""

    def grouped(self, x: Tensor) -> Any:
        """``jetrl_patch.kernels.gemm_grouped`` if all experts of a mixture run in one launch for ``x``, else None."""
        return None

    def block_scales(self, s_NG: Tensor) -> Tensor:
        """Scales per block [ceil(N/128), G] from scales per row, for a weight whose rows share them; only if ``blocks``."""
        raise NotImplementedError

    def give_up_few_rows(self) -> bool:
        """Stop using the kernels for few rows, because a trial found other bits. Returns whether any were in use."""
        return False

    def compiled_rows(self, most: int) -> Sequence[int]:
        """Batch sizes up to ``most`` with which FProp compiles every kernel that it may need; by default none."""
        return ()

    def fprop(self, x_MK: Tensor, w: Quantized, out_dtype: torch.dtype = torch.bfloat16, splits: int = 1) -> Tensor:
        """Quantize a BF16 activation [M, K] in the weight's scale format and multiply, as a rollout's linear layer does."""
        return self.gemm(self.quantize_activation(x_MK, w.scale_format), w, out_dtype, splits)
