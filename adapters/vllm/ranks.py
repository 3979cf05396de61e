"""Exact mode's sums over tensor-parallel ranks, and the linears that use them."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tp_group, tensor_model_parallel_all_gather
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear, UnquantizedLinearMethod
from vllm.platforms import current_platform

from jetrl_patch.adapters.vllm.formats import logger
from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod
from jetrl_patch.adapters.vllm.ops import ExactLinearMethod
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.exact.logprob import head_linear_fp32, linear
from jetrl_patch.fp8.mixture import added

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce


# ---- Sums over ranks -----------------------------------------------------------------------------
# vLLM rounds each rank's partial sum to BF16 before its all-reduce, which may add in any order. In exact mode partial sums stay
# FP32, are added in rank order, and are rounded once. The trainer adds the same parts. There are three ways, with the same bits:
#
# - Every rank gathers all parts and adds them: a rank receives 4 (R - 1) bytes for each element of a sum of R ranks.
# - By slices: every rank receives one slice of all parts, adds and rounds it, and all gather the BF16 slices. That takes two
#   collectives and 6 (R - 1) / R bytes for each element.
# - One shot: with vLLM's custom all-reduce, each GPU adds the parts as it reads them from its peers' memory, and stores none.
#
# vLLM's custom all-reduce has two kernels. ``cross_device_reduce_1stage`` adds from rank 0 to the last rank on every GPU, in FP32
# for FP32 input. ``cross_device_reduce_2stage`` starts each rank's slice at that rank, so its order differs. One shot is used
# only where vLLM picks the first kernel. It is compared with gathering when the engine loads: if one bit differs on one rank, no
# rank uses it.
#
# vLLM chooses in ``CustomAllreduce::allreduce`` (csrc/custom_all_reduce.cuh):
# https://github.com/vllm-project/vllm/blob/main/csrc/custom_all_reduce.cuh

#: number of ranks -> bytes below which vLLM picks the one-stage kernel. Two ranks have no other kernel.
ONE_STAGE = {2: math.inf, 4: 512 << 10, 6: 256 << 10, 8: 256 << 10}
#: the variable that forces one of vLLM's kernels, and its values for the one-stage kernel
ALGORITHM, FIRST = "VLLM_CUSTOM_ALLREDUCE_ALGO", ("1stage", "oneshot")
#: sizes to test, in elements, besides the largest one-shot sum: one load of a thread, and several blocks
TRIED = (4, 5 * 1024)

#: by slices if a rank then receives this many bytes less: about what NVLink transfers while a collective starts. An estimate; no
#: bit depends on it
SAVED = 4 << 20

#: the communicator that has passed the test; it belongs to the groups of one engine
_proven: CustomAllreduce | None = None


def sum_over_ranks(partial_MN: torch.Tensor) -> torch.Tensor:
    """Add every rank's FP32 ``[M, N]`` and round once: BF16 ``[M, N]``, the same on all ranks."""
    comm = _proven
    if comm is not None and comm is _communicator() and _takes(comm, partial_MN):
        return _one_shot(comm, partial_MN).to(torch.bfloat16)
    ranks, size = get_tp_group().world_size, partial_MN.numel()
    if size % ranks or size * (ranks - 1) * (4 - 6 / ranks) < SAVED:
        return added(_gather(partial_MN))
    slice_1S = added(_exchanged(partial_MN.contiguous().view(-1)).view(ranks, 1, -1))
    return tensor_model_parallel_all_gather(slice_1S, dim=0).view(partial_MN.shape)


def choose_sum(device: torch.device) -> None:
    """Test the one-shot sum on this engine's ranks, and use it from now on if it has the bits of gathering.

    The ranks decide together, so all of them must call this. It logs the decision and the reason.
    """
    global _proven
    _proven, start = None, time.monotonic()
    ranks = get_tp_group().world_size
    if ranks == 1:
        return
    comm = _communicator()
    reasons, limits = zip(*gathered((_unfit(comm, ranks), getattr(comm, "max_size", 0))), strict=True)
    if not any(reasons):
        assert comm is not None
        if len({*limits}) == 1:
            reasons = tuple(gathered(_difference(comm, device)))
        else:
            reasons = (f"the buffers of the ranks have {list(limits)} bytes",)
    for rank, reason in enumerate(reasons):
        if reason:
            words = "jetrl_patch: the FP32 sums of %d ranks are not added in one shot: %s (rank %d)"
            logger.warning(words, ranks, reason, rank)
            return
    _proven = comm
    words = "jetrl_patch: the FP32 sums of %d ranks are added in one shot where they are small, tried in %.1f s"
    logger.info(words, ranks, time.monotonic() - start)


def gathered(mine: Any) -> Sequence[Any]:
    """All-gather an object over tensor-parallel ranks, in rank order."""
    group = get_tp_group()
    if group.world_size == 1:
        return [mine]
    everybody: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(everybody, mine, group=group.cpu_group)
    return everybody


def _gather(partial_MN: torch.Tensor) -> torch.Tensor:
    return tensor_model_parallel_all_gather(partial_MN.unsqueeze(0), dim=0)


def _exchanged(part: torch.Tensor) -> torch.Tensor:
    """Give each rank its slice of this part, FP32 [size], and return this rank's slice of every part, in rank order."""
    received = torch.empty_like(part)
    torch.distributed.all_to_all_single(received, part, group=get_tp_group().device_group)
    return received


def _communicator() -> CustomAllreduce | None:
    """vLLM's custom all-reduce of the tensor-parallel group, if it has one."""
    found: CustomAllreduce | None = getattr(get_tp_group().device_communicator, "ca_comm", None)
    return found


