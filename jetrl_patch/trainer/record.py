"""``jetrl.json``: the settings that a training checkpoint was saved with, compared before it is loaded.

Master weights are FP32 in every precision. A checkpoint of one precision would load into a run of another without an error, and
leave an unexplained kink in the training curve. A checkpoint without the file comes from an unpatched framework: BF16 with FP32
optimizer states. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, differences, explain
from jetrl_patch.patching.identity import identity

FILE = "jetrl.json"
#: verl writes rank and alpha of LoRA into this file, next to the shards
ADAPTERS = "lora_train_meta.json"


def write(folder: str | os.PathLike[str], config: Config) -> None:
    """Write the settings into a checkpoint's folder, atomically; create the folder if it is missing."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    record = {"jetrl_patch": identity(), "settings": dataclasses.asdict(config.resolved())}
    unfinished = place / f"{FILE}.{os.getpid()}"
    unfinished.write_text(json.dumps(record, indent=2) + "\n")
    unfinished.replace(place / FILE)


def read(folder: str | os.PathLike[str]) -> Config | None:
    """The settings of a checkpoint, or None if it has no record. Raises ConfigError if the record cannot be read."""
    file = Path(folder) / FILE
    if not file.is_file():
        return None
    known = {field.name for field in dataclasses.fields(Config)}
    try:
        settings = json.loads(file.read_text())["settings"]
        return Config(**{name: value for name, value in settings.items() if name in known})
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # ConfigError is a ValueError
        required, found = "the settings that the checkpoint was saved with", f"{type(error).__name__}: {error}"
        fix = "restore the file from a copy of the checkpoint, or remove it and set resume_any=True"
        raise ConfigError(explain(str(file), required=required, found=found, fix=fix)) from error


def check(folder: str | os.PathLike[str], config: Config, *, optimizer: bool = True, elsewhere: str = "") -> None:
    """Raise ConfigError if a checkpoint was saved with settings that do not match this run's.

    Args:
        optimizer: whether the optimizer states are loaded too; ``resume_any`` does not allow another kind of states.
        elsewhere: the framework's setting for the folder, if a run that was not meant to resume can choose another one.
    """
    found = read(folder)
    where = f"resuming {folder}"
    before = Config(precision="bf16") if found is None else found
    origin = " (no jetrl.json: saved without jetrl_patch)" if found is None else ""
    anew = f"start anew with another {elsewhere}, " if elsewhere else ""
    if optimizer and before.optimizer_states != config.optimizer_states:
        required, stored = f"optimizer_states={config.optimizer_states!r}", f"{before.optimizer_states!r}{origin}"
        fix = f"set optimizer_states={before.optimizer_states!r}, {anew}or load the checkpoint without its optimizer"
        raise ConfigError(explain(where, required=required, found=stored, fix=fix))
    if config.resume_any:
        return
    wanted = _numbers(config)
    saved = {**wanted, **{name: value for name, value in _numbers(before).items() if name in wanted}}
    if saved != wanted:
        fix = f"use the checkpoint's settings, {anew}or set resume_any=True if the change is intended"
        raise ConfigError(differences(where, required=wanted, found=saved, origin=origin, fix=fix))


def adapters_of(model: Any) -> dict[str, int]:
    """Rank and alpha of a model's LoRA; empty without adapters."""
    own = next(iter((getattr(model, "peft_config", None) or {}).values()), None)
    return {} if own is None else {"lora_rank": int(own.r), "lora_alpha": int(own.lora_alpha)}


def read_adapters(file: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Rank and alpha in a file of peft's or verl's; None if it does not exist."""
    if not Path(file).is_file():
        return None
    saved = json.loads(Path(file).read_text())
    return {"lora_rank": saved.get("r"), "lora_alpha": saved.get("lora_alpha")}


def check_adapters(where: str, model: Any, saved: dict[str, Any] | None, config: Config) -> None:
    """Raise ConfigError if rank or alpha of a checkpoint's adapters differ from the model's, unless ``resume_any`` is set.

    The frameworks compare neither, and another alpha would rescale all that the adapters have learned.
    """
    wanted = adapters_of(model)
    if config.quantized_rollout and not config.resume_any and wanted and saved is not None and saved != wanted:
        fix = "use the checkpoint's, or set resume_any=True if the change is intended"
        raise ConfigError(differences(f"resuming {where}", required=wanted, found=saved, fix=fix))


def _numbers(config: Config) -> dict[str, Any]:
    """The settings that decide a run's numbers. ``invariant_scale`` is not among them: it is checked with the weights."""
    names = ["precision", "kv_cache", "head_dtype"]
    if config.quantized_rollout:
        names += ["align", "exclude", "on_cut", "rollout_granularity"]
    if config.fp8_rollout:
        names.append("scale_format")
    found = {name: getattr(config.resolved(), name) for name in names}
    return found | {"smoothing": config.resolved_smoothing}
