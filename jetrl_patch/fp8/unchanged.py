"""A block in which a model's weights do not change: each is quantized once in it, however many passes read it.

On a GPU there is no cheap way to see that a weight has changed. Reading it costs two thirds of quantizing it, and reading the
result back stalls the stream. A tensor's version does not count what FSDP2 gathers, nor what an optimizer, an EMA or a checkpoint
writes by ``.data`` or by a kernel of its own. So the caller, who runs the steps, promises that nothing writes:

    forward(a micro-batch) · recompute · backward · forward(the next) · … · optimizer step
    └───────────── with unchanged_weights(model): ─────────────┘

Between the first forward and the optimizer step there are only passes and gathers of the same values. With A micro-batches and
activation checkpointing, a weight is quantized once instead of 3 A times. At the end of the block all bytes are dropped, so the
optimizer and the rollout find the memory free. Outside a block every pass quantizes. Inside it, so does a weight whose version,
shape, dtype or device has changed after all. A weight sync does not use the promise: it quantizes what it sends.

The promise is checked. A step of any torch optimizer, or loading a state dict into one of the layers, ends it. In each block,
every backward pass quantizes one layer again and compares it on the device; the next block takes another layer. The host reads
the result when the next block begins: one wait per optimizer step, and none between passes.

Each rank holds the FP8 bytes of its layers: 1 byte per weight, and 1 more for a backend whose DGrad reads W^T, which would
otherwise be transposed in every backward. If ranks free gathered weights after each layer, holding the bytes would cost the
memory that sharding saves. Then nothing is promised, and only a recomputation keeps its bytes, for the gradients that follow
(``linear``).
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

_turns = itertools.count()
#: the compared layers, each with the flag on the device that says whether it differed
_compared: list[tuple[str, Tensor]] = []


def _states(model: nn.Module) -> list[tuple[str, Fp8State]]:
    own = ((name, getattr(module, "fp8", None)) for name, module in model.named_modules())
    return [(name, state) for name, state in own if isinstance(state, Fp8State)] + list(expert_states(model))


def _audit(named: list[tuple[str, Fp8State]]) -> None:
    """Until the promise ends, compare the next layer of a rotation."""
    if named:
        name, state = named[next(_turns) % len(named)]
        state.audit = lambda differs: _compared.append((name, differs))


def _read() -> None:
    """Raise AuditError if a compared layer differed."""
    differing = sorted({name for name, flag in _compared if flag})
    _compared.clear()
    if differing:
        required, fix = "the same weight until the optimizer step", "remove what writes weights between its micro-batches"
        raise AuditError(explain(differing[0], required=required, found="another one", fix=fix))


@contextlib.contextmanager
def unchanged_weights(model: nn.Module, gradients: bool = True) -> Iterator[None]:
    """Promise that nobody changes a weight of ``model`` in this block, and hold the FP8 bytes of its layers.

    Do not use it if ranks free gathered weights between passes to save memory: the bytes of all layers add up.

    Args:
        gradients: whether backward passes follow, so W^T is made and held too.

    Raises AuditError if a weight was written in an earlier block, or on a CPU in this one.
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
    """Suspend ``unchanged_weights`` while weights are written. Nothing is held meanwhile. The promise holds again afterwards."""
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
