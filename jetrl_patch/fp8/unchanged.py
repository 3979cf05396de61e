"""A block in which a model's weights stay as they are: each is quantized once in it, however many passes read it.

On a GPU nothing cheap tells whether a weight has changed. To read it costs two thirds of quantizing it, and to read the result
back stalls the stream. A tensor's version counts neither what FSDP2 gathers nor what an optimizer, an EMA or a load of a
checkpoint writes by ``.data`` or by a kernel of its own. So nothing outside is found out here: who runs the steps promises it.

    forward(a micro-batch) · recompute · backward · forward(the next) · … · optimizer step
    └───────────── with unchanged_weights(model): ─────────────┘

Between the first forward and the optimizer step there are passes and gathers of the same values, and nothing else. With A
micro-batches and activation checkpointing, a weight is quantized once instead of 3 A times. At the end of the block all bytes
are dropped: none outlives the promise, and no memory is held while the optimizer or the rollout works. Outside of such a block
every pass quantizes again, as does a weight whose version, shape or dtype differs after all. A weight sync never relies on a
promise: it quantizes what it sends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from jetrl_patch.fp8.expert_layers import expert_states
from jetrl_patch.fp8.linear import PROMISES, Fp8State

__all__ = ["end_promise", "unchanged_weights"]


def _states(model: nn.Module) -> list[Fp8State]:
    own = (getattr(module, "fp8", None) for module in model.modules())
    found = [state for state in own if isinstance(state, Fp8State)]
    return found + list(expert_states(model))


@contextlib.contextmanager
def unchanged_weights(model: nn.Module) -> Iterator[None]:
    """Promise that in this block nobody writes another value to a weight of ``model``, and hold its FP8 bytes meanwhile.

    Do not use it where ranks free the gathered weights between passes to save memory: the bytes of all layers add up.
    """
    promise, states = object(), _states(model)
    PROMISES.add(promise)
    for state in states:
        state.promised(promise)
    try:
        yield
    finally:
        PROMISES.discard(promise)
        for state in states:
            state.promised(None)


def end_promise(model: nn.Module) -> None:
    """End the block for this model early, before its weights are written. A second call changes nothing."""
    for state in _states(model):
        state.promised(None)
