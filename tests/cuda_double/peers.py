"""Doubles of what joins the GPUs of one engine: NCCL, vLLM's custom all-reduce, and torch's symmetric memory.

Each rank is a process. Objects and tensors of the host travel by gloo. Tensors of the device have no values, so their collectives
check the tensors and are written to a log. ``compare`` requires that all ranks have the same one: otherwise GPUs would wait for
each other forever, or add the wrong parts.

The rules of the custom all-reduce are those of csrc/custom_all_reduce.cuh. A kernel reads the buffers of all ranks, so ranks need
the same captures, and addresses that a capture used are registered before its first replay. Its flags serve one launch at a time.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef

from tests.cuda_double import graphs
from tests.cuda_double.checks import address as address_of
from tests.cuda_double.checks import launches, need
from tests.cuda_wheels.h100_double import GPUS

#: ranks for which the library has kernels; an address of memory of the device that torch did not allocate begins with PEER
RANKS, PEER = (2, 4, 6, 8), 1 << 60
#: bytes of an IPC handle
HANDLE = 64
#: the collectives of this rank
log: list[str] = []
#: address -> tensor whose address was asked for
_asked: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def record(what: str, *more: object) -> None:
    """Count a collective and add it to the log."""
    launches[what] += 1
    state = graphs.State
    stream = "default" if state.stream is state.default else "other" if state.capture is None else "captured"
    log.append(" ".join(map(str, (what, *more, "on a stream that is", stream))))


def everybody(mine: Any) -> list[Any]:
    """All ranks' objects."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def compare() -> None:
    """Require that all ranks have entered the same collectives in the same order, and begin again."""
    logs = everybody(list(log))
    for number, entries in enumerate(zip(*logs)):
        need(len(set(entries)) == 1, "collective", number, "differs between the ranks:", *entries)
    need(len({*map(len, logs)}) == 1, "some ranks have entered more collectives:", *(there[-3:] for there in logs))
    log.clear()


def here() -> torch.device:
    """This rank's device."""
    return torch.device("cuda", dist.get_rank())


def on_device(tensor: Tensor, what: str) -> None:
    need(tensor.device == here(), what, "takes a tensor on", tensor.device)
    need(tensor.is_contiguous(), what, "takes strides", tensor.stride())


# ---- NCCL as vLLM's Python calls it, by addresses --------------------------------------------------

def address(tensor: Tensor) -> int:
    """``Tensor.data_ptr`` of the device."""
    found = address_of(tensor)
    _asked[found] = tensor
    return found


class Nccl:
    """``pynccl_wrapper.NCCLLibrary``."""

    def __init__(self, so_file: str | None = None) -> None:
        pass

    def has_symbol(self, name: str) -> bool:
        return False

    def ncclGetRawVersion(self) -> int:
        return 22800

    def ncclGetVersion(self) -> str:
        return "2.28.0"

    def ncclGetUniqueId(self) -> Any:
        from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

        return ncclUniqueId()

    def ncclCommInitRank(self, ranks: int, unique_id: Any, rank: int) -> int:
        need(graphs.State.capture is None, "ncclCommInitRank in a capture")
        return ranks

    def ncclAllReduce(self, send: Any, receive: Any, count: int, dtype: int, op: int, ranks: int, stream: Any) -> None:
        self._call("ncclAllReduce", send, receive, count, count, dtype, stream, op)

    def ncclAllGather(self, send: Any, receive: Any, count: int, dtype: int, ranks: int, stream: Any) -> None:
        self._call("ncclAllGather", send, receive, count, ranks * count, dtype, stream)

    def ncclBroadcast(self, send: Any, receive: Any, count: int, dtype: int, root: int, ranks: int, stream: Any) -> None:
        self._call("ncclBroadcast", receive, receive, count, count, dtype, stream, root)

    def ncclCommAbort(self, ranks: int) -> None:
        pass

    @staticmethod
    def _call(what: str, send: Any, receive: Any, sent: int, received: int, dtype: int, stream: Any, *more: Any) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum

        need(stream.value == graphs.State.stream.cuda_stream, what, "runs on a stream that is not the current one")
        for pointer, count in ((send, sent), (receive, received)):
            tensor = _asked.get(pointer.value)
            need(tensor is not None, what, "takes an address of nothing")
            assert tensor is not None
            on_device(tensor, what)
            need(tensor.numel() == count, what, "takes", count, "elements, found", tensor.numel())
            need(ncclDataTypeEnum.from_torch(tensor.dtype) == dtype, what, "takes another dtype than", tensor.dtype)
            graphs.used([tensor])
        record(what, sent, dtype, *more)


