"""The rollout's side of the weight sync in OpenRLHF, in the vLLM worker process.

The vLLM adapter attached the receiver to the worker when the model was loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf.settings import START
from jetrl_patch.adapters.openrlhf.state import where
from jetrl_patch.adapters.openrlhf.transport import decode, entries_of, take_shared
from jetrl_patch.errors import NotPatchedError, SyncError
from jetrl_patch.sync.receive import State
from jetrl_patch.sync.send import unpack

__all__ = ["update_weight", "update_weight_cuda_ipc"]


def update_weight(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``WorkerWrap.update_weight``: execute orders; accept a plain parameter only without a quantized rollout."""

    def update_weight(self: Any, name: Any, dtype: Any, shape: Any, empty_cache: bool = False) -> Any:
        order = decode(name)
        if order is None:
            if session.active_with(lambda config: config.quantized_rollout):
                _broadcast(self, dtype, shape)  # the sender waits for it
                raise _unpatched_trainer()
            return original(self, name, dtype, shape, empty_cache)
        session.require_active("the vLLM worker")
        if order["op"] == "bucket":
            import torch

            flat = _broadcast(self, torch.uint8, shape)
            self.jetrl_receiver.on_bucket(unpack(flat, entries_of(order)))
            return None
        if order["op"] == "begin":
            answer = _who(self)
            self.jetrl_receiver.restart()
            return answer
        if order["op"] == "status":
            return {**self.jetrl_report(digests=False), "node": where(), **_version(self)}
        if order["op"] == "end":
            self.jetrl_version = 0  # no version until the sync is complete
            report = self.jetrl_receiver.finish()
            self.jetrl_version = order["version"]
            return report
        raise SyncError(
            f"the vLLM worker does not know the order {order['op']!r}. Install the same version of jetrl_patch on both sides."
        )

    return update_weight


def update_weight_cuda_ipc(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``WorkerWrap.update_weight_cuda_ipc``: load buckets from the trainer's memory."""

    def update_weight_cuda_ipc(
        self: Any, name: Any, dtype: Any, shape: Any, ipc_handles: Any = None, empty_cache: bool = False
    ) -> Any:
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

    return update_weight_cuda_ipc


def _broadcast(worker: Any, dtype: Any, shape: Any) -> Any:
    """Receive one tensor over the group of ``init_process_group``."""
    import torch

    tensor = torch.empty(tuple(shape), dtype=dtype, device=_device(worker))
    if worker._model_update_with_ray:
        import ray.util.collective as collective

        collective.broadcast(tensor, 0, group_name=worker._model_update_group)
    else:
        worker._model_update_group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
    return tensor


def _device(worker: Any) -> Any:
    return next(worker.model_runner.get_model().parameters()).device


def _who(worker: Any) -> dict[str, Any]:
    receiver = worker.jetrl_receiver
    serves, held = receiver.state is State.SERVING, receiver.held()
    config = session.active_config().to_env()
    return {"pid": os.getpid(), "node": where(), "config": config, "serves": serves, "held": held, **_version(worker)}


def _version(worker: Any) -> dict[str, int]:
    return {"version": getattr(worker, "jetrl_version", 0)}


def _unpatched_trainer() -> NotPatchedError:
    return NotPatchedError(f"the trainer that syncs weights is not patched, but this vLLM worker is. {START}")
