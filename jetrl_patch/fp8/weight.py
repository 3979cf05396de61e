"""A quantized weight, as the products of a layer read it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

from jetrl_patch.fp8.quantize import expand_weight_scale


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """e4m3 [N, K] and its block scales [ceil(N/128), G]; of a weight that is held, also W^T [K, N] if the backend reads it."""

    q: Tensor
    s_blocks: Tensor
    turned: Tensor | None = None

    @functools.cached_property
    def s_rows(self) -> Tensor:
        """The same scales per row, [N, G], made when a product first reads them."""
        return expand_weight_scale(self.s_blocks, self.q.shape[0])
