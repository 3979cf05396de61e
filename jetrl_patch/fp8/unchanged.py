"""A block in which a model's weights stay as they are: each is quantized once in it, however many passes read it.

On a GPU nothing cheap tells whether a weight has changed. To read it costs two thirds of quantizing it, and to read the result
back stalls the stream. A tensor's version counts neither what FSDP2 gathers nor what an optimizer, an EMA or a load of a
checkpoint writes by ``.data`` or by a kernel of its own. So nothing outside is found out here: who runs the steps promises it.

    forward(a micro-batch) · recompute · backward · forward(the next) · … · optimizer step
    └───────────── with unchanged_weights(model): ─────────────┘

Between the first forward and the optimizer step there are passes and gathers of the same values, and nothing else. With A
micro-batches and activation checkpointing, a weight is quantized once instead of 3 A times. At the end of the block all bytes
are dropped: none outlives the promise, and no memory is held while the optimizer or the rollout works. Outside of such a block
every pass quantizes again, as does a weight whose version, shape, dtype or device differs after all. A weight sync never relies
on a promise: it quantizes what it sends.

The promise is guarded. A step of any torch optimizer and a load of a state dict into one of the layers end it. In each block one
layer, another one every time, is quantized again by each backward pass and compared on the device; the host reads the result when
the next block begins: one wait in an optimizer step, and none among the passes.

What is held are the FP8 bytes of the layers, on every rank: 1 byte for each of their weights and, for a backend whose DGrad reads
W^T, 1 more. One launch writes both; otherwise every backward would transpose W once more. Where ranks free the gathered
weights after each layer, that would be the memory that sharding saves: there nothing is promised, and only a recomputation hands
its bytes to the gradients after it (``linear``).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jetrl_patch.errors import AuditError, explain
from jetrl_patch.fp8.convert import expert_states
from jetrl_patch.fp8.linear import PROMISES, Fp8State, Promise

__all__ = ["unchanged_weights", "written_weights"]

_turns = itertools.count()
#: layers that were compared, and whether they differed, which the host has not read yet
_compared: list[tuple[str, Tensor]] = []


def _states(model: nn.Module) -> list[tuple[str, Fp8State]]:
    own = ((name, getattr(module, "fp8", None)) for name, module in model.named_modules())
    return [(name, state) for name, state in own if isinstance(state, Fp8State)] + list(expert_states(model))


def _audit(named: list[tuple[str, Fp8State]]) -> None:
    """Compare the layer whose turn it is, from now until the promise ends."""
    if named:
        name, state = named[next(_turns) % len(named)]
        state.audit = lambda differs: _compared.append((name, differs))


def _read() -> None:
    """Raise AuditError if a compared layer differed."""
    differing = sorted({name for name, flag in _compared if flag})
    _compared.clear()
    if differing:
        fix = "remove what writes weights between the micro-batches of an optimizer step"
        raise AuditError(
            explain(differing[0], required="the same weight until the optimizer step", found="another one", fix=fix)
        )


@contextlib.contextmanager
def unchanged_weights(model: nn.Module, gradients: bool = True) -> Iterator[None]:
    """Promise that in this block nobody writes another value to a weight of ``model``, and hold its FP8 bytes meanwhile.

    Do not use it where ranks free the gathered weights between passes to save memory: the bytes of all layers add up.

    Args:
        gradients: backward passes follow, which read W^T. It is made and held only then.

    Raises:
        AuditError: in an earlier block, or on a CPU in this one, a weight was written.
    """
    _read()
    promise, named = Promise(gradients), _states(model)

    def end(*_: Any) -> None:
        PROMISES.discard(promise)
        for _name, state in named:
            state.promised(None)

    PROMISES.add(promise)
    for _, state in named:
        state.promised(promise)
    _audit(named)
    modules = [model.get_submodule(name) for name in {name for name, _ in named}]
    handles = [register_optimizer_step_pre_hook(end), *(m.register_load_state_dict_pre_hook(end) for m in modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        end()
    if all(flag.device.type == "cpu" for _, flag in _compared):
        _read()


@contextlib.contextmanager
def written_weights(model: nn.Module) -> Iterator[None]:
    """Inside a block of ``unchanged_weights``: here the weights are written. Nothing is held; afterwards they stay again."""
    named = _states(model)
    promises = [state.promise for _, state in named]
    held = PROMISES.intersection(promises)
    PROMISES.difference_update(held)
    for _, state in named:
        state.promised(None)
    yield
    PROMISES.update(held)
    for (_, state), promise in zip(named, promises, strict=True):
        state.promised(promise if promise in held else None)
    if held:
        _audit(named)
