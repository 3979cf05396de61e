"""AdamW with torchao's quantized states, for parameters sharded in any way and gradients of any range.

The second moment of whole blocks is stored as its root. Squares of gradients that differ a thousandfold span twenty bits, more
than a byte's code: beside an outlier torchao's classes round small second moments to 0 and keep the first, so an update is
divided by almost nothing.

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
from torchao.optim.quant_utils import _fp32_to_bf16_sr
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import OptimStateFp8

from jetrl_patch.errors import ConfigError, explain

#: shards with fewer values keep their state in FP32, as in bitsandbytes and torchao
SMALLEST = 4096

#: names of the moments in blocks and in the rest, and whether they are signed
_MOMENTS = (("exp_avg", "exp_avg_rest", True), ("exp_avg_sq_root", "exp_avg_sq_rest", False))
_NO_AMSGRAD = "amsgrad needs a third state, which this optimizer does not have. Turn amsgrad off."


class _OnShards(torch.optim.Optimizer):
    """The step of both classes. Their torchao base class quantizes."""

    block_size: int
    bf16_stochastic_round: bool
    _subclass_zeros: Callable[..., Tensor]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Skip torchao's override: it turns the learning rate into a tensor, which schedulers and loggers do not expect."""
        torch.optim.Optimizer.add_param_group(self, param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states, those in FP32 as they are: torch casts them to the parameter's dtype.

        Raises ConfigError for the states of another optimizer, or of a jetrl_patch that stored the second moment itself.
        """
        rests = [rest for _, rest, _ in _MOMENTS]
        wanted, saved = {"step", *rests, *(blocks for blocks, _, _ in _MOMENTS)}, state_dict["state"]
        if others := sorted({name for state in saved.values() for name in state} - wanted):
            what, fix = f"the saved states of {type(self).__name__}", "load the checkpoint without its optimizer"
            raise ConfigError(explain(what, required=", ".join(sorted(wanted)), found=", ".join(others), fix=fix))
        super().load_state_dict(state_dict)
        for theirs, ours in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for index, parameter in zip(theirs["params"], ours["params"], strict=True):
                for name, value in saved.get(index, {}).items():
                    if name in rests:
                        self.state[parameter][name] = value.to(parameter.device, torch.float32)

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
            for whole, rest, signed in _MOMENTS:
                if blocks:
                    shape = p_n.new_empty(1).expand(blocks, B)  # carries shape, dtype and device; takes no memory
                    state[whole] = self._subclass_zeros(shape, signed, B)
                if n > cut:
                    state[rest] = torch.zeros_like(p_n[cut:], dtype=torch.float32)
        state["step"] += 1
        parts = [(0, p_n[:cut].view(-1, B), grad_n[:cut].view(-1, B)), (1, p_n[cut:], grad_n[cut:])]
        update = _update_on(p_n.device.type)
        for part, p, grad in parts:
            if not p.numel():
                continue
            update(
                p,
                grad,
                state["step"],
                *(state[names[part]] for names in _MOMENTS),
                torch.as_tensor(group["lr"], dtype=torch.float32),
                *group["betas"],
                group["weight_decay"],
                group["eps"],
                self.bf16_stochastic_round and p.dtype is torch.bfloat16,
            )


class AdamW8bit(_OnShards, _AdamW8bit):
    """AdamW with moments as 8-bit codes of a dynamic map (arXiv 2110.02861), one FP32 scale per 256 values."""


class AdamWFp8(_OnShards, _AdamWFp8):
    """AdamW with moments in e4m3, one FP32 scale per 256 values."""


def _local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, as a detached view."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def adamw(
    p: Tensor,
    grad: Tensor,
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    stochastic_bf16: bool,
) -> None:
    """One step of AdamW (arXiv 1711.05101) in FP32, in place, on parameters and states of one shape.

    ``exp_avg_sq`` holds the second moment if it is a plain tensor, its root if it is quantized.

    An update is at most as large as AdamW's can be at this step (see ``largest_update``), so what a state loses in rounding moves
    no weight further than a gradient could.
    """
    m = _values(exp_avg).lerp(grad.float(), 1 - beta1)
    quantized, second = isinstance(exp_avg_sq, OptimState8bit | OptimStateFp8), _values(exp_avg_sq)
    v = (second.square() if quantized else second).lerp(grad.float().square(), 1 - beta2)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v.sqrt() if quantized else v)
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    update = (m / correction1) / (v.sqrt() / correction2.sqrt() + eps)
    if beta2 > 0:
        most = largest_update(step, beta1, beta2)
        update = update.clamp(-most, most)
    before = p.float()
    new = before - lr * weight_decay * before - lr * update
    p.copy_(_fp32_to_bf16_sr(new) if stochastic_bf16 else new)


def largest_update(step: Tensor, beta1: float, beta2: float) -> Tensor:
    """The largest |m̂/√v̂| over all gradients up to this step, for β2 > 0.

    By Cauchy and Schwarz it is √Σ aᵢ²/bᵢ, where aᵢ and bᵢ are the weights of the i-th last gradient in m̂ and of its square in v̂.
    With betas of 0.9 and 0.999 it grows from 1 to 7.3.
    """
    ratio = beta1 * beta1 / beta2
    total = step if ratio == 1 else (1 - ratio**step) / (1 - ratio)
    found = ((1 - beta1) / (1 - beta1**step)) ** 2 * ((1 - beta2**step) / (1 - beta2)) * total
    return 1.0001 * found.sqrt()  # the powers are rounded to FP32


def _values(state: Tensor) -> Tensor:
    """A state in FP32."""
    return state.dequantize() if isinstance(state, OptimState8bit | OptimStateFp8) else state


@functools.cache
def _update_on(device_type: str) -> Any:
    """The update: one compiled kernel on a GPU; eager on a CPU, which needs no compiler."""
    if device_type == "cpu":
        return adamw
    return torch.compile(adamw, fullgraph=True, dynamic=False)
