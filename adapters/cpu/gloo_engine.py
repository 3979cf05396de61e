"""verl's checkpoint engine for a rollout with processes of its own, over gloo.

verl's NCCL engine needs a GPU. On a CPU this one takes its name in verl's registry, so that a configuration is the same on
both. It packs as that one does: bucket after bucket, tensors one behind the other without padding, from the first training
process to every rollout process.
"""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch

from jetrl_patch.sync.protocol import dtype_name

__all__ = ["make_engine"]


def make_engine(base: Any, timeout: Callable[[], float]) -> Any:
    """Return the engine's class.

    Args:
        base: the module ``verl.checkpoint_engine.base``.
        timeout: seconds without progress after which a transfer fails.
    """

    class GlooCheckpointEngine(base.CheckpointEngine):
        def __init__(self, bucket_size: int, is_master: bool = False, **_: Any) -> None:
            self.bucket_size = bucket_size
            self.is_master = is_master
            self.rank: int | None = None

        def prepare(self) -> Any:
            """Open the store at which all processes meet. Returns its address in the first training process."""
            if not self.is_master:
                return None
            import ray

            host = ray.util.get_node_ip_address().strip("[]")
            wait = datetime.timedelta(seconds=timeout())
            self.store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait)
            return host, self.store.port

        @classmethod
        def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]) -> Any:
            """Rank 0 sends; the other training processes only produce their shards."""
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
            wait = datetime.timedelta(seconds=timeout())
            store = self.store if rank == 0 else torch.distributed.TCPStore(*address, is_master=False, timeout=wait)
            self.group = torch.distributed.ProcessGroupGloo(store, rank, world_size, wait)

        def finalize(self) -> None:
            """Leave the group."""
            self.group = self.store = None

        async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
            if self.rank != 0:  # each weight is gathered from all training processes
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
                metas = [_meta(base, *fields) for fields in found]
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
            def run() -> None:
                self.group.broadcast([tensor]).wait()

            await asyncio.get_running_loop().run_in_executor(None, run)

    return GlooCheckpointEngine


def _meta(base: Any, name: str, shape: list[int], dtype: str, *places: int) -> Any:
    """Invert what ``_send`` writes of a ``TensorMeta``."""
    return base.TensorMeta(name, torch.Size(shape), getattr(torch, dtype), *places)
