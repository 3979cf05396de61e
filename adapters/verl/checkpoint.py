"""Record the run's settings in checkpoints of verl's FSDP engines, and compare them before a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.adapters.verl import lora
from jetrl_patch.checkpoint import record
from jetrl_patch.gate import while_active

__all__ = ["load_checkpoint", "save_checkpoint"]


@while_active
def save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPCheckpointManager.save_checkpoint``: rank 0 writes ``jetrl.json`` beside its shards."""

    def save_checkpoint(self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
        if local_path is not None and self.rank == 0:
            record.write(local_path, runtime.active_config())
        return original(self, local_path, *args, **kwargs)

    return save_checkpoint


@while_active
def load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPCheckpointManager.load_checkpoint``: every rank compares, so that none waits for a rank that raised.

    Does not cover a checkpoint that verl fetches from HDFS during the load.
    """

    def load_checkpoint(self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
        if local_path is not None:
            record.check(local_path, runtime.active_config(), optimizer=bool(self.should_load_optimizer))
            lora.check_resumed(local_path, getattr(self, "model", None), runtime.active_config())
        return original(self, local_path, *args, **kwargs)

    return load_checkpoint
