"""Shared memory of vLLM keeps working after its name is gone from ``/dev/shm``, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jetrl_patch

#: exit statuses, which no error has
UNNAMED, NAMED = 10, 11
#: a writer that is killed, with its reader in a thread
KILLED = """
import os, signal, threading
from multiprocessing import resource_tracker
import jetrl_patch
jetrl_patch.enable()
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
writer = MessageQueue(1, 1, max_chunk_bytes=1024, max_chunks=2)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
thread = threading.Thread(target=reader.wait_until_ready)
thread.start()
writer.wait_until_ready()
thread.join()
for i in range(5):
    writer.enqueue(["message", i, "x" * 2000])  # too long for the shared memory
    writer.enqueue(i)
    assert reader.dequeue(timeout=10) == ["message", i, "x" * 2000] and reader.dequeue(timeout=10) == i
print("worked", flush=True)
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)  # it would clean up; Ray ends it too
os.kill(os.getpid(), signal.SIGKILL)
"""


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("psm_")}


def test_a_killed_writer_leaves_no_shared_memory(tmp_path: Path) -> None:
    before = shared_memory()
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=300)
    assert "worked" in done.stdout and done.returncode == -9, done.stderr[-3000:]
    assert not shared_memory() - before


def test_a_writer_that_ends_removes_the_name_once() -> None:
    import threading

    jetrl_patch.enable(precision="fp8-unified")
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    writer = MessageQueue(1, 1, max_chunk_bytes=1024, max_chunks=2)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    name = writer.buffer.shared_memory.name
    assert name in os.listdir("/dev/shm")
    thread = threading.Thread(target=reader.wait_until_ready)
    thread.start()
    writer.wait_until_ready()
    thread.join()
    assert name not in os.listdir("/dev/shm")
    writer.enqueue(7)
    assert reader.dequeue(timeout=10) == 7
    del writer, reader
    gc.collect()  # an error in a finalizer is a failure of the suite


def reduce(patched: bool, rank: int, store: str) -> None:
    """Exit with UNNAMED or NAMED, by whether the memory of two ranks, through which they reduce, has a name."""
    from types import SimpleNamespace

    import torch

    import jetrl_patch

    if patched:
        jetrl_patch.enable(precision="fp8-unified")
    os.environ["VLLM_DIST_IDENT"] = f"test-{os.path.basename(store)}"
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = torch.distributed.group.WORLD
    reducer = _CPUSHMDistributed(SimpleNamespace(unique_name="tp:0", ranks=[0, 1], device_group=group, world_size=2, rank=rank))
    value = torch.full((1000,), 1.0 + rank)
    reducer.all_reduce(value)
    torch.distributed.barrier()
    named = any(name.startswith(f"{reducer.group_name}_") for name in os.listdir("/dev/shm"))
    torch.distributed.barrier()
    assert bool((value == 3.0).all())
    sys.exit(NAMED if named else UNNAMED)


@pytest.mark.parametrize("patched", [False, True])
def test_memory_of_tensor_parallel_workers_on_a_cpu_has_no_name(patched: bool, tmp_path: Path) -> None:
    import multiprocessing

    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "init_shm_manager"):
        pytest.skip("vLLM's library for processors without AVX-512 has no shared memory: ranks reduce by gloo")
    store = tmp_path / f"store-{os.getpid()}"
    spawned = [multiprocessing.get_context("spawn").Process(target=reduce, args=(patched, i, str(store))) for i in range(2)]
    for process in spawned:
        process.start()
    for process in spawned:
        process.join(120)
    assert [process.exitcode for process in spawned] == [UNNAMED if patched else NAMED] * 2


def draw(patched: bool) -> None:
    """Exit with the number of named semaphores that a bar of this process made."""
    import jetrl_patch

    if patched:
        jetrl_patch.enable(precision="fp8-unified")
    from tqdm.std import TqdmDefaultWriteLock, tqdm

    assert list(tqdm([1, 2], file=open(os.devnull, "w"))) == [1, 2]  # noqa: SIM115
    lock = TqdmDefaultWriteLock.mp_lock
    sys.exit(0 if lock is None else f"sem.{lock._semlock.name[1:]}" in os.listdir("/dev/shm"))


def test_a_progress_bar_of_a_spawned_process_has_no_semaphore() -> None:
    import multiprocessing

    for patched, expected in ((False, 1), (True, 0)):
        process = multiprocessing.get_context("spawn").Process(target=draw, args=(patched,))
        process.start()
        process.join(120)
        assert process.exitcode == expected