# ---- torch.distributed: tensors of the device ------------------------------------------------------

def collective(func: Any, args: tuple[Any, ...]) -> Any:
    """An operator of c10d on tensors of the device: of one process group, out of the first argument into the second."""
    name, ranks = func._schema.name.partition("::")[2], dist.ProcessGroup.unbox(args[2]).size()
    into, given = args[:2]
    need(name in ("alltoall_base_", "_allgather_base_"), name, "has no double")
    for tensor in (into, given):
        on_device(tensor, name)
    need(into.dtype == given.dtype, name, "takes", into.dtype, given.dtype)
    need(into.numel() == given.numel() * (ranks if name == "_allgather_base_" else 1), name, into.shape, given.shape)
    need(given.numel() % ranks == 0, name, "does not split", given.shape)
    graphs.used([into, given])
    record(name, given.numel(), given.dtype)
    work = Work.boxed(FakeWork())
    return work if name == "alltoall_base_" else (into, work)


# ---- vLLM's custom all-reduce ----------------------------------------------------------------------

class Custom:
    """One communicator, ``vllm::CustomAllreduce``."""

    ones: ClassVar[list[Custom]] = []
    allocated = 0
    #: the stream of the last launch, those that have waited for it since, and how often the host had waited for all
    last: ClassVar[tuple[Any, set[Any], int] | None] = None

    def __init__(self, rank: int, connected: bool) -> None:
        self.rank, self.connected = rank, connected
        self.registered: set[int] = set()
        #: addresses that captures use and that are not registered yet
        self.pending: list[int] = []
        Custom.ones.append(self)


def allocate_shared_buffer_and_handle(size: int) -> tuple[int, Tensor]:
    need(graphs.State.capture is None, "cudaMalloc in a capture")
    Custom.allocated += 1
    with unset_fake_temporarily():
        handle = torch.zeros(HANDLE, dtype=torch.uint8, device="cpu")
        handle[:8].copy_(torch.tensor([os.getpid(), Custom.allocated], dtype=torch.int32).view(torch.uint8))
    return PEER * 2 + Custom.allocated, handle


def open_mem_handle(mem_handle: Tensor) -> int:
    with unset_fake_temporarily():
        process, number = mem_handle[:8].view(torch.int32).tolist()
    need(process != os.getpid(), "cudaIpcOpenMemHandle opens a handle of its own process")
    return PEER + number


def init_custom_ar(ipc_tensors: list[int], rank_data: Tensor, rank: int, fully_connected: bool) -> int:
    need(len(ipc_tensors) in RANKS and 0 <= rank < len(ipc_tensors), "custom all-reduce of", len(ipc_tensors), "ranks")
    on_device(rank_data, "init_custom_ar")
    Custom(rank, fully_connected)
    return len(Custom.ones)


def register_buffer(fa: int, ipc_tensors: list[int]) -> None:
    this = Custom.ones[fa - 1]
    this.registered.add(ipc_tensors[this.rank])


def all_reduce(fa: int, inp: Tensor, out: Tensor, reg_buffer: int, reg_buffer_sz_bytes: int) -> None:
    this, captured = Custom.ones[fa - 1], graphs.State.capture is not None
    for tensor in (inp, out):
        on_device(tensor, "all_reduce")
    need(inp.dtype == out.dtype and inp.numel() == out.numel(), "all_reduce:", inp.dtype, inp.shape, out.dtype, out.shape)
    need(inp.dtype in (torch.float32, torch.float16, torch.bfloat16), "all_reduce only supports float32, float16 and bfloat16")
    need(inp.nbytes % 16 == 0, "custom allreduce currently requires input length to be multiple of 16 bytes")
    if reg_buffer:
        need(inp.nbytes <= reg_buffer_sz_bytes, "all_reduce: registered buffer is too small to contain the input", inp.nbytes)
        need(reg_buffer in this.registered, "buffer address is not registered!")
    elif captured:
        this.pending.append(address_of(inp))
    else:
        need(address_of(inp) in this.registered, "buffer address is not registered!")
    stream, last, waits = graphs.State.stream, Custom.last, graphs.State.synchronized
    need(last is None or stream in (last[0], *last[1]) or waits > last[2], "two custom all-reduces at a time would share flags")
    Custom.last = stream, set(), waits
    graphs.used([inp, out])
    record("all_reduce", inp.numel(), inp.dtype, "registered" if not reg_buffer else "copied")


