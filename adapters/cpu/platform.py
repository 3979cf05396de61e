"""What verl lacks on a CPU: a platform, and a checkpoint engine for rollouts in separate processes."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import types
from collections.abc import AsyncIterator
from typing import Any

import torch

from jetrl_patch.patching.patch import constant
from jetrl_patch.sync.protocol import dtype_name

# ---- A CPU platform for verl: ``torch.cpu``, and no-ops for the memory calls that verl makes -----
# verl 0.9 has platforms in ``verl.plugin.platform``, but none for a CPU. verl places its workers on Ray's GPUs, so this one uses
# logical GPUs, one per training process.

_PLENTY = 1 << 34  # result of mem_get_info; verl only compares it with the memory it wants to reserve


class CpuDeviceModule(types.ModuleType):
    """Result of ``verl.utils.device.get_torch_device()``: ``torch.cpu``, plus calls that only CUDA has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    is_available = constant(False)  # there is no accelerator
    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = constant(0)
    mem_get_info = constant((_PLENTY, _PLENTY))  # free and total bytes
    get_device_name = constant("CPU")
    empty_cache = ipc_collect = synchronize = reset_peak_memory_stats = set_device = constant(None)

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        """Restore torch's generator. verl saves no state for a device named "cpu", but wants one on resuming."""
        torch.set_rng_state(state)

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()


DEVICE_MODULE = CpuDeviceModule("jetrl_cpu_device")


def make_platform(base: type) -> type:
    """Return the platform's class, derived from verl's ``PlatformBase``, which cannot be imported here."""

    class PlatformCPU(base):
        """CPU: gloo, shared memory for weights, Ray's logical GPUs for placement."""

        device_name = "cpu"
        vendor_name = "cpu"
        device_module = DEVICE_MODULE

        is_available = constant(True)
        is_platform_available = constant(False)  # chosen by name only, never by detection
        current_device = constant(torch.device("cpu"))  # verl does x.to(get_device_id())
        device_count = constant(1)
        get_device_capability = constant((None, None))
        communication_backend_name = constant("gloo")
        visible_devices_envvar = constant("CUDA_VISIBLE_DEVICES")
        ray_resource_name = constant("GPU")  # logical: ray.init(num_gpus=N)
        is_ipc_supported = constant(False)  # verl then transfers weights through shared memory
        set_device = synchronize = empty_cache = set_allocator_settings = constant(None)
        profiler_start = profiler_stop = cudart = constant(None)
        manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
        nvtx_range = contextlib.nullcontext
        ray_noset_envvars = constant(["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"])
        rollout_env_vars = constant({})

    return PlatformCPU


# ---- verl's checkpoint engine for separate rollout processes, over gloo --------------------------
# verl's NCCL engine needs a GPU. On a CPU this one has the same name in verl's registry, so configurations need no change. It
# packs like verl's: bucket after bucket, tensors back to back without padding, from the first training process to every rollout
# process.

def make_engine(base: Any, timeout: float) -> Any:
    """Return the engine's class, from the module ``verl.checkpoint_engine.base``.

    A transfer fails after ``timeout`` seconds without progress.
    """
    wait = datetime.timedelta(seconds=timeout)

    class GlooCheckpointEngine(base.CheckpointEngine):
        def __init__(self, bucket_size: int, is_master: bool = False, **_: Any) -> None:
            self.bucket_size = bucket_size
            self.is_master = is_master
            self.rank: int | None = None

        def prepare(self) -> Any:
            """Open the store where all processes meet. Returns its address in the first training process."""
            if not self.is_master:
                return None
            import ray

            host = ray.util.get_node_ip_address().strip("[]")
            self.store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait)
            return host, self.store.port

        @classmethod
        def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]) -> Any:
            """Make rank 0 the sender. The other training processes only produce their shards."""
            size, address = rollout_world_size + 1, metadata[0]

            def group(ranks: list[int]) -> dict[str, list[Any]]:
                return {"rank": ranks, "world_size": [size] * len(ranks), "address": [address] * len(ranks)}

            senders = [0] + [-1] * (actor_wg_world_size - 1)
            return group(senders), group(list(range(1, size)))

        def init_process_group(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
            """Join the group of one sync."""
            self.rank = rank
            if rank < 0:
                return
            store = self.store if rank == 0 else torch.distributed.TCPStore(*address, is_master=False, timeout=wait)
            self.group = torch.distributed.ProcessGroupGloo(store, rank, world_size, wait)

        def finalize(self) -> None:
            """Leave the group."""
            self.group = self.store = None

        async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
            if self.rank != 0:  # all training processes help to gather each weight
                for _ in weights:
                    pass
                return
            metas: list[Any] = []
            bucket, used = torch.empty(self.bucket_size, dtype=torch.uint8), 0
            async for meta, chunk in base.split_weight_chunks(weights, self.bucket_size):
                if used + meta.chunk_size > self.bucket_size:
                    await self._send(metas, bucket[:used], last=False)
                    metas, used = [], 0
                meta.offset = used
                bucket[used : used + meta.chunk_size] = chunk
                metas.append(meta)
                used += meta.chunk_size
            await self._send(metas, bucket[:used], last=True)

        async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
            async for found in base.merge_weight_chunks(self._chunks(), self.bucket_size):
                yield found

        async def _chunks(self) -> AsyncIterator[tuple[Any, torch.Tensor]]:
            last = False
            while not last:
                size = torch.empty(1, dtype=torch.int64)
                await self._broadcast(size)
                head = torch.empty(int(size), dtype=torch.uint8)
                await self._broadcast(head)
                found, used, last = json.loads(head.numpy().tobytes())
                metas = [base.TensorMeta(n, torch.Size(shape), getattr(torch, dtype), *at) for n, shape, dtype, *at in found]
                bucket = torch.empty(used, dtype=torch.uint8)
                if used:
                    await self._broadcast(bucket)
                for meta in metas:
                    yield meta, bucket[meta.offset : meta.offset + meta.chunk_size]

        async def _send(self, metas: list[Any], bucket: torch.Tensor, last: bool) -> None:
            fields = [(m.name, list(m.shape), dtype_name(m.dtype), m.chunk_offset, m.chunk_size, m.offset) for m in metas]
            text = json.dumps((fields, len(bucket), last)).encode()
            head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            await self._broadcast(torch.tensor([len(head)]))
            await self._broadcast(head)
            if len(bucket):
                await self._broadcast(bucket)

        async def _broadcast(self, tensor: torch.Tensor) -> None:
            await asyncio.to_thread(lambda: self.group.broadcast([tensor]).wait())

    return GlooCheckpointEngine
