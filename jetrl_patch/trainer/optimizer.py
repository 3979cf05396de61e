"""AdamW with torchao's quantized optimizer state, for parameters sharded in any way.

torchao's own classes give a state the parameter's shape, and keep it in FP32 unless the block size divides the number of values.
Shards seldom satisfy that: FSDP1 and ZeRO flatten parameters, and FSDP2 splits them unevenly. Here a state is [blocks,
block_size] over the flattened values, and the rest (less than a block) is a separate state in FP32. States are plain tensors even
for a DTensor parameter, because the update is elementwise.

Shape legend: n values in this process's shard of a parameter, B the block size (256), n = blocks * B + rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit as _AdamW8bit
from torchao.optim import AdamWFp8 as _AdamWFp8
from torchao.optim.adam import single_param_adam

#: shards with fewer values keep their state in FP32, as in bitsandbytes and torchao
SMALLEST = 4096

_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))  # name, signed
_NO_AMSGRAD = "amsgrad needs a third state, which this optimizer does not have. Turn amsgrad off."


class _OnShards(torch.optim.Optimizer):
    """The step of both classes. Their torchao base class quantizes."""

    block_size: int
    bf16_stochastic_round: bool
    _subclass_zeros: Callable[..., Tensor]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Skip torchao's override: it turns the learning rate into a tensor, which schedulers and loggers do not expect."""
        torch.optim.Optimizer.add_param_group(self, param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. Raises NotImplementedError with ``amsgrad``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # like torchao: the update is compiled for each shape, dtype and device. A model has more than the eight combinations that
        # torch.compile allows per function, and verl's optimizer offload, which moves step counters, doubles their number
        with torch._dynamo.utils.disable_cache_limit():
            for group in self.param_groups:
                if group["amsgrad"]:
                    raise NotImplementedError(_NO_AMSGRAD)
                for parameter in group["params"]:
                    if parameter.grad is not None and _local(parameter).numel():
                        self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        p_n, grad_n = _local(parameter).view(-1), _local(parameter.grad).reshape(-1)
        n, B = p_n.numel(), self.block_size
        blocks = n // B if n >= SMALLEST else 0
        cut = blocks * B
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name, signed in _MOMENTS:
                if blocks:
                    shape = p_n.new_empty(1).expand(blocks, B)  # carries shape, dtype and device; takes no memory
                    state[name] = self._subclass_zeros(shape, signed, B)
                if n > cut:
                    state[name + "_rest"] = torch.zeros_like(p_n[cut:])
        state["step"] += 1
        parts = [("", p_n[:cut].view(-1, B), grad_n[:cut].view(-1, B)), ("_rest", p_n[cut:], grad_n[cut:])]
        update = _update_on(p_n.device.type)
        for suffix, p, grad in parts:
            if not p.numel():
                continue
            update(
                p,
                grad,
                state["step"],
                *(state[name + suffix] for name, _ in _MOMENTS),
                None,
                torch.as_tensor(group["lr"], dtype=torch.float32),
                *group["betas"],
                group["weight_decay"],
                group["eps"],
                True,
                self.bf16_stochastic_round and p.dtype is torch.bfloat16,
            )


class AdamW8bit(_OnShards, _AdamW8bit):
    """AdamW with moments as 8-bit codes of a dynamic map (arXiv 2110.02861), one FP32 scale per 256 values."""


class AdamWFp8(_OnShards, _AdamWFp8):
    """AdamW with moments in e4m3, one FP32 scale per 256 values."""


def _local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, as a detached view."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@functools.cache
def _update_on(device_type: str) -> Any:
    """torchao's update: one compiled kernel on a GPU; eager on a CPU, which needs no compiler."""
    if device_type == "cpu":
        return single_param_adam
    return torch.compile(single_param_adam, fullgraph=True, dynamic=False)
