"""Record settings, ``invariant_scale`` and LoRA's rank in OpenRLHF's DeepSpeed checkpoints, and compare them on resuming."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch import session
from jetrl_patch.config import Config
from jetrl_patch.config.launches import Place
from jetrl_patch.errors import JetrlError
from jetrl_patch.fp8.scaling import RECORD, take_over
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer import record
from jetrl_patch.trainer.rules import raised

#: rank and alpha of LoRA in OpenRLHF's client state
_ADAPTERS = "jetrl_adapters"


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error if OpenRLHF would resume from a checkpoint of other settings, before any actor starts.

    The actors check a folder that the driver cannot see.
    """
    folder = resumed(select).path
    if os.path.isdir(folder):
        yield from raised(lambda: record.check(folder, config, elsewhere="--ckpt.path"))


def resumed(select: Callable[[str], Any]) -> Place:
    """Return the folder of the tag that OpenRLHF resumes from; an empty path if it starts from scratch."""
    root = os.path.join(select("ckpt.path") or "", "_actor")
    tag = _latest(root) if select("ckpt.load_enable") else ""
    return Place("--ckpt.path", os.path.join(root, tag) if tag else "")


@replacement
def save_ckpt(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``DeepspeedStrategy.save_ckpt``: add ``jetrl.json`` to the tag's folder, and the rest to the client state.

    DeepSpeed's checkpoints hold no configuration of the model, so ``invariant_scale``, or rank and alpha of LoRA, go into
    OpenRLHF's client state. Rank 0 writes ``jetrl.json`` after OpenRLHF has deleted old checkpoints, or OpenRLHF would delete the
    new folder, which has no metric yet. DeepSpeed marks the checkpoint as the latest afterwards, so a run that is killed in
    between leaves no checkpoint without a record.
    """
    bound, config = inspect.signature(original).bind(self, *args, **kwargs), session.active_config()
    model = bound.arguments["model"]
    scale, adapters = getattr(_config_of(model), RECORD, None), record.adapters_of(getattr(model, "module", None))
    if config.quantized_rollout and (scale is not None or adapters):
        own = {RECORD: scale} if scale is not None else {_ADAPTERS: adapters}
        bound.arguments["client_state"] = {**(bound.arguments.get("client_state") or {}), **own}
    if not self.is_rank_0():
        return original(*bound.args, **bound.kwargs)
    save = model.save_checkpoint

    def save_checkpoint(save_dir: str, tag: str | None = None, **more: Any) -> Any:
        folder = os.path.join(save_dir, tag or f"global_step{model.global_steps}")  # DeepSpeed's own tag
        record.write(folder, config)
        return save(save_dir, tag=tag, **more)

    model.save_checkpoint = save_checkpoint
    try:
        return original(*bound.args, **bound.kwargs)
    finally:
        del model.save_checkpoint


@replacement
def load_ckpt(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``DeepspeedStrategy.load_ckpt``: compare what was recorded with the settings and the model of the run.

    Critics are never scaled and have no record of a scale.
    """
    bound, config = inspect.signature(original).bind(self, *args, **kwargs), session.active_config()
    bound.apply_defaults()
    given = bound.arguments
    tag = given["tag"] or _latest(given["load_dir"])
    folder = os.path.join(given["load_dir"], tag) if tag else ""
    if os.path.isdir(folder):
        with_states = given["load_optimizer_states"] and not given["load_module_only"]
        record.check(folder, config, optimizer=with_states)
    path, states = original(self, *args, **kwargs)
    hf_config = _config_of(given["model"])
    if config.quantized_rollout and path is not None and hf_config is not None:
        record.check_adapters(folder, given["model"].module, states.pop(_ADAPTERS, None), config)
        take_over(hf_config, states.pop(RECORD, None), str(given["load_dir"]))
    return path, states


def _config_of(engine: Any) -> Any:
    """The Hugging Face config of a DeepSpeed engine's model; None if it has none."""
    return getattr(getattr(engine, "module", None), "config", None)


def _latest(folder: str) -> str:
    """Return the tag that DeepSpeed loads by default, or an empty string."""
    file = os.path.join(folder, "latest")
    if not os.path.isfile(file):
        return ""
    with open(file) as text:
        return text.read().strip()
