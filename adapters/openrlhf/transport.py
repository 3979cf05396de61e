"""Send buckets from OpenRLHF's trainer to its vLLM workers over its two transports, with timeouts, and receive them there.

Both transports call ``update_weight…`` of each engine, which takes one parameter per call in OpenRLHF. Here an order
(``sync.orders``) replaces the parameter's name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf.state import START
from jetrl_patch.errors import NotPatchedError
from jetrl_patch.patching.patch import replacement
from jetrl_patch.sync.orders import POLL, decode, encode, entries_of, obey, where
from jetrl_patch.sync.protocol import as_sync_error, silent
from jetrl_patch.sync.send import Bucket, unpack


class RayOrders:
    """Remote calls to all engines (OpenRLHF's Ray actors), counted. One call may take ``timeout`` seconds."""

    def __init__(self, engines: Sequence[Any], timeout: float) -> None:
        self.engines = engines
        self.timeout = timeout
        self.calls = 0

    def ask(self, op: str, **fields: Any) -> list[Any]:
        """Send an order without data; return a list of the workers' answers per engine."""
        return self.wait(self.start(encode(op, **fields)))

    def start(self, order: str, size: int = 0, *more: Any, method: str = "update_weight") -> list[Any]:
        """Call ``method(order, dtype, shape, *more)`` on every engine; return references to the answers."""
        import torch

        self.calls += len(self.engines)
        return [getattr(engine, method).remote(order, torch.uint8, (size,), *more) for engine in self.engines]

    def wait(self, references: list[Any], moved: threading.Event | None = None) -> list[Any]:
        """As ``sync.orders.Orders.wait``."""
        import ray

        end = time.monotonic() + self.timeout
        waiting = list(references)
        while waiting or (moved is not None and not moved.is_set()):
            ready, waiting = ray.wait(waiting, timeout=POLL) if waiting else ([], [])
            if not waiting and not ready and moved is not None:
                moved.wait(POLL)
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


def broadcast(tensor: Any, group: Any, by_ray: bool) -> None:
    """Send or receive one tensor over the group of OpenRLHF's ``init_process_group``, from the trainer's rank 0."""
    if by_ray:
        import ray.util.collective as collective

        collective.broadcast(tensor, 0, group_name=group)
    else:
        import torch

        group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())


class IpcWire:
    """Colocated transport: each rank shares its bucket with the worker on its own GPU, and rank 0 sends the order.

    A CPU cannot share memory this way, so rank 0's bytes travel with the order.
    """

    def __init__(self, orders: RayOrders) -> None:
        self._orders = orders
        self._references: list[Any] = []

    def start(self, bucket: Bucket) -> None:
        import torch.distributed as dist

        handles: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(handles, _share(bucket.flat, dist.get_rank()))
        if dist.get_rank() == 0:
            merged = {key: handle for own in handles for key, handle in own.items()}
            order = encode("bucket", entries=bucket.entries)
            method = "update_weight_cuda_ipc"
            self._references = self._orders.start(order, bucket.flat.numel(), merged, method=method)

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
    if order["op"] == "status":
        return {**self.jetrl_report(digests=False), "node": where(), "version": self.jetrl_receiver.version}
    return obey(order, self.jetrl_receiver, session.active_config(), lambda: _received(self, dtype, shape))


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
