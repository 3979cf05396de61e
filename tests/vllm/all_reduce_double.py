"""A test double of vLLM's custom all-reduce between GPUs: vLLM's own class on CPU tensors, except for its memory and kernels.

The two kernels, their limits and the choice between them follow csrc/custom_all_reduce.cu and .cuh. The order of their sums was
also read in the code for sm_90 in vLLM 0.33's wheel: one stage is a chain of FADD from rank 0 on, which flushes nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
from vllm.distributed.utils import is_weak_contiguous

Exchange = Callable[[torch.Tensor], Sequence[torch.Tensor]]
#: bytes that a thread loads at once
PACK = 16


class AllReduceDouble(CustomAllreduce):
    """``exchange`` gives a tensor to all ranks and returns theirs. ``kernels`` holds the stages of each launch.

    Args:
        flips: flips the last bit of this rank's first sum in each launch.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        ranks: int,
        *,
        max_size: int = 8 << 20,
        fully_connected: bool = True,
        flips: bool = False,
    ) -> None:
        self.disabled, self._IS_CAPTURING, self._ptr = False, False, 0
        self.exchange, self.rank, self.world_size = exchange, rank, ranks
        self.max_size, self.fully_connected, self.flips = max_size, fully_connected, flips
        self.kernels: list[int] = []

    def all_reduce(self, inp: torch.Tensor, *, out: Any = None, registered: bool = False) -> torch.Tensor:
        pack = PACK // inp.element_size()
        if not is_weak_contiguous(inp):
            raise RuntimeError("Expected _is_weak_contiguous(inp) to be true, but got false.")
        if inp.nbytes > self.max_size and not registered:
            raise RuntimeError("registered buffer is too small to contain the input")
        if inp.numel() % pack:
            raise RuntimeError(f"custom allreduce currently requires input length to be multiple of {pack}")
        if not inp.numel():
            raise RuntimeError("CUDA error: invalid configuration argument")  # no blocks
        parts = [part.reshape(-1, pack).float() for part in self.exchange(inp)]
        algorithm = os.environ.get("VLLM_CUSTOM_ALLREDUCE_ALGO", "")
        few = self.world_size == 2 or inp.nbytes < ((512 if self.world_size <= 4 else 256) << 10)
        if algorithm in ("2stage", "twoshot") or (not few and algorithm not in ("1stage", "oneshot")):
            self.kernels.append(2)
            each = len(parts[0]) // self.world_size
            bounds = [*(rank * each for rank in range(self.world_size)), len(parts[0])]  # the last rank has the rest
            slices = [slice(bounds[rank], bounds[rank + 1]) for rank in range(self.world_size)]
            total = torch.cat([self._sum(parts, rank, at) for rank, at in enumerate(slices)])
        else:
            self.kernels.append(1)
            total = self._sum(parts, 0, slice(None))
        if self.flips:
            total[0, 0].view(torch.int32).bitwise_xor_(1)
        return total.reshape(inp.shape).to(inp.dtype)

    @staticmethod
    def _sum(parts: Sequence[torch.Tensor], first: int, at: slice) -> torch.Tensor:
        """From rank ``first`` on."""
        total = parts[first][at].clone()
        for rank in range(1, len(parts)):
            total += parts[(first + rank) % len(parts)][at]
        return total


class Threads:
    """Ranks as threads of this process, each with its group and its double."""

    def __init__(self, ranks: int, **settings: Any) -> None:
        self._barrier, self._slots, self._local = threading.Barrier(ranks, timeout=60), [None] * ranks, threading.local()
        doubles = [AllReduceDouble(self.exchange, rank, ranks) for rank in range(ranks)]
        for double in doubles:
            double.__dict__.update(settings)
        self.doubles = doubles
        self.groups = [
            SimpleNamespace(world_size=ranks, device_communicator=SimpleNamespace(ca_comm=double)) for double in doubles
        ]

    def exchange(self, mine: Any) -> list[Any]:
        self._slots[self._local.rank] = mine
        self._barrier.wait()
        found = [*self._slots]
        self._barrier.wait()
        return found

    def group(self) -> Any:
        return self.groups[self._local.rank]

    def run(self, call: Callable[[int], Any]) -> list[Any]:
        """What ``call`` returns on each rank."""
        results: list[Any] = [None] * len(self.groups)

        def work(rank: int) -> None:
            self._local.rank = rank
            try:
                results[rank] = call(rank)
            except BaseException as error:
                results[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.groups))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [r for r in results if isinstance(r, BaseException)]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return results
