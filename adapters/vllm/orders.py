"""Weight syncs with a vLLM server: its workers execute orders (``sync.orders``), and bytes travel over a group of their own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from jetrl_patch import session
from jetrl_patch.errors import JetrlError, SyncError
from jetrl_patch.sync.orders import Group, decode, obey


class GlooGroup:
    """The group of a trainer and of vLLM's workers on CPUs, with the ``broadcast`` of vLLM's PyNccl."""

    def __init__(self, host: str, port: int, rank: int, size: int, seconds: float) -> None:
        timeout = timedelta(seconds=seconds)
        store = dist.TCPStore(host, port, size, is_master=rank == 0, timeout=timeout)
        self._group = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Fill ``tensor`` from rank ``src``, and wait."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor], options).wait()


def join(host: str, port: int, rank: int, size: int, device: Any) -> Group:
    """Join a group beside the process's own: NCCL's on a GPU, gloo's on a CPU. Rank 0 listens at ``host`` and ``port``."""
    if torch.device(device).type == "cpu":
        return GlooGroup(host, port, rank, size, session.active_config().sync_timeout)
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    group: Group = PyNcclCommunicator(StatelessProcessGroup.create(host, port, rank, size), device=device)
    return group


class Obeys:
    """``worker.jetrl_order``. An error is part of the answer: vLLM's server would lose its text."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._group: Group | None = None

    def __call__(self, text: str) -> dict[str, Any]:
        """Execute an order. Returns {"answer": ...}, or {"error": "SyncError: ..."}."""
        try:
            return {"answer": self._obey(text)}
        except JetrlError as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _obey(self, text: str) -> Any:
        session.require_active("the vLLM worker")
        order = decode(text)
        if order is None:
            raise SyncError(f"the vLLM worker does not know the command {text!r}. Start the trainer with jetrl_patch.")
        if order["op"] == "join":
            rank = 1 + dist.get_rank()
            self._group = join(order["host"], order["port"], rank, order["size"], self._worker.device)
            return None

        def received() -> torch.Tensor:
            if self._group is None:
                raise SyncError("the vLLM worker has not joined the trainer's group. Start the trainer again.")
            flat = torch.empty(order["size"], dtype=torch.uint8, device=self._worker.device)
            self._group.broadcast(flat, src=0)
            return flat

        return obey(order, self._worker.jetrl_receiver, session.active_config(), received)
