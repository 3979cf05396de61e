"""Send buckets from OpenRLHF's trainer to its vLLM workers over its two transports, with timeouts, and receive them there.

Both transports call ``update_weight…`` of each engine, which takes one parameter per call in OpenRLHF. Here an order in JSON
(``encode``) replaces the parameter's name. A patched worker executes it; an unpatched one raises at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf.state import START, where
from jetrl_patch.errors import NotPatchedError, SyncError
from jetrl_patch.patching.patch import replacement
from jetrl_patch.sync.protocol import as_sync_error, silent
from jetrl_patch.sync.receive import State
from jetrl_patch.sync.send import Bucket, Entry, unpack

_PREFIX = "jetrl:"
_POLL = 0.2  # seconds


def encode(op: str, **fields: Any) -> str:
    """Encode an order to the workers, in place of a parameter's name."""
    return _PREFIX + json.dumps({"op": op, **fields}, separators=(",", ":"))


def decode(name: Any) -> dict[str, Any] | None:
    """Decode an order; None for the name of a parameter."""
    if not isinstance(name, str) or not name.startswith(_PREFIX):
        return None
    order: dict[str, Any] = json.loads(name[len(_PREFIX) :])
    return order


class Orders:
    """Remote calls to all engines (OpenRLHF's Ray actors), counted. One call may take ``timeout`` seconds."""

    def __init__(self, engines: Sequence[Any], timeout: float) -> None:
        self.engines = engines
        self.timeout = timeout
        self.calls = 0

    def ask(self, op: str, **fields: Any) -> list[Any]:
        """Send an order without data; return a list of the workers' answers per engine."""
        return self.wait(self.start("update_weight", encode(op, **fields), 0))

    def start(self, method: str, name: str, size: int, *more: Any) -> list[Any]:
        """Call ``method(name, dtype, shape, *more)`` on every engine; return references to the answers."""
        import torch

        self.calls += len(self.engines)
        return [getattr(engine, method).remote(name, torch.uint8, (size,), *more) for engine in self.engines]

    def wait(self, references: list[Any], moved: threading.Event | None = None) -> list[Any]:
        """Return the answers. Raises a worker's own error, or SyncError if a worker is dead or silent too long.

        ``moved`` is set when the trainer's own part, which may block, is done.
        """
        import ray

        end = time.monotonic() + self.timeout
        waiting = list(references)
        while waiting or (moved is not None and not moved.is_set()):
            ready, waiting = ray.wait(waiting, timeout=_POLL) if waiting else ([], [])
            if not waiting and not ready and moved is not None:
                moved.wait(_POLL)
            for reference in ready:
                self._get(reference)
            if time.monotonic() > end:
                raise silent("a vLLM worker", self.timeout)
        return [self._get(reference) for reference in references]

    def _get(self, reference: Any) -> Any:
        import ray

        try:
            return ray.get(reference)
        except Exception as error:
            if "mismatch dtype" in str(error):  # the assertion of OpenRLHF's own WorkerWrap.update_weight
                raise NotPatchedError(
                    "a vLLM worker is not patched: it does not know jetrl_patch's weight sync. Install jetrl_patch where "
                    "vLLM runs, do not exclude it in VLLM_PLUGINS, and start the driver with `jetrl run`."
                ) from error
            raise as_sync_error(error) from error


class Wire(Protocol):
    """A transport for buckets from this rank to the workers, one at a time."""

    def start(self, bucket: Bucket) -> None:
        """Begin to send a bucket. Where nothing blocks, return before it has arrived."""

    def finish(self) -> None:
        """Return when all workers have loaded the bucket that was started. Raises what went wrong with it."""


def send_all(wire: Wire, buckets: Iterable[Bucket]) -> None:
    """Send buckets. While one travels, the next is gathered, quantized and digested."""
    travels = False
    try:
        for bucket in buckets:
            if travels:
                travels = False
                wire.finish()
            wire.start(bucket)
            travels = True
    except Exception:
        if travels:  # the stream broke: let the workers finish the bucket on its way, and ignore its result
            with contextlib.suppress(Exception):
                wire.finish()
        raise
    if travels:
        wire.finish()


def broadcast(tensor: Any, group: Any, by_ray: bool) -> None:
    """Send or receive one tensor over the group of OpenRLHF's ``init_process_group``, from the trainer's rank 0."""
    if by_ray:
        import ray.util.collective as collective

        collective.broadcast(tensor, 0, group_name=group)
    else:
        import torch

        group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())


class GroupWire:
    """Transport over the collective group of the trainer's rank 0 and all vLLM workers.

    ``broadcast`` sends a tensor to the group; it may block until all members have it.
    """

    def __init__(self, orders: Orders, broadcast: Callable[[Any], None]) -> None:
        self._orders = orders
        self._broadcast = broadcast
        self._references: list[Any] = []
        self._moved: threading.Event | None = None
        self._failure: list[BaseException] = []

    def start(self, bucket: Bucket) -> None:
        name = encode("bucket", entries=bucket.entries)
        self._references = self._orders.start("update_weight", name, bucket.flat.numel())
        if bucket.flat.is_cuda:  # enqueued on the stream: does not block
            self._moved = None
            self._broadcast(bucket.flat)
            return
        # gloo blocks until every worker joins; a thread keeps this one free to prepare the next bucket
        moved = self._moved = threading.Event()
        failure = self._failure = []

        def broadcast() -> None:
            try:
                self._broadcast(bucket.flat)
            except BaseException as error:
                failure.append(error)
            finally:
                moved.set()

        threading.Thread(target=broadcast, daemon=True).start()

    def finish(self) -> None:
        self._orders.wait(self._references, self._moved)
        if self._failure:
            raise as_sync_error(self._failure[0]) from self._failure[0]


