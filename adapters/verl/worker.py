"""Rollout's side of the weight sync in verl, in the vLLM worker process.

The receiver itself hangs on the worker: the vLLM adapter put it there when the model was loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.adapters.verl.transport import timed_receiver
from jetrl_patch.errors import NotPatchedError
from jetrl_patch.trainer.marks import require_same


def update_weights_from_ipc(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces ``vLLMColocateWorkerExtension.update_weights_from_ipc``: buckets go through the receiver's checks.

    An unpatched trainer waits without a limit, so what it sends is read to the end, and dropped, before the error.

    The further argument ``jetrl`` carries the trainer's settings: an unpatched worker does not know it and fails at
    once, and a patched worker knows that its trainer is patched.
    """

    def update_weights_from_ipc(
        self: Any,
        peft_config: Any = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
        jetrl: dict[str, str] | None = None,
    ) -> Any:
        if not runtime.is_active():
            if jetrl is not None:
                raise NotPatchedError("this vLLM worker was patched once and no longer is; restart the run")
            return original(self, peft_config=peft_config, base_sync_done=base_sync_done, use_shm=use_shm)
        config = runtime.active_config()
        if jetrl is None:
            _transport(self, use_shm, config.sync_timeout).receive_weights(lambda weights, is_last: None)
            raise NotPatchedError(
                "the trainer that syncs weights is not patched, while this vLLM worker is; let its process load verl's "
                "plugins (VERL_USE_EXTERNAL_PLUGINS) with the same JETRL_* variables"
            )
        require_same("a vLLM worker", required=jetrl, found=config.to_env())
        if not config.quantized_rollout:
            return original(self, peft_config=peft_config, base_sync_done=base_sync_done, use_shm=use_shm)
        return _receive(self, use_shm, config.sync_timeout)

    return update_weights_from_ipc


def _receive(worker: Any, use_shm: bool, timeout: float) -> dict[str, int]:
    import zmq

    receiver = worker.jetrl_receiver
    transport = _transport(worker, use_shm, timeout)
    try:
        transport.receive_weights(on_bucket_received=lambda weights, is_last: receiver.on_bucket(weights))
    except zmq.Again as error:
        raise receiver.abort(
            f"the trainer sent nothing for {timeout:g} s during a weight sync; is it alive?"
        ) from error
    except Exception as error:
        raise receiver.abort(f"the transfer of weights broke off: {type(error).__name__}: {error}") from error
    report: dict[str, int] = receiver.finish()
    return report


def _transport(worker: Any, use_shm: bool, timeout: float) -> Any:
    import torch
    from verl.utils.device import get_device_name

    if worker.device is None:  # as verl does; vLLM leaves it unset on some platforms
        worker.device = torch.device(f"{get_device_name()}:{worker.local_rank}")
    return timed_receiver(timeout, zmq_handle=worker._get_zmq_handle(), device=worker.device, use_shm=use_shm)
