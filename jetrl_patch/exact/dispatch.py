"""The implementation of the exact ops: C kernels on the CPU, Triton kernels on CUDA, or FP64 torch formulas anywhere.

In each of them, a row's bits do not depend on the rest of the batch. Different implementations give different bits, so both sides
of a run use the same one, chosen by ``Config.backend`` and the device type.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor

from jetrl_patch.backends import choose_backend
from jetrl_patch.backends.capability import refuse_exact_on
from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.native import ops

#: op -> the module of its Triton kernel
_TRITON = {
    **{"rms_norm": "norm", "silu_mul": "elementwise", "rotary": "elementwise", "bf16_gemm": "head", "route": "mixture"},
    **dict.fromkeys(("conv", "delta_inputs", "delta_rule", "delta_gradients"), "delta_net"),
}
_chosen: dict[str, str] = {}
#: (device type, head width) -> what computes attention instead of the implementation. "" for the implementation itself
attentions: dict[tuple[str, int], str] = {}


def configure(backend: str, device_type: str = "cpu", scale_format: ScaleFormat = "pow2") -> str:
    """Choose the implementation for ``Config.backend``, and remember it. Returns "native", "triton" or "torch".

    On CUDA every backend uses the Triton ops, except ``backend="torch"``, which uses the slow formulas.

    Raises ConfigError if the backend or the scale format cannot run here, or the ops cannot run on this GPU.
    """
    chosen = choose_backend(backend, device_type, scale_format)
    if device_type != "cpu":
        chosen = "triton" if backend != "torch" and device_type == "cuda" else "torch"
        if chosen == "triton":
            refuse_exact_on("cuda")
    _chosen[device_type] = chosen
    return chosen


def serving(device_type: str) -> str:
    """The implementation for a device type: "native", "triton" or "torch"."""
    if device_type not in _chosen:
        configure("auto", device_type)
    return _chosen[device_type]


def implementation(tensor: Tensor) -> str:
    """The implementation for this tensor's device: "native", "triton" or "torch"."""
    return serving(tensor.device.type)


def kernel_for(op: str, tensor: Tensor) -> Callable[..., Any] | None:
    """The C or Triton kernel of an op for this tensor's device; None if the torch formula serves.

    Both have the same arguments: those of the function of this name in ``native.ops``.
    """
    serves = implementation(tensor)
    if serves == "native":
        return cast("Callable[..., Any]", getattr(ops, op))
    if serves == "triton":
        return cast("Callable[..., Any]", getattr(importlib.import_module(f"jetrl_patch.kernels.{_TRITON[op]}"), op))
    return None


def kernels_serve(tensor: Tensor, unless_chosen: bool = False) -> bool:
    """Whether the Triton kernels were chosen for this tensor's device. Unlike ``implementation``, this never chooses.

    ``unless_chosen`` is the answer if nothing was chosen, as with ``align="linear"``.
    """
    chosen = _chosen.get(tensor.device.type)
    return unless_chosen if chosen is None else chosen == "triton"


def attention(q_THD: Tensor) -> str:
    """What computes the attention of these queries: an implementation, or what ``exact.trial`` chose instead."""
    return attentions.get((q_THD.device.type, q_THD.shape[-1])) or implementation(q_THD)


@contextlib.contextmanager
def attention_by(name: str, device_type: str, head_dim: int) -> Iterator[None]:
    """Within the block, ``name`` computes attention of this width."""
    before = dict(attentions)
    attentions[device_type, head_dim] = name
    try:
        yield
    finally:
        attentions.clear()
        attentions.update(before)


def chosen_attention(device_type: str) -> str:
    """What ``exact.trial`` chose for a device type instead of the implementation; "" for nothing."""
    return "+".join(sorted({name for (kind, _), name in attentions.items() if kind == device_type and name}))
