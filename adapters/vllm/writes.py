"""Only a weight sync writes a quantized engine's weights. Any other write is an error, after which the engine does not generate.

A trainer that the plugin does not know writes BF16 through the model's own ``load_weights``. The engine would quantize that
without complaint, and roll out in FP8 what the trainer computes otherwise.
"""

from __future__ import annotations

from typing import Any, NoReturn

from jetrl_patch import registry
from jetrl_patch.adapters.vllm.install import VllmInstaller
from jetrl_patch.errors import SyncError, explain
from jetrl_patch.patching.attached import Attached
from jetrl_patch.sync.receive import Receiver

_LOADER: Attached[Any] = Attached("load_weights", "trainers call it on the model itself, and no call of the engine's precedes it")


def refuse_other_writes(receiver: Receiver, installer: VllmInstaller) -> None:
    """Leave the weights of the installer's model to this receiver alone."""

    def load_weights(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise refused(receiver, "a call of the model's load_weights")

    _LOADER.set(installer.model, load_weights)


def refused(receiver: Receiver, found: str) -> SyncError:
    """Stop the engine, and return the error about a write of its weights."""
    required = f"a weight sync of jetrl_patch's own, from {registry.trainers()}"
    fix = "train with one of these, or run this program without jetrl_patch (JETRL_ENABLED=0)"
    error = SyncError(explain("the weights of a quantized rollout engine", required=required, found=found, fix=fix))
    receiver.refuse(error)
    return error


def check_serving(worker: Any, scheduled: Any) -> None:
    """Raise SyncError unless the weights come from the checkpoint or one complete sync. ``scheduled``: vLLM's next step."""
    receiver = getattr(worker, "jetrl_receiver", None)
    if receiver is None:
        return
    receiver.check_serving()
    if scheduled.scheduled_new_reqs and (names := receiver.installer.written_elsewhere()):
        raise refused(receiver, f"{len(names)} parameters written past it ({', '.join(names[:3])})")