def _unfit(comm: CustomAllreduce | None, ranks: int) -> str:
    """Why these ranks cannot add in one shot; empty if they can."""
    if not current_platform.is_cuda():  # ROCm has kernels and limits of its own
        return f"the device is {current_platform.device_type}, not CUDA"
    if comm is None or comm.disabled:
        return "vLLM's custom all-reduce is off"
    if ranks not in ONE_STAGE:
        return f"vLLM's custom all-reduce has no kernel for {ranks} ranks"
    if getattr(comm, "mnnvl_only", False):  # since vLLM 0.27; its kernels then wait for peers whose memory they cannot read
        return "the ranks are on several nodes"
    if ranks > 2 and not comm.fully_connected:
        return "vLLM's custom all-reduce serves more than two GPUs only if NVLink connects them all"
    if os.environ.get(ALGORITHM, FIRST[0]) not in FIRST:
        return f"{ALGORITHM}={os.environ[ALGORITHM]}"
    return ""


def _takes(comm: CustomAllreduce, partial_MN: torch.Tensor) -> bool:
    """Whether vLLM adds these parts with its one-stage kernel. All ranks agree."""
    return 0 < partial_MN.nbytes < ONE_STAGE[comm.world_size] and comm.should_custom_ar(partial_MN)


def _one_shot(comm: CustomAllreduce, partial_MN: torch.Tensor) -> torch.Tensor:
    """The FP32 sum. In a graph capture vLLM records the launch; in the warm-up before it, the result is meaningless."""
    total_MN = comm.custom_all_reduce(partial_MN)
    assert total_MN is not None  # ``_takes`` has checked
    return total_MN


@torch.no_grad()
def _difference(comm: CustomAllreduce, device: torch.device) -> str:
    """How one shot differs from adding the gathered parts in rank order; empty if it does not.

    A rank that finds a difference continues, because the others wait for its parts.
    """
    found, largest = "", (int(min(ONE_STAGE[comm.world_size], comm.max_size)) - 1) // 16 * 4
    for size in (*(size for size in TRIED if size < largest), largest):
        for what, part_1N in _parts(size, comm.rank):
            mine_1N = part_1N.to(device)
            total_1N, parts_R1N = _one_shot(comm, mine_1N), _gather(mine_1N)
            expected_1N = functools.reduce(torch.add, parts_R1N)
            unequal = int((total_1N.view(torch.int32) != expected_1N.view(torch.int32)).sum())
            unequal += int((total_1N.to(torch.bfloat16).view(torch.int16) != added(parts_R1N).view(torch.int16)).sum())
            if unequal and not found:
                found = f"{size} {what} (results that differ: {unequal})"
    return found


def _parts(size: int, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (description, FP32 [1, size]): values of this rank whose sum depends on the order and is never NaN."""
    generator = torch.Generator("cpu").manual_seed(rank)

    def bits(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (1, size), generator=generator, device="cpu")

    yield "values of one magnitude", torch.randn(1, size, generator=generator, device="cpu")
    sign = bits(0, 2) * 2 - 1
    yield "values that cancel", sign * torch.tensor((1.0, 2.0**-24, 2.0**24, 2.0**100))[bits(0, 4)]
    yield "subnormal values", sign * bits(0, 1 << 23).to(torch.int32).view(torch.float32)
    yield "values with any exponent", sign * bits(0, 0x7F80 << 16).to(torch.int32).view(torch.float32)


# ---- Linears that exact mode replaces ------------------------------------------------------------

class ExactRowParallelLinear(RowParallelLinear):
    """Replaces ``RowParallelLinear``: rounds the sum over the ranks once. Does not change single-rank runs."""

    def forward(self, input_: torch.Tensor | Quantized) -> Any:
        """``input_ [..., K / ranks]`` BF16 or quantized -> ``[..., N]`` BF16, the same on every rank."""
        method = self.quant_method
        ours = isinstance(method, (QuantizedLinearMethod, ExactLinearMethod))
        if not ours or self.tp_size == 1 or not self.reduce_results:
            return super().forward(input_)
        if isinstance(input_, Quantized):  # this rank's part already
            output = sum_over_ranks(method.partial_sum(self, input_))
        else:
            if not self.input_is_parallel:
                input_ = input_.chunk(self.tp_size, dim=-1)[self.tp_rank].contiguous()
            partial_MN = method.partial_sum(self, input_.reshape(-1, input_.shape[-1]))
            output = sum_over_ranks(partial_MN).view(*input_.shape[:-1], -1)
        if self.bias is not None and not self.skip_bias_add:
            output = output + self.bias
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None


class ExactReplicatedLinear(ReplicatedLinear):
    """Replaces ``ReplicatedLinear``: some vLLM models build routers without a quantization, and routers need exact rows too."""

    quant_method: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.quant_method) is UnquantizedLinearMethod:
            self.quant_method = ExactLinearMethod()


class ExactGateLinear(ExactReplicatedLinear, GateLinear):
    """Replaces ``GateLinear``, the router of mixtures since vLLM 0.31: its kernel depends on the GPU and the number of rows."""

    #: whether the trainer does not round its logits
    jetrl_fp32: bool = False

    def forward(self, x: torch.Tensor) -> Any:
        """``x [T, H]`` BF16 -> logits ``[T, E]``: FP32 if the model or the trainer has them in FP32, otherwise BF16."""
        in_fp32 = self.jetrl_fp32 or self.weight.dtype == torch.float32
        logits = head_linear_fp32(x, self.weight.data) if in_fp32 else linear(x, self.weight.data, self.bias)
        return (logits, None) if self.return_bias else logits
