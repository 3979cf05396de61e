"""Tell the FP8 layers of verl's FSDP engines that their weights stay as they are from one optimizer step to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from jetrl_patch.gate import while_config


@while_config(lambda config: config.fp8_train)
def forward_backward_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPEngine.forward_backward_batch``, in which all micro-batches of an update pass and no weight is written.

    Ranks that share the weights free them after each layer: to hold the bytes of all layers would take what that saves. They
    quantize what they gather, or set ``fp8_all_gather``. With ``reshard_after_forward=False`` they hold whole BF16 weights, 2
    bytes each, until the backward pass, and the bytes are 2 more.
    """

    def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        from jetrl_patch.fp8.unchanged import unchanged_weights

        whole = self.device_mesh.size(-1) == 1 or not self.engine_config.reshard_after_forward
        with unchanged_weights(self.module, gradients=not forward_only) if whole else contextlib.nullcontext():
            return original(self, data, loss_function, forward_only)

    return forward_backward_batch
