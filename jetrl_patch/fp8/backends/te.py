"""The rollout's counterpart of TransformerEngine's layers: TransformerEngine's quantizer and cuBLASLt.

The trainer keeps TransformerEngine's own layers. The rollout uses this backend under the same name, so both sides report
equal settings. TransformerEngine's GEMM for ``Float8BlockScaling`` is cuBLASLt's with block scales. With power-of-two
scales this project's quantizers give the same bytes; with FP32 scales this backend calls TransformerEngine's quantizer.
"""

from __future__ import annotations

from torch import Tensor

from jetrl_patch.fp8.backends.cublaslt import CublasLtBackend
from jetrl_patch.fp8.formats import ScaleFormat
from jetrl_patch.fp8.transformer_engine import quantize_rows


class TeBackend(CublasLtBackend):
    """For the rollout only; ``swap_linears`` refuses it for ``nn.Linear``."""

    name = "te"

    def quantize_activation(self, x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        if scale_format == "fp32" and x_MK.shape[0]:
            return quantize_rows(x_MK, scale_format)
        return super().quantize_activation(x_MK, scale_format)