class IpcWire:
    """Colocated transport: each rank shares its bucket with the worker on its own GPU, and rank 0 sends the order.

    A CPU cannot share memory this way, so rank 0's bytes travel with the order.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._references: list[Any] = []

    def start(self, bucket: Bucket) -> None:
        import torch.distributed as dist

        handles: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(handles, _share(bucket.flat, dist.get_rank()))
        if dist.get_rank() == 0:
            merged = {key: handle for own in handles for key, handle in own.items()}
            name = encode("bucket", entries=bucket.entries)
            self._references = self._orders.start("update_weight_cuda_ipc", name, bucket.flat.numel(), merged)

    def finish(self) -> None:
        from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync

        self._orders.wait(self._references)  # none on ranks other than 0
        torch_dist_barrier_and_cuda_sync()


def _share(flat: Any, rank: int) -> dict[str, Any]:
    if not flat.is_cuda:
        return {"cpu": flat.numpy().tobytes()} if rank == 0 else {}
    from openrlhf.trainer.ray.utils import get_physical_gpu_id
    from torch.multiprocessing.reductions import reduce_tensor

    return {get_physical_gpu_id(): reduce_tensor(flat)}


def take_shared(handles: dict[str, Any], device: Any) -> Any:
    """Open a bucket of ``IpcWire`` in the worker: uint8 [n], on CUDA the trainer's own memory."""
    import torch

    if "cpu" in handles:
        return torch.frombuffer(bytearray(handles["cpu"]), dtype=torch.uint8)
    from openrlhf.trainer.ray.utils import get_physical_gpu_id

    rebuild, arguments = handles[get_physical_gpu_id()]
    own = list(arguments)
    own[6] = device.index  # the processes may number the same GPU differently
    return rebuild(*own)


def entries_of(order: dict[str, Any]) -> list[Entry]:
    """Return the entries of the bucket that an order describes."""
    return [(str(name), str(dtype), list(shape), int(start)) for name, dtype, shape, start in order["entries"]]


# ---- The rollout's end, in the vLLM worker process. The vLLM adapter attached the receiver when it loaded the model

@replacement
def update_weight(original: Any, self: Any, name: Any, dtype: Any, shape: Any, empty_cache: bool = False) -> Any:
    """Replace ``WorkerWrap.update_weight``: execute orders. A plain parameter is accepted only without a quantized rollout."""
    order = decode(name)
    if order is None:
        if session.active_with(lambda config: config.quantized_rollout):
            _received(self, dtype, shape)  # or the sender would hang
            raise _unpatched_trainer()
        return original(self, name, dtype, shape, empty_cache)
    session.require_active("the vLLM worker")
    receiver = self.jetrl_receiver
    if order["op"] == "bucket":
        receiver.on_bucket(unpack(_received(self, dtype, shape), entries_of(order)))
        return None
    if order["op"] == "begin":
        answer = {
            "pid": os.getpid(),
            "node": where(),
            "config": session.active_config().to_env(),
            "serves": receiver.state is State.SERVING,
            "held": receiver.held(),
            "version": receiver.version,
        }
        receiver.restart()
        return answer
    if order["op"] == "status":
        return {**self.jetrl_report(digests=False), "node": where(), "version": receiver.version}
    if order["op"] == "end":
        receiver.version = 0  # no version until the sync is complete
        report = receiver.finish()
        receiver.version = order["version"]
        return report
    raise SyncError(
        f"the vLLM worker does not know the command {order['op']!r}. Install the same version of jetrl_patch on both sides."
    )


@replacement
def update_weight_cuda_ipc(
    original: Any, self: Any, name: Any, dtype: Any, shape: Any, ipc_handles: Any = None, empty_cache: bool = False
) -> Any:
    """Replace ``WorkerWrap.update_weight_cuda_ipc``: load buckets from the trainer's memory."""
    order = decode(name)
    if order is None:
        if session.active_with(lambda config: config.quantized_rollout):
            raise _unpatched_trainer()
        return original(self, name, dtype, shape, ipc_handles, empty_cache)
    import torch

    session.require_active("the vLLM worker")
    flat = take_shared(ipc_handles, self.device)
    self.jetrl_receiver.on_bucket(unpack(flat, entries_of(order)))
    if flat.is_cuda:
        torch.cuda.synchronize()  # the trainer writes the next bucket into the same memory
    return None


def _received(worker: Any, dtype: Any, shape: Any) -> Any:
    import torch

    device = next(worker.model_runner.get_model().parameters()).device
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    broadcast(tensor, worker._model_update_group, worker._model_update_with_ray)
    return tensor


def _unpatched_trainer() -> NotPatchedError:
    return NotPatchedError(f"the trainer that syncs weights is not patched, but this vLLM worker is. {START}")
