"""Checkpoints of verl's engines: the settings they were saved with, and the merge of their shards."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.verl import lora
from jetrl_patch.adapters.verl.yaml_settings import ACTOR
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.registry import Place
from jetrl_patch.trainer import record
from jetrl_patch.trainer.rules import raised

__all__ = ["load_checkpoint", "merge", "problems", "resumed", "save_checkpoint"]


# ---- Record the run's settings in checkpoints of verl's FSDP engines, and compare them before a checkpoint is loaded

#: the engines that save by ``FSDPCheckpointManager``, and so write a record
_RECORDED = ("fsdp", "fsdp2", "veomni")


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield the error of the checkpoint that verl would resume from, so that the driver has it before a worker starts.

    verl resumes by default (``resume_mode=auto``) whatever is in its folder. A folder that the driver does not see is left to
    the workers.
    """
    actor = os.path.join(resumed(select).path, "actor")
    if select(f"{ACTOR}.strategy") in _RECORDED and os.path.isdir(actor):
        states = "optimizer" in (select(f"{ACTOR}.checkpoint.load_contents") or ())
        yield from raised(lambda: record.check(actor, config, optimizer=states, elsewhere="trainer.default_local_dir"))


def resumed(select: Callable[[str], Any]) -> Place:
    """Return the folder of the step that verl resumes from, as its trainers find it; an empty path if it starts anew."""
    mode, folder = select("trainer.resume_mode"), str(select("trainer.default_local_dir") or "")
    if mode == "resume_path":
        return Place("trainer.resume_from_path", str(select("trainer.resume_from_path") or ""))
    if mode == "auto":
        with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, "latest_checkpointed_iteration.txt")) as file:
            return Place("trainer.default_local_dir", os.path.join(folder, f"global_step_{int(file.read())}"))
    return Place("trainer.resume_mode", "")


def save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPCheckpointManager.save_checkpoint``: rank 0 writes ``jetrl.json`` beside its shards."""

    def save_checkpoint(self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
        if local_path is not None and self.rank == 0:
            record.write(local_path, session.active_config())
        return original(self, local_path, *args, **kwargs)

    return save_checkpoint


def load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPCheckpointManager.load_checkpoint``: every rank compares, so that none waits for a rank that raised.

    Does not cover a checkpoint that verl fetches from HDFS during the load.
    """

    def load_checkpoint(self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
        if local_path is not None:
            record.check(local_path, session.active_config(), optimizer=bool(self.should_load_optimizer))
            lora.check_resumed(local_path, getattr(self, "model", None), session.active_config())
        return original(self, local_path, *args, **kwargs)

    return load_checkpoint


# ---- Merge shards of verl's FSDP engine into a Hugging Face folder with verl's own merger, which holds the whole model in memory

def merge(checkpoint: Path, target: Path) -> None:
    """Write a BF16 Hugging Face folder. Raises ConfigError if verl is missing or its merger fails."""
    try:
        from verl.model_merger.base_model_merger import ModelMergerConfig
        from verl.model_merger.fsdp_model_merger import FSDPModelMerger
    except ImportError as error:
        raise ConfigError(
            explain(f"checkpoint {checkpoint}", required="verl, to merge its shards", found=error, fix="install verl")
        ) from error
    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=str(checkpoint),
        hf_model_config_path=str(checkpoint / "huggingface"),
        target_dir=str(target),
    )
    try:
        FSDPModelMerger(config).merge_and_save()
    except Exception as error:  # verl raises various types for a missing or broken shard
        found = f"{type(error).__name__}: {error}"
        raise ConfigError(
            explain(
                f"checkpoint {checkpoint}", required="shards that verl can merge", found=found, fix="copy the complete checkpoint"
            )
        ) from error