def get_graph_buffer_ipc_meta(fa: int) -> tuple[list[int], list[int]]:
    count = len(Custom.ones[fa - 1].pending)
    return [0] * (HANDLE * count), [0] * count


def register_graph_buffers(fa: int, handles: list[list[int]], offsets: list[list[int]]) -> None:
    this = Custom.ones[fa - 1]
    need({len(there) for there in offsets} == {len(this.pending)}, "captures of the ranks differ:", [*map(len, offsets)])
    need(all(len(there) == HANDLE * len(this.pending) for there in handles), "IPC handles")
    this.registered.update(this.pending)
    this.pending.clear()


def before_replay() -> None:
    """A replay reads what the last capture has to register first."""
    for this in Custom.ones:
        need(not this.pending, "a graph reads", len(this.pending), "buffers of other ranks that are not registered")


def waits(stream: Any, other: Any) -> None:
    """A stream waits for another one."""
    if Custom.last is not None and (other is Custom.last[0] or other in Custom.last[1]):
        Custom.last[1].add(stream)


#: operator -> its double
OPERATORS = {
    name: globals()[name]
    for name in (
        "allocate_shared_buffer_and_handle", "open_mem_handle", "init_custom_ar", "register_buffer", "all_reduce",
        "get_graph_buffer_ipc_meta", "register_graph_buffers",
    )
} | {"free_shared_buffer": lambda ptr: None, "dispose": lambda fa: None}  # fmt: skip


# ---- torch's symmetric memory ----------------------------------------------------------------------

#: storages that all ranks have met with
_met: dict[int, StorageWeakRef] = {}


def symmetric_sum(func: Any, args: tuple[Any, ...]) -> Tensor:
    """In place, in a buffer that all ranks hold."""
    (given, *more), name = args, func._schema.name.partition("::")[2]
    need(name in ("two_shot_all_reduce_", "multimem_all_reduce_"), name, "has no double")
    on_device(given, name)
    need(given.untyped_storage()._cdata in _met, name, "takes a tensor without a rendezvous")
    need(given.data_ptr() % 16 == 0, name, "takes an address that is a multiple of 16 bytes")
    graphs.used([given])
    record(name, given.numel(), given.dtype, *more)
    return given


def rendezvous(tensor: Tensor, group: Any) -> SimpleNamespace:
    """``torch.distributed._symmetric_memory.rendezvous`` on GPUs behind an NVSwitch, which can multicast."""
    on_device(tensor, "rendezvous")
    need(len({*everybody((tuple(tensor.shape), str(tensor.dtype)))}) == 1, "the symmetric buffers of the ranks differ")

    _met[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())

    def get_buffer(rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        return tensor if rank == dist.get_rank() else torch.empty(sizes, dtype=dtype, device=here())

    return SimpleNamespace(multicast_ptr=PEER * 4, get_buffer=get_buffer)


def install() -> None:
    """Put the doubles in place, in a process of several ranks."""
    import torch.distributed._symmetric_memory as symmetric
    from vllm.distributed.device_communicators import pynccl

    graphs.State.joined, graphs.State.replayed = staticmethod(waits), staticmethod(before_replay)
    symmetric.empty = torch.empty
    symmetric.rendezvous = rendezvous  # type: ignore[assignment]
    pynccl.NCCLLibrary = Nccl
    torch.cuda.can_device_access_peer = lambda device, peer: device != peer and max(device, peer) < GPUS
    for name in ("all_gather_object", "broadcast_object_list", "barrier"):  # which make tensors of the host
        setattr(dist, name, unset_fake_temporarily()(getattr(dist, name)))
    host = torch.Tensor.data_ptr
    torch.Tensor.data_ptr = lambda self: address(self) if isinstance(self, FakeTensor) else host(self)  # type: ignore[method-assign]

