"""The interface of a backend: the quantizers and the three GEMMs of a linear layer.

Shape legend: M tokens, N output features, K input features, G = ceil(K / 128). Operands are row-major.

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

from jetrl_patch.backends.quantize import QuantizedWeight
from jetrl_patch.kernels.formats import Both, Regrouped, ScaleFormat


class Backend(ABC):
    """Base class. Each row of an FProp result must depend only on its own input row; DGrad and WGrad run only in the trainer."""

    name: str
    #: whether FProp reads the weight's scales per block if it gets them
    blocks = False
    #: whether DGrad reads W^T, and makes it from W unless it is given
    reads_transposed = False

    @abstractmethod
    def quantize_activation(self, x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        """As ``backends.quantize.quantize_activation``, bit for bit."""

    @abstractmethod
    def quantize_tokens(self, x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        """As ``backends.quantize.quantize_tokens``, bit for bit."""

    @abstractmethod
    def quantize_weight(self, w_NK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        """As ``backends.quantize.quantize_weight``, bit for bit."""

    def quantize_weight_transposed(self, w_NK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor, Tensor]:
        """``quantize_weight``, and W^T, e4m3 [K, N], as ``dgrad`` reads it; only if ``reads_transposed``."""
        raise NotImplementedError

    @abstractmethod
    def gemm(
        self,
        q_MK: Tensor,
        s_MG: Tensor,
        w_NK: Tensor,
        s_NG: Tensor,
        out_dtype: torch.dtype,
        splits: int = 1,
        s_blocks: Tensor | None = None,
    ) -> Tensor:
        """FProp on quantized operands: [M, N] in BF16 or FP32 (an unrounded partial sum). See ``reference.fprop``.

        Args:
            s_blocks: the same scales per block [ceil(N/128), G], if every 128 rows share one. Only a backend with a kernel for
                block scales reads them; the result is the same without.
        """

    def pack(self, w_NK: Tensor) -> Tensor | None:
        """A copy of a weight that stays as it is, laid out as FProp reads it fastest; None: as it lies, or if it holds NaN."""
        return None

    def packed_gemm(
        self, q_MK: Tensor, s_MG: Tensor, w_NK: Tensor, s_NG: Tensor, packed: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        """``gemm``, bit for bit, with what ``pack`` made of W; only if it made something."""
        raise NotImplementedError

    def product(
        self, q_MK: Tensor, s_MG: Tensor, w: QuantizedWeight, out_dtype: torch.dtype, splits: int = 1
    ) -> Tensor:
        """``gemm`` of a whole weight. A backend that reads block scales overrides this and leaves those per row unmade."""
        return self.gemm(q_MK, s_MG, w.q, w.s_rows, out_dtype, splits, w.s_blocks)

    @abstractmethod
    def dgrad(
        self,
        g_MN: Tensor,
        w_NK: Tensor,
        s_blocks: Tensor,
        scale_format: ScaleFormat,
        out_dtype: torch.dtype,
        w_KN: Tensor | None = None,
    ) -> Tensor:
        """dX [M, K] from the BF16 output gradient [M, N], which this method quantizes in 1x128 groups along N.

        Args:
            w_KN: W^T of ``quantize_weight_transposed``, if it is at hand; only a backend with ``reads_transposed`` reads it.
        """

    @abstractmethod
    def wgrad(
        self, g_MN: Tensor, q_MK: Tensor, s_MG: Tensor, scale_format: ScaleFormat, out_dtype: torch.dtype
    ) -> Tensor:
        """dW [N, K]. Requantizes the saved FP8 activation from 1x128 to 128x1 groups and quantizes dY in 128x1 groups."""

    @abstractmethod
    def fingerprint(self, w_NK: Tensor) -> int | None:
        """A value that changes with the weight's bytes, or None if it would cost more than quantizing or stop the stream."""

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
        """``dgrad`` and ``wgrad`` together, in ``dtypes``. A backend may override this to read dY only once.

        Args:
            shared: what the layers that read this input share; only a backend that overrides this reads it.
            main: a main gradient, FP32 [N, K]: dW is added to it in FP32, and None returned in its place.
            both: dY in both layouts, if its producer quantized it; a backend that does not read it quantizes dY.
            w_KN: as for ``dgrad``.
        """
        dx = self.dgrad(g_MN, w_NK, s_blocks, scale_format, dtypes[0], w_KN)
        return dx, self.weight_gradient(g_MN, q_MK, s_MG, scale_format, dtypes[1], shared, main)

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
        """``wgrad``, or None where it was added to ``main``; the arguments are those of ``gradients``."""
        if main is None:
            return self.wgrad(g_MN, q_MK, s_MG, scale_format, out_dtype)
        main.add_(self.wgrad(g_MN, q_MK, s_MG, scale_format, torch.float32))
        return None

    def grouped(self, x: Tensor) -> Any:
        """``jetrl_patch.kernels.gemm_grouped`` if the experts of a mixture run in one launch for ``x``; None: expert by
        expert."""
        return None

    def block_scales(self, s_NG: Tensor) -> Tensor:
        """Block scales [ceil(N/128), G] of a weight whose rows share them, from those per row; only if ``blocks``."""
        raise NotImplementedError

    def give_up_few_rows(self) -> bool:
        """Stop using kernels of few rows, whose rows a trial has found to differ. Returns whether there were any in use."""
        return False

    def compiled_rows(self, most: int) -> Sequence[int]:
        """Numbers of rows up to ``most`` for which FProp together compiles every kernel that it may need; by default none."""
        return ()

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
        """Quantize a BF16 activation [M, K] and multiply, as a rollout's linear layer does."""
        q_MK, s_MG = self.quantize_activation(x_MK, scale_format)
        return self.gemm(q_MK, s_MG, w_NK, s_NG, out_dtype, splits, s_blocks)
