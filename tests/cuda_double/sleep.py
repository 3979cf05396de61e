"""Doubles of the C functions under vLLM's sleep mode. Its Python is real: pools by tag, what is offloaded, and what is dropped.

Refused: to use memory that sleeps, and to read what a sleep dropped (level 2: weights too) and nothing has written since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from vllm.device_allocator import cumem

from tests.cuda_double.checks import need

#: device, bytes, address, and what the C library keeps
Handle = tuple[int, int, int, int]


class Pools:
    """Storages by their address."""

    #: called with each new allocation; None outside of a pool
    allocated: Callable[[Handle], None] | None = None
    held: ClassVar[dict[int, StorageWeakRef]] = {}
    asleep: ClassVar[set[int]] = set()
    #: weights that are mapped again, without contents
    dropped: ClassVar[set[int]] = set()


def start(tensor: Tensor) -> int:
    """A number in place of the address of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def made(out: Any) -> None:
    """An operator returned these tensors."""
    if Pools.allocated is not None:
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_cuda and start(tensor) not in Pools.held:
                storage = tensor.untyped_storage()
                Pools.held[start(tensor)] = StorageWeakRef(storage)
                Pools.allocated((0, storage.nbytes(), start(tensor), 0))


def used(tensors: Iterable[Tensor], written: Collection[Tensor] = ()) -> None:
    """An operator or a kernel uses these tensors, and writes some of them."""
    if Pools.asleep or Pools.dropped:
        Pools.dropped.difference_update(map(start, written))
        for tensor in tensors:
            need(start(tensor) not in Pools.asleep, "uses memory that sleeps:", tensor)
            need(start(tensor) not in Pools.dropped, "reads what a sleep dropped:", tensor)


@contextmanager
def pool(malloc: Callable[[Handle], None], free: Callable[[int], Handle]) -> Iterator[Any]:
    """``use_memory_pool_with_allocator``."""
    Pools.allocated = malloc

    def snapshot() -> list[dict[str, int]]:
        return [{"address": at, "allocated_size": not ref.expired()} for at, ref in Pools.held.items()]  # of all tags

    try:
        yield SimpleNamespace(snapshot=snapshot), None
    finally:
        Pools.allocated = None


def unmap(device: int, size: int, at: int, handle: int) -> None:
    if Pools.held[at].expired():
        del Pools.held[at]
    else:
        Pools.asleep.add(at)


def create(device: int, size: int, at: int, handle: int) -> None:
    Pools.asleep.remove(at)
    if cumem.CuMemAllocator.get_instance().pointer_to_data[at].tag != "kv_cache":  # it is written slot by slot
        Pools.dropped.add(at)


def copy(to: int, source: int, size: int) -> None:
    """``cudaMemcpy``, between the host and memory that is mapped."""
    Pools.dropped.discard(to)


def install() -> None:
    cumem.use_memory_pool_with_allocator = pool
    cumem.python_create_and_map, cumem.python_unmap_and_release = create, unmap
    cumem.libcudart = SimpleNamespace(cudaMemcpy=copy)
