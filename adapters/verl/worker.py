"""The rollout's side of the weight sync in verl, in the vLLM worker process.

The vLLM adapter attached the receiver to the worker when the model was loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.verl.reward_engines import meet
from jetrl_patch.adapters.verl.transport import timed_receiver
from jetrl_patch.errors import NotPatchedError
from jetrl_patch.trainer.rules import require_same


def update_weights_from_ipc(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``vLLMColocateWorkerExtension.update_weights_from_ipc``: pass buckets through the receiver's checks.

    An unpatched trainer waits without a limit, so its data is read to the end and dropped before the error.

    The extra argument ``jetrl`` carries the trainer's settings. An unpatched worker does not know it and fails at once; a
    patched worker learns from it that its trainer is patched. ``jetrl_sync`` says where they meet.
    """

    def update_weights_from_ipc(
        self: Any,
        peft_config: Any = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
        jetrl: dict[str, str] | None = None,
        jetrl_sync: str = "",
    ) -> Any:
        if not session.is_active():
            if jetrl is not None:
                raise NotPatchedError("jetrl_patch was disabled in this vLLM worker. Restart the run.")
            return original(self, peft_config=peft_config, base_sync_done=base_sync_done, use_shm=use_shm)
        config = session.active_config()
        if jetrl is None:
            _transport(self, use_shm, config.sync_timeout).receive_weights(lambda weights, is_last: None)
            raise NotPatchedError(
                "the trainer that syncs weights is not patched, but this vLLM worker is. Pass its process the same JETRL_* "
                "variables and do not exclude jetrl_patch in VERL_USE_EXTERNAL_PLUGINS."
            )
        require_same("a vLLM worker", required=jetrl, found=config.to_env())
        meet(self, jetrl_sync)
        if not config.quantized_rollout:
            return original(self, peft_config=peft_config, base_sync_done=base_sync_done, use_shm=use_shm)
        return _receive(self, use_shm, config.sync_timeout)

    return update_weights_from_ipc


def _receive(worker: Any, use_shm: bool, timeout: float) -> dict[str, int]:
    import zmq

    receiver = worker.jetrl_receiver
    transport = _transport(worker, use_shm, timeout, receiver.held())
    try:
        transport.receive_weights(on_bucket_received=lambda weights, is_last: receiver.on_bucket(weights))
    except zmq.Again as error:
        raise receiver.abort(
            f"the trainer sent nothing for {timeout:g} s during a weight sync. Check the trainer's log."
        ) from error
    except Exception as error:
        raise receiver.abort(f"the weight transfer broke off: {type(error).__name__}: {error}") from error
    report: dict[str, int] = receiver.finish()
    return report


def _transport(worker: Any, use_shm: bool, timeout: float, held: str = "") -> Any:
    import torch
    from verl.utils.device import get_device_name

    if worker.device is None:  # as in verl: vLLM leaves it unset on some platforms
        worker.device = torch.device(f"{get_device_name()}:{worker.local_rank}")
    return timed_receiver(timeout, held, zmq_handle=worker._get_zmq_handle(), device=worker.device, use_shm=use_shm)
