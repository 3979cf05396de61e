"""Checkpoints of verl's engines: the settings they were saved with, and the merging of their shards. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.verl import lora
from jetrl_patch.adapters.verl.yaml_settings import ACTOR, Select, named
from jetrl_patch.config import Config
from jetrl_patch.config.launches import Place
from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer import record
from jetrl_patch.trainer.rules import raised

# ---- Record the run's settings in checkpoints, and compare them before a checkpoint is loaded ----

#: why the checkpoint managers are patched, and until when
UNRECORDED = "verl's checkpoints do not record the precision settings of their run"
CALLBACKS = "verl's BaseCheckpointManager has callbacks in save_checkpoint and load_checkpoint for extra state such as jetrl.json"

#: the engines whose checkpoint managers are patched, and so record the settings
_RECORDED = ("fsdp", "fsdp2", "veomni", "megatron")
#: verl's ways to resume
_MODES = ("auto", "disable", "resume_path")


def problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error if verl would resume from a checkpoint of other settings, before any worker starts.

    By default (``resume_mode=auto``) verl resumes from whatever is in its folder. The workers check a folder that the driver
    cannot see. verl itself reads these settings when its engines are up.
    """
    mode, path = select("trainer.resume_mode"), select("trainer.resume_from_path")
    if mode not in _MODES:
        required, fix = " or ".join(_MODES), "set it to auto"
        yield ConfigError(explain(named("trainer.resume_mode"), required=required, found=repr(mode), fix=fix))
    elif mode == "resume_path" and not (isinstance(path, str) and re.search(r"global_step_\d+$", path)):
        required, fix = "a folder that ends in global_step_N", "give that folder, without a slash at the end"
        yield ConfigError(explain(named("trainer.resume_from_path"), required=required, found=repr(path), fix=fix))
    actor = os.path.join(resumed(select).path, "actor")
    if select(f"{ACTOR}.strategy") in _RECORDED and os.path.isdir(actor):
        states = "optimizer" in (select(f"{ACTOR}.checkpoint.load_contents") or ())
        yield from raised(lambda: record.check(actor, config, optimizer=states, elsewhere="trainer.default_local_dir"))


def resumed(select: Select) -> Place:
    """Return the folder that verl's trainers would resume from; an empty path if they start fresh."""
    mode, folder = select("trainer.resume_mode"), str(select("trainer.default_local_dir") or "")
    if mode == "resume_path":
        return Place("trainer.resume_from_path", str(select("trainer.resume_from_path") or ""))
    if mode == "auto":
        with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, "latest_checkpointed_iteration.txt")) as file:
            return Place("trainer.default_local_dir", os.path.join(folder, f"global_step_{int(file.read())}"))
    return Place("trainer.resume_mode", "")


@replacement
def save_checkpoint(original: Any, self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a checkpoint manager's ``save_checkpoint``: rank 0 writes ``jetrl.json`` next to its shards."""
    if local_path is not None and self.rank == 0:
        record.write(local_path, session.active_config())
    return original(self, local_path, *args, **kwargs)


@replacement
def load_checkpoint(original: Any, self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``FSDPCheckpointManager.load_checkpoint``: every rank compares, so none waits for a rank that raised.

    Does not cover a checkpoint that verl fetches from HDFS during the load.
    """
    if local_path is not None:
        record.check(local_path, session.active_config(), optimizer=bool(self.should_load_optimizer))
        lora.check_resumed(local_path, getattr(self, "model", None), session.active_config())
    return original(self, local_path, *args, **kwargs)


@replacement
def load_megatron(original: Any, self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``MegatronCheckpointManager.load_checkpoint``: the same, without adapters, which the plugin does not merge there."""
    if local_path is not None:
        record.check(local_path, session.active_config(), optimizer=bool(self.should_load_optimizer))
    return original(self, local_path, *args, **kwargs)


# ---- Merge the shards of verl's FSDP engine ----

def merge(checkpoint: Path, target: Path) -> None:
    """Write a BF16 Hugging Face folder with verl's own merger, which holds the whole model in memory.

    Raises ConfigError if verl is missing or its merger fails.
    """
    what = f"checkpoint {checkpoint}"
    try:
        from verl.model_merger.base_model_merger import ModelMergerConfig
        from verl.model_merger.fsdp_model_merger import FSDPModelMerger
    except ImportError as error:
        raise ConfigError(explain(what, required="verl, to merge its shards", found=error, fix="install verl")) from error
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
        required, found = "shards that verl can merge", f"{type(error).__name__}: {error}"
        raise ConfigError(explain(what, required=required, found=found, fix="copy the complete checkpoint")) from error
